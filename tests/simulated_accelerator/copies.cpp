// Tensors without contents, views, and copies between the host and devices.
#include "operators.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

namespace simulated {
namespace {

std::atomic<int64_t> pageable{0}, late_unlocks{0};

const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(size, &allocator(), kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(size, stride, &allocator(), kKeys, c10::dtype_or_default(dtype));
}

// Bytes from the first to the last element.
size_t extent(const at::Tensor& tensor) {
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); i++) last += (tensor.size(i) - 1) * tensor.stride(i);
  return (last + 1) * tensor.element_size();
}

at::Tensor as_seen(const at::Tensor& tensor) {
  if (tensor.device().is_privateuseone()) return as_kernels_see(tensor);
  auto options = at::TensorOptions().dtype(tensor.scalar_type()).device(at::kCPU);
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
}

void copy_between_devices(const at::Tensor& source, const at::Tensor& target) {
  // The source's stream does it, after what the target's stream has enqueued, and the target's stream waits for it.
  auto& scheduler = Scheduler::get();
  auto from = current_stream(source.device().index()), to = current_stream(target.device().index());
  scheduler.enqueue(from, "wait", nullptr, scheduler.enqueue(to, "event", nullptr));
  auto work = [source = as_seen(source), target = as_seen(target)]() mutable { target.copy_(source); };
  scheduler.enqueue(to, "wait", nullptr, scheduler.enqueue(from, "copy between devices", work));
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  if (!target.numel()) return target;
  bool up = source.is_cpu(), down = target.is_cpu();
  if (!up && !down && source.device() != target.device()) {
    copy_between_devices(source, target);
    return target;
  }
  auto device = (down ? source : target).device().index();
  const at::Tensor& host = up ? source : target;
  const void* address = up || down ? host.data_ptr() : nullptr;
  size_t nbytes = address ? extent(host) : 0;
  bool locked = address && is_page_locked(address, nbytes);
  TORCH_CHECK(locked || !address || !is_page_locked(address, 1),
              "invalid argument: the copy begins in one registration of host memory and ends outside of it");
  bool later = !address || (non_blocking && locked);
  std::string name = up ? "copy to device" : down ? "copy to host" : "copy";
  auto work = [source = as_seen(source), target = as_seen(target), address, nbytes, later]() mutable {
    if (address && later && !is_page_locked(address, nbytes)) {
      late_unlocks++;
      throw std::runtime_error("the host memory was unlocked before it was copied");
    }
    target.copy_(source);
  };
  auto task = Scheduler::get().enqueue(current_stream(device), name, work);
  if (later) return target;
  if (non_blocking)
    pageable++;
  else
    count_synchronous("blocking " + name);
  Scheduler::get().wait_for(task);
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  if (target.sizes() != source.sizes()) target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Scalar local_scalar_dense(const at::Tensor& tensor) {
  count_synchronous("aten::_local_scalar_dense");
  Scheduler::get().wait_for_stream(current_stream(tensor.device().index()));
  return at::_local_scalar_dense(as_kernels_see(tensor));
}

at::Tensor as_strided(const at::Tensor& tensor, at::IntArrayRef size, at::IntArrayRef stride,
                      std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(tensor, size, stride, offset);
}

at::Tensor& set_storage(at::Tensor& tensor, at::Storage storage, int64_t offset, at::IntArrayRef size,
                        at::IntArrayRef stride) {
  return at::native::set_storage_cpu_(tensor, storage, offset, size, stride);
}

at::Tensor& set_empty(at::Tensor& tensor) {
  c10::DeviceGuard guard(tensor.device());
  auto made = at::empty({0}, tensor.options());
  return set_storage(tensor, made.storage(), 0, {0}, {1});
}

void record_stream(at::Tensor& tensor, at::Stream stream) {
  auto* address = static_cast<char*>(const_cast<void*>(tensor.storage().data()));
  memory(tensor.device().index()).record_stream(address, {stream.device_index(), stream.id()});
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", local_scalar_dense);
  library.impl("as_strided", as_strided);
  library.impl("view", at::native::view);
  library.impl("_reshape_alias", at::native::_reshape_alias);
  library.impl("unfold", at::native::unfold);
  library.impl("view_as_real", at::native::view_as_real);
  library.impl("view_as_complex", at::native::view_as_complex);
  library.impl("resize_", at::native::resize_);
  library.impl("set_", set_empty);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("set_.source_Tensor", at::native::set_tensor_);
  library.impl("record_stream", record_stream);
}

}  // namespace

int64_t pageable_copies() { return pageable; }
int64_t copies_from_unlocked_memory() { return late_unlocks; }
void forget_copies() { pageable = late_unlocks = 0; }

}  // namespace simulated
