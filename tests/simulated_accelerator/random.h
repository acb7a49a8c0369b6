// Random numbers of a device: a seed, and a count of the operations that drew from it.
#pragma once

#include <ATen/core/Generator.h>

namespace simulated {

const at::Generator& default_generator(c10::DeviceIndex device);
at::Generator new_generator(c10::DeviceIndex device);

// The CPU generator of the next operation that draws numbers: known when the operation is enqueued, so the numbers do not
// depend on when it runs.
at::Generator next_cpu_generator(const at::Generator& generator);

}  // namespace simulated
