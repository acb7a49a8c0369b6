// Products that the CPU has no kernel for: grouped ones, those with a float32 result of 16-bit matrices; and the RMS norm.
#include "operators.h"

#include <ATen/ATen.h>
#include <torch/library.h>

namespace simulated {
namespace {

using at::Tensor;
using Maybe = std::optional<Tensor>;

Tensor wide_product(const Tensor& a, const Tensor& b) { return a.to(at::kFloat).matmul(b.to(at::kFloat)); }

// ---- Grouped products.

// A card's kernel reads 16 bytes at once.
void check_alignment(const Tensor& matrix) {
  auto rows = matrix.stride(-2), columns = matrix.stride(-1);
  auto wide = columns == 1 ? rows : columns;
  TORCH_CHECK((rows == 1 || columns == 1) && wide * matrix.element_size() % 16 == 0,
              "a grouped product wants strides of a multiple of 16 bytes, got ", matrix.strides());
}

void grouped(const Tensor& a, const Tensor& b, const Tensor& offsets, Tensor output) {
  auto* stops = offsets.const_data_ptr<int32_t>();
  int64_t start = 0;
  for (int64_t i = 0; i < offsets.numel(); i++) {
    int64_t stop = stops[i];
    if (a.dim() == 2 && b.dim() == 3)
      output.slice(0, start, stop).copy_(wide_product(a.slice(0, start, stop), b[i]));
    else if (a.dim() == 3)
      output.slice(1, start, stop).copy_(wide_product(a[i], b.slice(1, start, stop)));
    else
      output[i].copy_(wide_product(a.slice(1, start, stop), b.slice(0, start, stop)));
    start = stop;
  }
}

Tensor grouped_mm(const Tensor& a, const Tensor& b, const Maybe& offsets, const Maybe& bias,
                  std::optional<at::ScalarType> dtype) {
  TORCH_CHECK(a.scalar_type() == at::kBFloat16 && b.scalar_type() == at::kBFloat16 && !bias,
              "a grouped product takes bfloat16, and no bias");
  TORCH_CHECK(dtype.value_or(at::kBFloat16) == at::kBFloat16, "a grouped product gives bfloat16");
  if (a.dim() == 3 && b.dim() == 3) return a.bmm(b);
  TORCH_CHECK(offsets && offsets->scalar_type() == at::kInt, "a grouped product wants its offsets in int32");
  check_alignment(a);
  check_alignment(b);
  std::vector<int64_t> size{a.size(-2), b.size(-1)};
  if (a.dim() == 2 && b.dim() == 2) size.insert(size.begin(), offsets->numel());
  auto output = new_tensor(size, at::kBFloat16, a);
  launch("aten::_grouped_mm", a, [x = as_kernels_see(a), y = as_kernels_see(b), stops = as_kernels_see(*offsets),
                                  out = as_kernels_see(output)] { grouped(x, y, stops, out); });
  return output;
}

// ---- Products with a float32 result.

void check_dtypes(const Tensor& a, const Tensor& b, at::ScalarType dtype) {
  bool half = a.scalar_type() == at::kHalf || a.scalar_type() == at::kBFloat16;
  TORCH_CHECK(a.scalar_type() == b.scalar_type() && (dtype == a.scalar_type() || (half && dtype == at::kFloat)),
              "no product of ", a.scalar_type(), " and ", b.scalar_type(), " to ", dtype);
}

Tensor& product_out(const Tensor& a, const Tensor& b, at::ScalarType dtype, Tensor& out) {
  check_dtypes(a, b, dtype);
  TORCH_CHECK(out.scalar_type() == dtype, "the output should have dtype ", dtype);
  launch("aten::mm.dtype", a, [x = as_kernels_see(a), y = as_kernels_see(b), to = as_kernels_see(out)]() mutable {
    to.copy_(wide_product(x, y));
  });
  return out;
}

Tensor product(const Tensor& a, const Tensor& b, at::ScalarType dtype) {
  auto size = a.sizes().vec();
  size.back() = b.size(-1);
  auto out = new_tensor(size, dtype, a);
  return product_out(a, b, dtype, out);
}

Tensor& sum_out(const Tensor& added, const Tensor& a, const Tensor& b, at::ScalarType dtype, const at::Scalar& beta,
                const at::Scalar& alpha, Tensor& out) {
  check_dtypes(a, b, dtype);
  TORCH_CHECK(out.scalar_type() == dtype, "the output should have dtype ", dtype);
  TORCH_CHECK(added.scalar_type() == dtype || added.scalar_type() == a.scalar_type(), "what is added has dtype ",
              added.scalar_type());
  auto work = [alpha, beta, plus = as_kernels_see(added), x = as_kernels_see(a), y = as_kernels_see(b),
               to = as_kernels_see(out)]() mutable {
    auto found = wide_product(x, y) * alpha;
    if (beta.toDouble() != 0) found = found + plus.to(at::kFloat) * beta;  // with 0 it may hold anything
    to.copy_(found);
  };
  launch("aten::addmm.dtype", a, work);
  return out;
}

Tensor sum(const Tensor& added, const Tensor& a, const Tensor& b, at::ScalarType dtype, const at::Scalar& beta,
           const at::Scalar& alpha) {
  auto size = a.sizes().vec();
  size.back() = b.size(-1);
  auto out = new_tensor(size, dtype, a);
  return sum_out(added, a, b, dtype, beta, alpha, out);
}

// ---- RMS norm over the last dimensions.

at::DimVector last_dims(size_t count) {
  at::DimVector dims;
  for (size_t i = 0; i < count; i++) dims.push_back(-int64_t(i) - 1);
  return dims;
}

std::tuple<Tensor, Tensor> rms_norm(const Tensor& input, at::IntArrayRef shape, const Maybe& weight,
                                    std::optional<double> eps) {
  auto output = at::empty_like(input);
  auto size = input.sizes().vec();
  for (size_t i = 0; i < shape.size(); i++) size[size.size() - 1 - i] = 1;
  auto scale = new_tensor(size, at::kFloat, input);
  double added = eps.value_or(std::numeric_limits<float>::epsilon());
  auto work = [dims = last_dims(shape.size()), added, x = as_kernels_see(input),
               w = as_kernels_see(weight.value_or(Tensor())), out = as_kernels_see(output),
               found = as_kernels_see(scale)] {
    auto wide = x.to(at::kFloat);
    found.copy_((wide.square().mean(dims, true) + added).rsqrt());
    auto normed = wide * found;
    out.copy_(w.defined() ? normed * w.to(at::kFloat) : normed);
  };
  launch("aten::_fused_rms_norm", input, work);
  return {output, scale};
}

std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& grad, const Tensor& input, at::IntArrayRef shape,
                                             const Tensor& scale, const Maybe& weight, std::array<bool, 2> wanted) {
  bool has_weight = weight && weight->defined();
  auto grad_input = wanted[0] ? at::empty_like(input) : Tensor();
  auto grad_weight = wanted[1] && has_weight ? at::empty_like(*weight) : Tensor();
  auto work = [dims = last_dims(shape.size()), g = as_kernels_see(grad), x = as_kernels_see(input),
               found = as_kernels_see(scale), w = as_kernels_see(weight.value_or(Tensor())),
               of_input = as_kernels_see(grad_input), of_weight = as_kernels_see(grad_weight)] {
    auto wide = g.to(at::kFloat), normed = x.to(at::kFloat) * found;
    if (of_weight.defined()) of_weight.copy_(at::sum_to(wide * normed, of_weight.sizes()));
    auto inner = w.defined() ? wide * w.to(at::kFloat) : wide;
    if (of_input.defined()) of_input.copy_(found * (inner - normed * (inner * normed).mean(dims, true)));
  };
  launch("aten::_fused_rms_norm_backward", input, work);
  return {grad_input, grad_weight};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("_grouped_mm", grouped_mm);
  library.impl("mm.dtype", product);
  library.impl("mm.dtype_out", product_out);
  library.impl("bmm.dtype", product);
  library.impl("bmm.dtype_out", product_out);
  library.impl("addmm.dtype", sum);
  library.impl("addmm.dtype_out", sum_out);
  library.impl("baddbmm.dtype", sum);
  library.impl("baddbmm.dtype_out", sum_out);
  library.impl("_fused_rms_norm", rms_norm);
  library.impl("_fused_rms_norm_backward", rms_norm_backward);
}

}  // namespace
}  // namespace simulated
