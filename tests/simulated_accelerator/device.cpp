// What PyTorch asks of a device: the current device and stream, events, random numbers.
#include "memory.h"
#include "random.h"

#include <ATen/Context.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace simulated {
namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;

c10::DeviceIndex index_of(c10::Device device) { return device.index() < 0 ? current_device() : device.index(); }
c10::Stream as_stream(StreamKey key) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, key.device), key.id);
}
StreamKey as_key(const c10::Stream& stream) { return {stream.device_index(), stream.id()}; }
TaskPtr& as_task(void* event) { return *static_cast<TaskPtr*>(event); }

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  static constexpr c10::DeviceType static_type = kType;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override { return kType; }
  c10::Device getDevice() const override { return {kType, current_device()}; }
  void setDevice(c10::Device device) const override { set_current_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() < kDevices) set_current_device(device.index());
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto old = getDevice();
    setDevice(device);
    return old;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return c10::DeviceCapability(); }

  c10::Stream getStream(c10::Device device) const noexcept override {
    return as_stream(current_stream(index_of(device)));
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return as_stream({index_of(device), 0}); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return as_stream(Scheduler::get().new_stream(index_of(device)));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override {
    auto old = getStream(stream.device());
    set_current_stream(as_key(stream));
    return old;
  }
  bool queryStream(const c10::Stream& stream) const override { return Scheduler::get().is_idle(as_key(stream)); }
  void synchronizeStream(const c10::Stream& stream) const override {
    Scheduler::get().wait_for_stream(as_key(stream));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    Scheduler::get().wait_for_device(device);
  }

  // An event is the task that marks the point where it was recorded last.
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new TaskPtr;
    as_task(*event) = Scheduler::get().enqueue(as_key(stream), "event", nullptr);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (!event || as_task(event)->stream == as_key(stream)) return;
    Scheduler::get().enqueue(as_key(stream), "wait", nullptr, as_task(event));
  }
  bool queryEvent(void* event) const override { return !event || Scheduler::get().is_done(as_task(event)); }
  void synchronizeEvent(void* event) const override {
    if (event) Scheduler::get().wait_for(as_task(event));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<TaskPtr*>(event);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    auto& scheduler = Scheduler::get();
    return (scheduler.time_ns(as_task(second)) - scheduler.time_ns(as_task(first))) / 1e6;
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    if (data) memory(data.device().index()).record_stream(static_cast<char*>(data.get()), as_key(stream));
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_current_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    auto old = current_device();
    set_current_device(device);
    return old;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* data) const override { return is_page_locked(data, 1); }
  c10::Device getDeviceFromPtr(void* data) const override {
    for (c10::DeviceIndex device = 0; device < kDevices; device++)
      if (memory(device).owns(data)) return {kType, device};
    TORCH_CHECK(false, "no simulated device has this address");
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device < 0 ? current_device() : device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return new_generator(device < 0 ? current_device() : device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    auto* found = storage.unsafeGetStorageImpl();
    TORCH_CHECK(found->nbytes() == 0 || nbytes == 0, "a storage of a simulated device can only be filled or emptied");
    found->set_data_ptr_noswap(allocator().allocate(nbytes));
    found->set_nbytes(nbytes);
  }
};

const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace

// Before this PyTorch takes no host memory for page-locked.
void initialize() { at::globalContext().lazyInitDevice(kType); }

}  // namespace simulated
