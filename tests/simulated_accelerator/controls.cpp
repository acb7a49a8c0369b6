// What tests may ask and set, as a Python module.
#include "memory.h"
#include "operators.h"
#include "random.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

namespace py = pybind11;
using namespace simulated;

namespace simulated {
void initialize();
int64_t pageable_copies();
int64_t copies_from_unlocked_memory();
void forget_copies();
}  // namespace simulated

namespace {

std::map<std::string, int64_t> memory_statistics(int device) {
  auto found = memory(device).statistics();
  return {
      {"allocated_bytes", found.allocated.current},
      {"peak_allocated_bytes", found.allocated.peak},
      {"reserved_bytes", found.reserved.current},
      {"peak_reserved_bytes", found.reserved.peak},
      {"allocations", found.allocations.allocated},
      {"system_allocations", found.system_allocations},
      {"out_of_memory", found.out_of_memory},
      {"flushes", found.flushes},
  };
}

std::optional<Role> role(const std::string& name) {
  if (name == "early") return Role::kEarly;
  if (name == "late") return Role::kLate;
  TORCH_CHECK(name.empty(), "a role is early, late or empty, got ", name);
  return std::nullopt;
}

void reset() {
  Scheduler::get().reset();
  forget_synchronous();
  forget_copies();
  forget_page_lock_errors();
  for (c10::DeviceIndex device = 0; device < kDevices; device++) {
    memory(device).empty_cache();
    memory(device).set_limit(0);
    memory(device).occupy(0);
    memory(device).reset_peak();
  }
}

}  // namespace

PYBIND11_MODULE(simulated_accelerator, module) {
  py::call_guard<py::gil_scoped_release> no_gil;
  auto scheduler = [] () -> Scheduler& { return Scheduler::get(); };
  initialize();
  module.attr("DEVICES") = int(kDevices);
  // The schedule.
  module.def("run_freely", [=](uint64_t seed) { scheduler().run_freely(seed); }, no_gil);
  module.def("run_adversarially", [=](uint64_t seed) { scheduler().run_adversarially(seed); }, no_gil);
  module.def("set_role", [=](int device, int64_t stream, const std::string& name) {
    scheduler().set_role({c10::DeviceIndex(device), stream}, role(name));
  }, no_gil);
  module.def("name_stream", [=](int device, int64_t stream, const std::string& name) {
    scheduler().name_stream({c10::DeviceIndex(device), stream}, name);
  }, no_gil);
  module.def("register_thread", [=] { return scheduler().register_thread(); }, no_gil);
  module.def("unregister_thread", [=](int64_t number) { scheduler().unregister_thread(number); }, no_gil);
  module.def("host_blocks", [=](int64_t number) { scheduler().host_blocks(number); }, no_gil);
  module.def("host_unblocks", [=](int64_t number) { scheduler().host_unblocks(number); }, no_gil);
  module.def("wait_for_other_threads", [=] { scheduler().wait_for_other_threads(); }, no_gil);
  module.def("set_fallback_after", [=](double seconds) { scheduler().set_fallback_after(seconds); }, no_gil);
  module.def("fallbacks", [=] { return scheduler().fallbacks(); }, no_gil);
  module.def("inject_fault", [=](int device, int64_t after) { scheduler().inject_fault(device, after); }, no_gil);
  module.def("journal", [=] { return scheduler().journal(); });
  module.def("keep_journal", [=](size_t tasks) { scheduler().keep_journal(tasks); }, no_gil);
  module.def("settle", [=] { scheduler().settle(); }, no_gil);
  module.def("reset", reset, no_gil);
  // Counts.
  module.def("synchronous_operations", synchronous_operations);
  module.def("pageable_copies", pageable_copies);
  module.def("copies_from_unlocked_memory", copies_from_unlocked_memory);
  // Random numbers: the seed, and how many operations drew numbers since.
  module.def("random_state", [](int device) {
    auto& generator = default_generator(device);
    auto numbers = {generator.current_seed(), generator.get_offset()};
    return std::vector<int64_t>(numbers.begin(), numbers.end());
  });
  module.def("set_random_state", [](int device, int64_t seed, int64_t drawn) {
    auto generator = default_generator(device);
    generator.set_current_seed(seed);
    generator.set_offset(drawn);
  });
  // Memory.
  module.def("memory_statistics", memory_statistics);
  module.def("set_memory_limit", [](int device, size_t nbytes) { memory(device).set_limit(nbytes); }, no_gil);
  module.def("occupy", [](int device, size_t nbytes) { memory(device).occupy(nbytes); }, no_gil);
  module.def("host_register", host_register, no_gil);
  module.def("host_unregister", host_unregister, no_gil);
  module.def("page_locked_bytes", page_locked_bytes);
  module.def("unmapped_while_locked", unmapped_while_locked);
}
