// The scheduler's adversarial mode: which task runs next, by seed.
//
// An early stream runs each task as soon as its order and its waits allow. A late stream runs only what a waiting host thread
// needs, and only when all host threads wait. So a missing wait is seen each time, not by chance.
#include "scheduler.h"

#include <algorithm>
#include <chrono>

namespace simulated {
namespace {

constexpr int kLongestSpell = 8;  // decisions before roles are drawn again

uint64_t mix(uint64_t x) {  // the finalizer of splitmix64
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

void Scheduler::run_freely(uint64_t seed) {
  std::lock_guard lock(mutex_);
  adversarial_ = false;
  target_.reset();
  random_.seed(mix(seed + 1));
  work_there_.notify_one();
  changed_.notify_all();
}

void Scheduler::run_adversarially(uint64_t seed) {
  std::lock_guard lock(mutex_);
  adversarial_ = true;
  seed_ = seed;
  redraws_ = 0;
  random_.seed(mix(seed + 1));
  decisions_left_ = 1 + int(random_() % kLongestSpell);
  target_.reset();
  // Streams count from here, so that a second run of the same program in this process draws the same roles.
  for (c10::DeviceIndex device = 0; device < kDevices; device++) first_stream_[device] = next_stream_[device];
  work_there_.notify_one();
}

void Scheduler::set_role(StreamKey stream, std::optional<Role> role) {
  std::lock_guard lock(mutex_);
  queues_[stream].role = role;
  work_there_.notify_one();
}

void Scheduler::name_stream(StreamKey stream, std::string name) {
  std::lock_guard lock(mutex_);
  queues_[stream].name = std::move(name);
}

void Scheduler::set_fallback_after(double seconds) {
  std::lock_guard lock(mutex_);
  fallback_after_s_ = seconds;
}

int64_t Scheduler::fallbacks() {
  std::lock_guard lock(mutex_);
  return fallbacks_;
}

Role Scheduler::role_of(StreamKey stream, const Queue& queue) const {
  if (!faults_[stream.device].empty()) return Role::kEarly;  // a failed device keeps no thread waiting
  if (queue.role) return *queue.role;
  auto own = uint64_t(stream.device) << 32 ^ uint64_t(stream.id - first_stream_[stream.device]);
  return mix(mix(mix(seed_ + 1) + redraws_) + own) & 1 ? Role::kEarly : Role::kLate;
}

std::optional<StreamKey> Scheduler::early_stream() {
  for (auto& stream : busy_) {
    auto& queue = queues_[stream];
    if (can_run(queue) && role_of(stream, queue) == Role::kEarly) return stream;
  }
  return std::nullopt;
}

bool Scheduler::is_quiescent() const {
  return std::all_of(threads_.begin(), threads_.end(), [](auto& entry) { return entry.second->blocked; });
}

// Chooses what to serve next. Returns false if every thread that waits must wait longer.
bool Scheduler::choose_demand() {
  auto done = [](auto& task) { return task->done; };
  polled_.erase(std::remove_if(polled_.begin(), polled_.end(), done), polled_.end());
  std::vector<TaskPtr> can;
  for (auto& demand : demands_)
    if (demand->at_once) return set_target(demand->target), true;
  bool late = now_ns() - moved_ns_ > int64_t(fallback_after_s_ * 1e9);
  if (!is_quiescent() && !late) return false;
  for (auto& demand : demands_) can.push_back(demand->target);
  // Polls come at the times of a clock, so they only count if nothing else can move.
  if (can.empty()) can = polled_;
  if (can.empty()) return false;
  if (!is_quiescent()) fallbacks_++;
  // In an order that does not depend on which thread came first.
  std::sort(can.begin(), can.end(), [](auto& a, auto& b) {
    return std::pair(a->stream, a->number) < std::pair(b->stream, b->number);
  });
  if (--decisions_left_ <= 0) {
    decisions_left_ = 1 + int(random_() % kLongestSpell);
    redraws_++;
  }
  set_target(can[random_() % can.size()]);
  return true;
}

// Finds all tasks that the target needs: what is before it in its stream, and the same for each event waited for there.
void Scheduler::set_target(const TaskPtr& target) {
  target_ = target;
  closure_.clear();
  std::vector<TaskPtr> open{target};
  while (!open.empty()) {
    auto task = open.back();
    open.pop_back();
    auto& needed = closure_[task->stream];
    for (auto& earlier : queues_[task->stream].tasks) {
      if (earlier->number > task->number) break;
      if (earlier->number > needed && earlier->after && !earlier->after->done) open.push_back(earlier->after);
    }
    closure_[task->stream] = std::max(needed, task->number);
  }
}

std::optional<StreamKey> Scheduler::stream_for_target() {
  if (!target_ || target_->done) {
    target_.reset();
    return std::nullopt;
  }
  std::vector<StreamKey> can;
  for (auto& [stream, last] : closure_) {
    auto& queue = queues_[stream];
    if (can_run(queue) && queue.tasks.front()->number <= last) can.push_back(stream);
  }
  TORCH_INTERNAL_ASSERT(!can.empty(), "the target of the schedule needs a task that no stream has");
  return can[random_() % can.size()];
}

}  // namespace simulated
