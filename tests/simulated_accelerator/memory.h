// Device memory that the host cannot touch, and host memory that is page-locked.
#pragma once

#include "scheduler.h"

#include <c10/core/CachingDeviceAllocator.h>

#include <unordered_map>

namespace simulated {

// Address ranges that are free. Neighbours are one range; the smallest range that is large enough is used first.
class FreeRanges {
 public:
  char* take(size_t nbytes);  // null if no range is large enough
  void give(char* address, size_t nbytes);
  std::map<char*, size_t> take_all();

 private:
  void insert(char* address, size_t nbytes);
  void erase(std::map<char*, size_t>::iterator range);
  std::map<char*, size_t> by_address_;
  std::set<std::pair<size_t, char*>> by_size_;
};

struct MemoryStatistics {
  c10::CachingAllocator::Stat allocated, reserved, allocations;
  int64_t system_allocations = 0, system_frees = 0, out_of_memory = 0, flushes = 0;
};

// The memory of one device, cached by stream as CUDA's allocator does it.
class DeviceMemory {
 public:
  explicit DeviceMemory(c10::DeviceIndex device);
  char* allocate(size_t nbytes);
  void release(char* address) noexcept;
  void record_stream(char* address, StreamKey stream);
  void empty_cache();
  bool owns(const void* address) const;
  char* open_address(const void* address) const { return open_ + (static_cast<const char*>(address) - locked_); }
  void set_limit(size_t nbytes);
  void occupy(size_t nbytes);  // by other processes
  size_t limit() const { return limit_; }
  size_t free_bytes();
  MemoryStatistics statistics();
  void reset_peak();

 private:
  struct Block {
    size_t nbytes;
    StreamKey stream;
    std::set<StreamKey> users;  // other streams
  };
  struct Pending {
    char* address;
    Block block;
    std::vector<TaskPtr> after;
  };
  char* take(StreamKey stream, size_t nbytes, size_t& fresh);  // `fresh`: bytes that the stream had not before
  void poison(StreamKey stream, char* address, size_t nbytes) noexcept;
  void reuse_pending();

  c10::DeviceIndex device_;
  char *locked_, *open_;  // two mappings: tensors have addresses in the first, kernels use the second
  std::mutex mutex_;
  FreeRanges system_;
  std::map<StreamKey, FreeRanges> cached_;
  std::unordered_map<char*, Block> blocks_;
  std::vector<Pending> pending_;
  size_t limit_, occupied_ = 0;
  MemoryStatistics statistics_;
};

DeviceMemory& memory(c10::DeviceIndex device);
// Where a kernel finds what a tensor has at `address`; null if no device has it.
char* open_address(const void* address);
c10::Allocator& allocator();

// Page-locking, with the codes that CUDA answers with.
enum LockStatus : int { kLocked = 0, kInvalid = 1, kAlreadyLocked = 712, kNotLocked = 713 };
int host_register(uintptr_t address, size_t nbytes);
int host_unregister(uintptr_t address);
bool is_page_locked(const void* address, size_t nbytes);
size_t page_locked_bytes();
// How many ranges were unmapped while they were locked: CUDA would keep pages that no longer belong to the process.
int64_t unmapped_while_locked();
void forget_page_lock_errors();

}  // namespace simulated
