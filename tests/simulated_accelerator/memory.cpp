// The memory of each device: an arena that is mapped twice, cached by stream, and poisoned when it is freed.
#include "memory.h"

#include <c10/util/Exception.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

namespace simulated {
namespace {

constexpr size_t kArenaBytes = size_t(8) << 30;  // of addresses; pages are there once they are written
constexpr size_t kDefaultLimit = size_t(4) << 30;
constexpr size_t kBlock = 512;
constexpr size_t kSegment = 16 << 10;
constexpr int kPoison = 0xff;  // NaN in every floating dtype, odd in every integer dtype

size_t rounded(size_t nbytes, size_t unit) { return (nbytes + unit - 1) / unit * unit; }

}  // namespace

char* FreeRanges::take(size_t nbytes) {
  auto found = by_size_.lower_bound({nbytes, nullptr});
  if (found == by_size_.end()) return nullptr;
  auto [size, address] = *found;
  erase(by_address_.find(address));
  if (size > nbytes) insert(address + nbytes, size - nbytes);
  return address;
}

void FreeRanges::give(char* address, size_t nbytes) {
  auto after = by_address_.lower_bound(address);
  if (after != by_address_.end() && address + nbytes == after->first) {
    nbytes += after->second;
    auto merged = after++;
    erase(merged);
  }
  if (after != by_address_.begin()) {
    auto before = std::prev(after);
    if (before->first + before->second == address) {
      address = before->first;
      nbytes += before->second;
      erase(before);
    }
  }
  insert(address, nbytes);
}

std::map<char*, size_t> FreeRanges::take_all() {
  by_size_.clear();
  return std::exchange(by_address_, {});
}

void FreeRanges::insert(char* address, size_t nbytes) {
  by_address_[address] = nbytes;
  by_size_.insert({nbytes, address});
}

void FreeRanges::erase(std::map<char*, size_t>::iterator range) {
  by_size_.erase({range->second, range->first});
  by_address_.erase(range);
}

DeviceMemory::DeviceMemory(c10::DeviceIndex device) : device_(device), limit_(kDefaultLimit) {
  int file = memfd_create("simulated device memory", MFD_CLOEXEC);
  TORCH_CHECK(file >= 0 && ftruncate(file, kArenaBytes) == 0, "no memory for a simulated device");
  auto map = [&](int protection) {
    void* start = mmap(nullptr, kArenaBytes, protection, MAP_SHARED | MAP_NORESERVE, file, 0);
    TORCH_CHECK(start != MAP_FAILED, "no addresses for a simulated device");
    return static_cast<char*>(start);
  };
  locked_ = map(PROT_NONE);
  open_ = map(PROT_READ | PROT_WRITE);
  close(file);
  system_.give(locked_, kArenaBytes);
}

bool DeviceMemory::owns(const void* address) const {
  auto start = static_cast<const char*>(address);
  return start >= locked_ && start < locked_ + kArenaBytes;
}

// Enqueued in the order of the stream that freed the memory or asked for it, as whatever used it before.
void DeviceMemory::poison(StreamKey stream, char* address, size_t nbytes) noexcept {
  auto work = [open = open_address(address), nbytes] { std::memset(open, kPoison, nbytes); };
  Scheduler::get().enqueue_always(stream, "poison", work);
}

char* DeviceMemory::allocate(size_t nbytes) {
  nbytes = rounded(nbytes, kBlock);
  auto stream = current_stream(device_);
  reuse_pending();
  size_t fresh = 0;
  char* address = take(stream, nbytes, fresh);
  if (!address) {
    // As CUDA's allocator does: wait for the device, give everything cached back, and try once more.
    count_synchronous("flush of cached memory");
    Scheduler::get().wait_for_device(device_);
    empty_cache();
    address = take(stream, nbytes, fresh);
  }
  std::unique_lock lock(mutex_);
  if (!address) {
    statistics_.out_of_memory++;
    TORCH_CHECK_WITH(OutOfMemoryError, false, "simulated:", int(device_), " out of memory. Tried to allocate ",
                     nbytes, " bytes. It has ", limit_, " bytes, ", statistics_.allocated.current,
                     " of them are allocated, and other processes have ", occupied_, " bytes.");
  }
  blocks_[address] = {nbytes, stream, {}};
  statistics_.allocated.increase(nbytes);
  statistics_.allocations.increase(1);
  lock.unlock();
  if (fresh) poison(stream, address, fresh);
  return address;
}

char* DeviceMemory::take(StreamKey stream, size_t nbytes, size_t& fresh) {
  std::lock_guard lock(mutex_);
  auto& cached = cached_[stream];
  if (char* address = cached.take(nbytes)) return address;
  auto segment = rounded(nbytes, kSegment);
  if (statistics_.reserved.current + segment + occupied_ > limit_) return nullptr;
  char* address = system_.take(segment);
  if (!address) return nullptr;
  statistics_.reserved.increase(segment);
  statistics_.system_allocations++;
  if (segment > nbytes) cached.give(address + nbytes, segment - nbytes);
  fresh = segment;
  return address;
}

void DeviceMemory::release(char* address) noexcept {
  std::unique_lock lock(mutex_);
  auto found = blocks_.find(address);
  if (found == blocks_.end()) return;
  auto block = std::move(found->second);
  blocks_.erase(found);
  statistics_.allocated.decrease(block.nbytes);
  statistics_.allocations.decrease(1);
  lock.unlock();
  if (block.users.empty()) {
    poison(block.stream, address, block.nbytes);
    lock.lock();
    cached_[block.stream].give(address, block.nbytes);
    return;
  }
  Pending pending{address, block, {}};
  for (auto& user : block.users)
    pending.after.push_back(Scheduler::get().enqueue_always(user, "end of use", nullptr));
  lock.lock();
  pending_.push_back(std::move(pending));
}

void DeviceMemory::record_stream(char* address, StreamKey stream) {
  std::lock_guard lock(mutex_);
  auto found = blocks_.find(address);
  if (found != blocks_.end() && !(found->second.stream == stream)) found->second.users.insert(stream);
}

// Memory that other streams used can be reused once they have passed the point where it was freed.
void DeviceMemory::reuse_pending() {
  std::vector<Pending> ready;
  {
    std::lock_guard lock(mutex_);
    for (size_t i = pending_.size(); i-- > 0;) {
      bool done = true;
      for (auto& task : pending_[i].after) done = done && Scheduler::get().has_passed(task);
      if (!done) continue;
      ready.push_back(std::move(pending_[i]));
      pending_.erase(pending_.begin() + i);
    }
  }
  for (auto& one : ready) {
    poison(one.block.stream, one.address, one.block.nbytes);
    std::lock_guard lock(mutex_);
    cached_[one.block.stream].give(one.address, one.block.nbytes);
  }
}

void DeviceMemory::empty_cache() {
  reuse_pending();
  std::lock_guard lock(mutex_);
  for (auto& [stream, cached] : cached_)
    for (auto& [address, nbytes] : cached.take_all()) {
      system_.give(address, nbytes);
      statistics_.reserved.decrease(nbytes);
      statistics_.system_frees++;
    }
  statistics_.flushes++;
}

void DeviceMemory::set_limit(size_t nbytes) {
  TORCH_CHECK(nbytes <= kArenaBytes, "a simulated device has at most ", kArenaBytes, " bytes");
  std::lock_guard lock(mutex_);
  limit_ = nbytes ? nbytes : kDefaultLimit;
}

void DeviceMemory::occupy(size_t nbytes) {
  std::lock_guard lock(mutex_);
  occupied_ = nbytes;
}

size_t DeviceMemory::free_bytes() {
  std::lock_guard lock(mutex_);
  size_t used = statistics_.reserved.current + occupied_;
  return used < limit_ ? limit_ - used : 0;
}

MemoryStatistics DeviceMemory::statistics() {
  std::lock_guard lock(mutex_);
  return statistics_;
}

void DeviceMemory::reset_peak() {
  std::lock_guard lock(mutex_);
  statistics_.allocated.reset_peak();
  statistics_.reserved.reset_peak();
  statistics_.allocations.reset_peak();
}

DeviceMemory& memory(c10::DeviceIndex device) {
  static auto* all = new std::vector<std::unique_ptr<DeviceMemory>>([] {
    std::vector<std::unique_ptr<DeviceMemory>> made;
    for (c10::DeviceIndex index = 0; index < kDevices; index++)
      made.push_back(std::make_unique<DeviceMemory>(index));
    return made;
  }());
  return *all->at(device);
}

char* open_address(const void* address) {
  for (c10::DeviceIndex device = 0; device < kDevices; device++)
    if (memory(device).owns(address)) return memory(device).open_address(address);
  return nullptr;
}

namespace {

void release_anywhere(void* address) {
  if (Scheduler::get().is_forked()) return;
  for (c10::DeviceIndex device = 0; device < kDevices; device++)
    if (memory(device).owns(address)) memory(device).release(static_cast<char*>(address));
}

// What PyTorch asks for memory and statistics.
class Allocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    c10::Device device(c10::DeviceType::PrivateUse1, current_device());
    Scheduler::get().raise_fault(device.index());
    void* address = nbytes ? memory(device.index()).allocate(nbytes) : nullptr;
    return {address, address, &release_anywhere, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_anywhere; }
  void copy_data(void*, const void*, size_t) const override {
    TORCH_CHECK(false, "a simulated device copies on its streams only");
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    for (c10::DeviceIndex device = 0; device < kDevices; device++) {
      Scheduler::get().wait_for_device(device);
      memory(device).empty_cache();
    }
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    if (!data) return;
    StreamKey key{stream.device_index(), stream.id()};
    memory(data.device().index()).record_stream(static_cast<char*>(data.get()), key);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    auto found = memory(device).statistics();
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0] = stats.active_bytes[0] = found.allocated;
    stats.reserved_bytes[0] = found.reserved;
    stats.allocation[0] = stats.active[0] = found.allocations;
    stats.num_device_alloc = found.system_allocations;
    stats.num_device_free = found.system_frees;
    stats.num_ooms = found.out_of_memory;
    stats.num_sync_all_streams = found.flushes;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override { memory(device).reset_peak(); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    return {memory(device).free_bytes(), memory(device).limit()};
  }
};

Allocator the_allocator;
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &the_allocator);

}  // namespace

c10::Allocator& allocator() { return the_allocator; }

}  // namespace simulated
