// Page-locked host memory: the ranges that were registered, and the refusals that CUDA has.
#include "memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>

namespace simulated {
namespace {

std::mutex mutex;
std::map<uintptr_t, size_t> ranges;
int64_t unmapped = 0;

// CUDA locks whole pages, so two ranges that share a page overlap.
std::pair<uintptr_t, uintptr_t> pages(uintptr_t address, size_t nbytes) {
  uintptr_t page = sysconf(_SC_PAGESIZE);
  return {address / page * page, (address + nbytes + page - 1) / page * page};
}

bool is_mapped(uintptr_t address, size_t nbytes) {
  auto [start, stop] = pages(address, nbytes);
  size_t page = sysconf(_SC_PAGESIZE);
  std::vector<unsigned char> there((stop - start) / page);
  return mincore(reinterpret_cast<void*>(start), stop - start, there.data()) == 0 || errno != ENOMEM;
}

}  // namespace

int host_register(uintptr_t address, size_t nbytes) {
  std::lock_guard lock(mutex);
  if (!address || !nbytes) return kInvalid;
  auto [start, stop] = pages(address, nbytes);
  for (auto& [other, size] : ranges) {
    auto [first, last] = pages(other, size);
    if (start < last && first < stop) return kAlreadyLocked;
  }
  if (!is_mapped(address, nbytes)) return kInvalid;
  ranges[address] = nbytes;
  return kLocked;
}

int host_unregister(uintptr_t address) {
  std::lock_guard lock(mutex);
  auto found = ranges.find(address);
  if (found == ranges.end()) return kNotLocked;
  bool there = is_mapped(found->first, found->second);
  ranges.erase(found);
  if (there) return kLocked;
  unmapped++;
  return kInvalid;
}

bool is_page_locked(const void* data, size_t nbytes) {
  std::lock_guard lock(mutex);
  auto address = reinterpret_cast<uintptr_t>(data);
  auto after = ranges.upper_bound(address);
  if (after == ranges.begin()) return false;
  auto& [start, size] = *std::prev(after);
  return address + nbytes <= start + size;
}

size_t page_locked_bytes() {
  std::lock_guard lock(mutex);
  size_t sum = 0;
  for (auto& [address, nbytes] : ranges) sum += nbytes;
  return sum;
}

int64_t unmapped_while_locked() {
  std::lock_guard lock(mutex);
  int64_t now = 0;
  for (auto& [address, nbytes] : ranges) now += !is_mapped(address, nbytes);
  return unmapped + now;
}

void forget_page_lock_errors() {
  std::lock_guard lock(mutex);
  unmapped = 0;
}

}  // namespace simulated
