// The queues of all streams, and the thread that runs their tasks.
#include "scheduler.h"

#include "python.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <thread>

namespace simulated {
namespace {

thread_local c10::DeviceIndex this_device = 0;
thread_local c10::StreamId this_stream[kDevices] = {};
thread_local HostThread* this_thread = nullptr;

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

c10::DeviceIndex current_device() { return this_device; }
void set_current_device(c10::DeviceIndex device) {
  TORCH_CHECK(device < kDevices, "there is no simulated device ", int(device));
  if (device >= 0) this_device = device;
}
StreamKey current_stream(c10::DeviceIndex device) { return {device, this_stream[device]}; }
void set_current_stream(StreamKey stream) { this_stream[stream.device] = stream.id; }

Scheduler& Scheduler::get() {
  static auto* scheduler = new Scheduler;  // never destroyed: its thread outlives static objects
  return *scheduler;
}

Scheduler::Scheduler() : process_(getpid()) {
  std::thread([this] { run_tasks(); }).detach();
}

// ---- What host threads call.

TaskPtr Scheduler::push(StreamKey stream, std::string name, std::function<void()> work, TaskPtr after) {
  auto task = std::make_shared<Task>();
  auto& queue = queues_[stream];
  task->stream = stream;
  task->number = ++queue.enqueued;
  task->name = std::move(name);
  task->work = std::move(work);
  task->after = std::move(after);
  queue.tasks.push_back(task);
  queue.last = task;
  busy_.insert(stream);
  moved();
  work_there_.notify_one();
  return task;
}

TaskPtr Scheduler::enqueue(StreamKey stream, std::string name, std::function<void()> work, TaskPtr after) {
  TORCH_CHECK(!is_forked(), "a forked process cannot use the simulated devices");
  raise_fault(stream.device);
  WithoutGil released;
  std::unique_lock lock(mutex_);
  auto task = push(stream, std::move(name), std::move(work), std::move(after));
  run_early_tasks(lock);
  return task;
}

TaskPtr Scheduler::enqueue_always(StreamKey stream, std::string name, std::function<void()> work) noexcept {
  WithoutGil released;
  std::unique_lock lock(mutex_);
  auto task = push(stream, std::move(name), std::move(work), nullptr);
  run_early_tasks(lock);
  return task;
}

// A host thread waits for early tasks, so that what it does next comes after them each time, not by chance.
void Scheduler::run_early_tasks(std::unique_lock<std::mutex>& lock) {
  if (adversarial_) changed_.wait(lock, [this] { return !adversarial_ || !early_stream(); });
}

void Scheduler::wait_for(const TaskPtr& task) {
  wait_for_all({task});
  raise_fault(task->stream.device);
}

void Scheduler::wait_for_stream(StreamKey stream) {
  TaskPtr last;
  {
    std::lock_guard lock(mutex_);
    last = queues_[stream].last;
  }
  if (last) wait_for_all({last});
  raise_fault(stream.device);
}

void Scheduler::wait_for_device(c10::DeviceIndex device) {
  std::vector<TaskPtr> tasks;
  {
    std::lock_guard lock(mutex_);
    for (auto& stream : busy_)
      if (stream.device == device) tasks.push_back(queues_[stream].last);
  }
  wait_for_all(tasks);
  raise_fault(device);
}

void Scheduler::wait_for_all(const std::vector<TaskPtr>& tasks) {
  WithoutGil released;
  std::unique_lock lock(mutex_);
  for (auto& task : tasks) {
    if (task->done) continue;
    if (this_thread) {
      this_thread->blocked = true;
      changed_.notify_all();
    }
    demands_.push_back(std::make_unique<Demand>(Demand{task, this_thread, this_thread == nullptr}));
    moved();
    work_there_.notify_one();
    changed_.wait(lock, [&] { return task->done; });
  }
  run_early_tasks(lock);  // those that could run because of what was awaited
}

bool Scheduler::is_done(const TaskPtr& task) {
  raise_fault(task->stream.device);
  WithoutGil released;
  std::lock_guard lock(mutex_);
  if (!task->done && std::find(polled_.begin(), polled_.end(), task) == polled_.end()) {
    polled_.push_back(task);
    work_there_.notify_one();
  }
  return task->done;
}

bool Scheduler::has_passed(const TaskPtr& task) noexcept {
  std::lock_guard lock(mutex_);
  return task->done;
}

int64_t Scheduler::time_ns(const TaskPtr& task) {
  std::lock_guard lock(mutex_);
  TORCH_CHECK(task->done, "the simulated device has not passed this event");
  return task->done_ns;
}

bool Scheduler::is_idle(StreamKey stream) {
  TaskPtr last;
  {
    std::lock_guard lock(mutex_);
    last = queues_[stream].last;
  }
  return !last || is_done(last);
}

StreamKey Scheduler::new_stream(c10::DeviceIndex device) {
  std::lock_guard lock(mutex_);
  return {device, next_stream_[device]++};
}

// ---- The thread that runs tasks.

void Scheduler::run_tasks() {
  at::set_num_threads(1);
  c10::AutoGradMode no_grad(false);
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  std::unique_lock lock(mutex_);
  for (;;) {
    if (run_next(lock)) continue;
    changed_.notify_all();
    // With demands it looks at the clock too, because a thread that it does not know may block the others.
    if (demands_.empty() && polled_.empty())
      work_there_.wait(lock);
    else
      work_there_.wait_for(lock, std::chrono::milliseconds(20));
  }
}

// Runs a task, or decides what the next one is for. Returns false if there is nothing to do.
bool Scheduler::run_next(std::unique_lock<std::mutex>& lock) {
  std::optional<StreamKey> stream;
  if (!adversarial_ || settling_) {
    stream = any_stream();
  } else {
    stream = early_stream();
    if (!stream) {
      changed_.notify_all();
      stream = stream_for_target();
    }
    if (!stream) return choose_demand();
  }
  if (!stream) return false;
  execute(lock, *stream);
  return true;
}

void Scheduler::execute(std::unique_lock<std::mutex>& lock, StreamKey stream) {
  auto& queue = queues_[stream];
  TaskPtr task = queue.tasks.front();
  auto& fault = faults_[stream.device];
  if (task->work && fault.empty()) {
    auto& left = kernels_to_fault_[stream.device];
    std::string failure = left == 0 ? "planted fault in " + task->name : "";
    if (left >= 0) left--;
    lock.unlock();
    if (failure.empty()) {
      try {
        task->work();
      } catch (const c10::Error& error) {
        failure = task->name + ": " + error.what_without_backtrace();
      } catch (const std::exception& error) {
        failure = task->name + ": " + error.what();
      }
    }
    lock.lock();
    if (!failure.empty() && fault.empty()) fault = failure;
  }
  auto work = std::move(task->work);
  task->work = nullptr;
  task->after = nullptr;
  finish(task);
  lock.unlock();
  work = nullptr;  // what it owns is given back outside of the lock
  lock.lock();
}

void Scheduler::finish(const TaskPtr& task) {
  auto& queue = queues_[task->stream];
  queue.tasks.pop_front();
  if (queue.tasks.empty()) busy_.erase(task->stream);
  last_ns_ = std::max(now_ns(), last_ns_ + 1);
  task->done_ns = last_ns_;
  task->done = true;
  if (journal_limit_) {
    journal_.push_back(words(task->stream, queue) + " " + std::to_string(task->number) + " " + task->name);
    if (journal_.size() > journal_limit_) journal_.pop_front();
  }
  answer_demands();
  moved();
}

// Marks the threads that wake as running here, not when they run: until then the others would look like all.
void Scheduler::answer_demands() {
  auto done = [](auto& demand) { return demand->target->done; };
  bool any = false;
  for (auto& demand : demands_)
    if (done(demand)) {
      any = true;
      if (demand->thread) demand->thread->blocked = false;
    }
  if (!any) return;
  demands_.erase(std::remove_if(demands_.begin(), demands_.end(), done), demands_.end());
  changed_.notify_all();
}

bool Scheduler::can_run(const Queue& queue) const {
  if (queue.tasks.empty()) return false;
  auto& front = *queue.tasks.front();
  return !front.after || front.after->done || !faults_[front.stream.device].empty();
}

std::optional<StreamKey> Scheduler::any_stream() {
  std::vector<StreamKey> can;
  for (auto& stream : busy_)
    if (can_run(queues_[stream])) can.push_back(stream);
  if (can.empty()) return std::nullopt;
  return can[random_() % can.size()];
}

void Scheduler::moved() { moved_ns_ = now_ns(); }

// ---- Host threads, faults and the journal.

int64_t Scheduler::register_thread() {
  std::lock_guard lock(mutex_);
  auto number = next_thread_++;
  threads_[number] = std::make_unique<HostThread>(HostThread{number});
  this_thread = threads_[number].get();
  return number;
}

void Scheduler::unregister_thread(int64_t number) {
  std::lock_guard lock(mutex_);
  if (this_thread && this_thread->number == number) this_thread = nullptr;
  auto found = threads_.find(number);
  if (found == threads_.end()) return;
  gone_.push_back(std::move(found->second));
  threads_.erase(found);
  changed_.notify_all();
  moved();
  work_there_.notify_one();
}

// A thread that wakes up again and again to look around is no movement, so these two do not call `moved`.

void Scheduler::host_blocks(int64_t number) {
  std::lock_guard lock(mutex_);
  auto found = threads_.find(number);
  if (found != threads_.end()) found->second->blocked = true;
  work_there_.notify_one();
  changed_.notify_all();
}

void Scheduler::host_unblocks(int64_t number) {
  std::lock_guard lock(mutex_);
  auto found = threads_.find(number);
  if (found != threads_.end()) found->second->blocked = false;
}

void Scheduler::wait_for_other_threads() {
  WithoutGil released;
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] {
    return std::all_of(threads_.begin(), threads_.end(),
                       [](auto& entry) { return entry.second.get() == this_thread || entry.second->blocked; });
  });
}

void Scheduler::inject_fault(c10::DeviceIndex device, int64_t after_kernels) {
  std::lock_guard lock(mutex_);
  kernels_to_fault_[device] = after_kernels;
}

void Scheduler::raise_fault(c10::DeviceIndex device) {
  std::lock_guard lock(mutex_);
  if (!faults_[device].empty())
    throw std::runtime_error("simulated:" + std::to_string(device) + " failed: " + faults_[device]);
}

std::string Scheduler::words(StreamKey stream, const Queue& queue) const {
  auto first = first_stream_[stream.device];
  auto number = stream.id == 0 ? "default stream" : "stream " + std::to_string(stream.id - first);
  return "simulated:" + std::to_string(stream.device) + " " + (queue.name.empty() ? number : queue.name);
}

std::vector<std::string> Scheduler::journal() {
  std::lock_guard lock(mutex_);
  return {journal_.begin(), journal_.end()};
}

void Scheduler::keep_journal(size_t tasks) {
  std::lock_guard lock(mutex_);
  journal_limit_ = tasks;
  journal_.clear();
}

bool Scheduler::is_forked() const { return getpid() != process_; }

void Scheduler::settle() {
  if (is_forked()) return;  // the thread that runs tasks is in the parent
  WithoutGil released;
  std::unique_lock lock(mutex_);
  settling_ = true;
  work_there_.notify_one();
  changed_.wait(lock, [this] { return busy_.empty(); });
  settling_ = false;
}

void Scheduler::reset() {
  settle();
  std::lock_guard lock(mutex_);
  for (auto& fault : faults_) fault.clear();
  for (auto& left : kernels_to_fault_) left = -1;
  for (auto& [key, queue] : queues_) queue.role.reset(), queue.name.clear();
  polled_.clear();
  for (auto& [number, thread] : threads_) gone_.push_back(std::move(thread));
  threads_.clear();
  journal_.clear();
  fallbacks_ = 0;
  fallback_after_s_ = kFallbackAfterS;
  adversarial_ = false;
  target_.reset();
}

namespace {
std::mutex counts_mutex;
std::map<std::string, int64_t> counts;
}  // namespace

void count_synchronous(const std::string& name) {
  std::lock_guard lock(counts_mutex);
  counts[name]++;
}
std::map<std::string, int64_t> synchronous_operations() {
  std::lock_guard lock(counts_mutex);
  return counts;
}
void forget_synchronous() {
  std::lock_guard lock(counts_mutex);
  counts.clear();
}

}  // namespace simulated
