// Random numbers of a device.
#include "random.h"

#include "scheduler.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>

#include <cstring>

namespace simulated {
namespace {

class DeviceGenerator final : public c10::GeneratorImpl {
 public:
  explicit DeviceGenerator(c10::DeviceIndex device)
      : GeneratorImpl(c10::Device(c10::DeviceType::PrivateUse1, device),
                      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override { state_ = {seed, 0}; }
  uint64_t current_seed() const override { return state_.seed; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return state_.seed;
  }
  void set_offset(uint64_t offset) override { state_.drawn = offset; }
  uint64_t get_offset() const override { return state_.drawn; }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == sizeof(State), "this is not the state of a simulated device's generator");
    std::memcpy(&state_, state.data(), sizeof(State));
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto bytes = at::empty({int64_t(sizeof(State))}, at::TensorOptions().dtype(at::kByte).device(at::kCPU));
    std::memcpy(bytes.mutable_data_ptr(), &state_, sizeof(State));
    return bytes.getIntrusivePtr();
  }
  uint64_t next_seed() { return state_.seed * 0x9e3779b97f4a7c15ULL + ++state_.drawn; }

 private:
  struct State {
    uint64_t seed = c10::default_rng_seed_val, drawn = 0;
  };
  GeneratorImpl* clone_impl() const override {
    auto* copy = new DeviceGenerator(device().index());
    copy->state_ = state_;
    return copy;
  }
  State state_;
};

}  // namespace

at::Generator new_generator(c10::DeviceIndex device) { return at::make_generator<DeviceGenerator>(device); }

const at::Generator& default_generator(c10::DeviceIndex device) {
  static auto* all = new std::vector<at::Generator>([] {
    std::vector<at::Generator> made;
    for (c10::DeviceIndex index = 0; index < kDevices; index++) made.push_back(new_generator(index));
    return made;
  }());
  return all->at(device);
}

at::Generator next_cpu_generator(const at::Generator& generator) {
  std::lock_guard lock(generator.unsafeGetGeneratorImpl()->mutex_);
  auto* own = dynamic_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl());
  TORCH_CHECK(own, "expected a generator of a simulated device, got one of ", generator.device());
  return at::make_generator<at::CPUGeneratorImpl>(own->next_seed());
}

}  // namespace simulated
