// Attention kernels: by document offsets, dense with an added bias, and the choice that scaled_dot_product_attention makes.
//
// All compute in float32 and round once. The log-sum-exp that a backward is given counts, not one of its own, because
// attention with sinks gives another than the forward returned.
#include "operators.h"

#include <ATen/ATen.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <torch/library.h>
#include <torch/version.h>

// torch 2.12 added the last two arguments of _flash_attention_forward.
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 12
#define PAGED_ARGUMENTS
#else
#define PAGED_ARGUMENTS , const Maybe&, std::optional<int64_t>
#endif

namespace simulated {
namespace {

using at::Tensor;
using Maybe = std::optional<Tensor>;

// Which pairs count, and how scores are scaled. A window of -1 has no limit.
struct Rules {
  bool causal;
  int64_t left, right;
  double scale;
};

Tensor repeated(const Tensor& heads, const Tensor& query) {  // [B, K, S, C] -> [B, H, S, C]
  return heads.to(at::kFloat).repeat_interleave(query.size(1) / heads.size(1), 1);
}

Tensor scores(const Tensor& query, const Tensor& key, const Tensor& bias, const Rules& rules) {  // [B, H, T, S]
  auto found = query.to(at::kFloat).matmul(repeated(key, query).transpose(2, 3)) * rules.scale;
  if (bias.defined()) found = found + bias.to(at::kFloat);
  auto t = at::arange(query.size(2)).unsqueeze(1), s = at::arange(key.size(2));
  auto right = rules.causal ? 0 : rules.right;
  if (right >= 0) found = found.masked_fill(s > t + right, -INFINITY);
  if (rules.left >= 0) found = found.masked_fill(s < t - rules.left, -INFINITY);
  return found;
}

void forward(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& bias, const Rules& rules,
             Tensor output, Tensor log_sums) {
  auto found = scores(query, key, bias, rules);
  auto sums = found.logsumexp(3);
  auto shares = (found - sums.unsqueeze(3)).exp().nan_to_num(0);  // a row without any pair gives 0
  output.copy_(shares.matmul(repeated(value, query)));
  log_sums.copy_(sums);
}

struct Gradients {
  Tensor query, key, value, bias;
};

void backward(const Tensor& grad, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& bias,
              const Rules& rules, const Tensor& output, const Tensor& log_sums, const Gradients& gradients) {
  auto wide = grad.to(at::kFloat);
  auto shares = (scores(query, key, bias, rules) - log_sums.unsqueeze(3)).exp().nan_to_num(0);
  auto moved = (wide * output.to(at::kFloat)).sum(3, true);
  auto of_scores = shares * (wide.matmul(repeated(value, query).transpose(2, 3)) - moved);  // [B, H, T, S]
  auto scaled = of_scores * rules.scale;
  auto grouped = [&](const Tensor& full, const Tensor& like) {  // each kv head adds up its query heads
    return full.unflatten(1, {like.size(1), query.size(1) / like.size(1)}).sum(2);
  };
  if (gradients.query.defined()) gradients.query.copy_(scaled.matmul(repeated(key, query)));
  if (gradients.key.defined())
    gradients.key.copy_(grouped(scaled.transpose(2, 3).matmul(query.to(at::kFloat)), key));
  if (gradients.value.defined()) gradients.value.copy_(grouped(shares.transpose(2, 3).matmul(wide), value));
  if (gradients.bias.defined()) gradients.bias.copy_(at::sum_to(of_scores, bias.sizes()));
}

double scale_of(const Tensor& query, std::optional<double> scale) {
  return scale.value_or(1.0 / std::sqrt(double(query.size(-1))));
}

// ---- By offsets: documents one after another, [N, H, C].

void check_flash(const Tensor& query, const Maybe& offsets) {
  auto dtype = query.scalar_type();
  TORCH_CHECK(dtype == at::kHalf || dtype == at::kBFloat16, "flash attention takes 16 bits, got ", dtype);
  TORCH_CHECK(query.size(-1) % 8 == 0 && query.size(-1) <= 256, "flash attention has no heads of ", query.size(-1));
  TORCH_CHECK(offsets && offsets->scalar_type() == at::kInt, "the simulated device wants offsets in int32");
}

template <class Work>
void for_each_document(const Tensor& offsets, int64_t longest, Work work) {
  auto* starts = offsets.const_data_ptr<int32_t>();
  for (int64_t i = 0; i + 1 < offsets.numel(); i++)
    if (starts[i + 1] > starts[i]) {
      TORCH_CHECK(starts[i + 1] - starts[i] <= longest, "a document is longer than ", longest, " tokens");
      work(starts[i], starts[i + 1]);
    }
}

Tensor part(const Tensor& rows, int64_t start, int64_t stop) {  // [N, H, C] -> [1, H, n, C]
  return rows.slice(0, start, stop).transpose(0, 1).unsqueeze(0);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> flash_forward(
    const Tensor& query, const Tensor& key, const Tensor& value, const Maybe& offsets_q, const Maybe& offsets_k,
    int64_t longest, int64_t, double dropout, bool causal, bool, std::optional<double> scale, std::optional<int64_t> left,
    std::optional<int64_t> right, const Maybe&, const Maybe& PAGED_ARGUMENTS) {
  check_flash(query, offsets_q);
  TORCH_CHECK(dropout == 0, "the simulated flash attention has no dropout");
  auto output = at::empty_like(query);
  auto log_sums = new_tensor({query.size(1), query.size(0)}, at::kFloat, query);
  Rules rules{causal, left.value_or(-1), right.value_or(-1), scale_of(query, scale)};
  auto work = [rules, longest, q = as_kernels_see(query), k = as_kernels_see(key), v = as_kernels_see(value),
               offsets = as_kernels_see(*offsets_q), out = as_kernels_see(output), sums = as_kernels_see(log_sums)] {
    for_each_document(offsets, longest, [&](int64_t start, int64_t stop) {
      forward(part(q, start, stop), part(k, start, stop), part(v, start, stop), {}, rules, part(out, start, stop),
              sums.slice(1, start, stop).unsqueeze(0));
    });
  };
  launch("aten::_flash_attention_forward", query, work);
  auto state = new_tensor({2}, at::kUInt64, query).zero_();
  return {output, log_sums, state, new_tensor({0}, at::kUInt64, query), new_tensor({0}, query.scalar_type(), query)};
}

std::tuple<Tensor, Tensor, Tensor> flash_backward(
    const Tensor& grad, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& output,
    const Tensor& log_sums, const Tensor& offsets_q, const Tensor& offsets_k, int64_t longest, int64_t, double,
    bool causal,
    const Tensor&, const Tensor&, std::optional<double> scale, std::optional<int64_t> left,
    std::optional<int64_t> right) {
  check_flash(query, offsets_q);
  // As CUDA's kernel: tokens of no document stay undefined, and the scratch has a block more for each document.
  auto grad_query = at::empty_like(query), grad_key = at::empty_like(key), grad_value = at::empty_like(value);
  auto scratch = new_tensor({query.size(0) + 128 * (offsets_q.numel() - 1), query.size(1), query.size(2)}, at::kFloat,
                            query);
  Rules rules{causal, left.value_or(-1), right.value_or(-1), scale_of(query, scale)};
  auto work = [rules, longest, g = as_kernels_see(grad), q = as_kernels_see(query), k = as_kernels_see(key),
               v = as_kernels_see(value), out = as_kernels_see(output), sums = as_kernels_see(log_sums),
               offsets = as_kernels_see(offsets_q), gq = as_kernels_see(grad_query), gk = as_kernels_see(grad_key),
               gv = as_kernels_see(grad_value)] {
    for_each_document(offsets, longest, [&](int64_t start, int64_t stop) {
      backward(part(g, start, stop), part(q, start, stop), part(k, start, stop), part(v, start, stop), {}, rules,
               part(out, start, stop), sums.slice(1, start, stop).unsqueeze(0),
               {part(gq, start, stop), part(gk, start, stop), part(gv, start, stop), {}});
    });
  };
  launch("aten::_flash_attention_backward", query, work);
  return {grad_query, grad_key, grad_value};
}

// ---- Dense: [B, H, T, C], key and value may have fewer heads.

std::pair<Tensor, Tensor> dense_forward(const std::string& name, const Tensor& query, const Tensor& key,
                                        const Tensor& value, const Maybe& bias, double dropout, bool causal,
                                        std::optional<double> scale, int64_t rows) {
  TORCH_CHECK(dropout == 0, "the simulated attention has no dropout");
  // [B, T, H, C] in memory, as the kernels of cards give it.
  auto output = new_tensor({query.size(0), query.size(2), query.size(1), value.size(3)}, query.scalar_type(), query);
  output = output.transpose(1, 2);
  auto log_sums = new_tensor({query.size(0), query.size(1), rows}, at::kFloat, query);
  Rules rules{causal, -1, -1, scale_of(query, scale)};
  auto work = [rules, q = as_kernels_see(query), k = as_kernels_see(key), v = as_kernels_see(value),
               added = as_kernels_see(bias.value_or(Tensor())), out = as_kernels_see(output),
               sums = as_kernels_see(log_sums)] {
    forward(q, k, v, added, rules, out, sums.slice(2, 0, q.size(2)));
    sums.slice(2, q.size(2)).fill_(INFINITY);
  };
  launch(name, query, work);
  return {output, log_sums};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> dense_backward(
    const std::string& name, const Tensor& grad, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& bias, std::array<bool, 4> wanted, const Tensor& output, const Tensor& log_sums, bool causal,
    std::optional<double> scale) {
  std::vector<Tensor> made;
  const Tensor* of[] = {&query, &key, &value, &bias};
  for (int i = 0; i < 4; i++) made.push_back(wanted[i] && of[i]->defined() ? at::empty_like(*of[i]) : Tensor());
  Rules rules{causal, -1, -1, scale_of(query, scale)};
  Gradients gradients{as_kernels_see(made[0]), as_kernels_see(made[1]), as_kernels_see(made[2]), as_kernels_see(made[3])};
  auto work = [rules, gradients, g = as_kernels_see(grad), q = as_kernels_see(query), k = as_kernels_see(key),
               v = as_kernels_see(value), added = as_kernels_see(bias), out = as_kernels_see(output),
               sums = as_kernels_see(log_sums)] {
    backward(g, q, k, v, added, rules, out, sums.slice(2, 0, q.size(2)), gradients);
  };
  launch(name, query, work);
  return {made[0], made[1], made[2], made[3]};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> efficient_forward(const Tensor& query, const Tensor& key,
                                                             const Tensor& value, const Maybe& bias, bool,
                                                             double dropout, bool causal, std::optional<double> scale) {
  TORCH_CHECK(query.size(1) == key.size(1), "this kernel takes as many key heads as query heads");
  auto rows = (query.size(2) + 31) / 32 * 32;  // padded, as on a card
  auto [output, log_sums] = dense_forward("aten::_scaled_dot_product_efficient_attention", query, key, value, bias,
                                          dropout, causal, scale, rows);
  auto none = new_tensor({}, at::kLong, query).zero_();
  return {output, log_sums, none, none};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> efficient_backward(
    const Tensor& grad, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& bias,
    const Tensor& output, const Tensor& log_sums, const Tensor&, const Tensor&, double, std::array<bool, 4> wanted,
    bool causal, std::optional<double> scale) {
  TORCH_CHECK(log_sums.size(2) % 32 == 0, "this kernel wants a log-sum-exp with rows of a multiple of 32");
  return dense_backward("aten::_scaled_dot_product_efficient_attention_backward", grad, query, key, value, bias,
                        wanted, output, log_sums, causal, scale);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor> overrideable_forward(
    const Tensor& query, const Tensor& key, const Tensor& value, const Maybe& bias, double dropout, bool causal, bool,
    std::optional<double> scale) {
  auto [output, log_sums] = dense_forward("aten::scaled_dot_product_attention", query, key, value, bias, dropout,
                                          causal, scale, query.size(2));
  auto none = new_tensor({0}, at::kInt, query);
  return {output, log_sums, none, none, query.size(2), key.size(2), none, none, none};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> overrideable_backward(
    const Tensor& grad, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& bias,
    std::array<bool, 4> wanted, const Tensor& output, const Tensor& log_sums, const Tensor&, const Tensor&, c10::SymInt,
    c10::SymInt, double, bool causal, const Tensor&, const Tensor&, std::optional<double> scale) {
  return dense_backward("aten::scaled_dot_product_attention_backward", grad, query, key, value, bias, wanted, output,
                        log_sums, causal, scale);
}

int64_t choose(const Tensor&, const Tensor&, const Tensor&, const Maybe&, double, bool, std::optional<double>, bool) {
  return static_cast<int64_t>(sdp::SDPBackend::overrideable);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("_flash_attention_forward", flash_forward);
  library.impl("_flash_attention_backward", flash_backward);
  library.impl("_scaled_dot_product_efficient_attention", efficient_forward);
  library.impl("_scaled_dot_product_efficient_attention_backward", efficient_backward);
  library.impl("_scaled_dot_product_fused_attention_overrideable", overrideable_forward);
  library.impl("_scaled_dot_product_fused_attention_overrideable_backward", overrideable_backward);
}

}  // namespace
}  // namespace simulated

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &simulated::choose)
}  // namespace at::native
