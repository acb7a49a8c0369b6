// How operations get to a stream.
#pragma once

#include "memory.h"

#include <ATen/core/Tensor.h>

namespace simulated {

// The tensor's memory as kernels see it, on the CPU, without owning anything.
at::Tensor as_kernels_see(const at::Tensor& tensor);
at::Tensor new_tensor(at::IntArrayRef size, at::ScalarType dtype, const at::Tensor& like);

// Enqueues `kernel`, which must only use what `as_kernels_see` gave. `like` names the device.
void launch(const std::string& name, const at::Tensor& like, std::function<void()> kernel);

}  // namespace simulated
