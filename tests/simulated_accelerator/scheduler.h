// Streams, their tasks, and the choice of the task that runs next. README.md says what the two modes are for.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

namespace simulated {

constexpr c10::DeviceIndex kDevices = 4;
// Long enough for a busy machine: a thread that is served too early may hide a missing wait.
constexpr double kFallbackAfterS = 10.0;

struct StreamKey {
  c10::DeviceIndex device;
  c10::StreamId id;
  bool operator<(const StreamKey& other) const {
    return std::pair(device, id) < std::pair(other.device, other.id);
  }
  bool operator==(const StreamKey& other) const { return device == other.device && id == other.id; }
};

// A kernel or a copy has `work`. A stream that waits has a task with `after`, which passes when `after` is done.
// A recorded event is a task with neither.
struct Task {
  StreamKey stream;
  uint64_t number = 0;  // in its stream
  std::string name;
  std::function<void()> work;
  std::shared_ptr<Task> after;
  bool done = false;
  int64_t done_ns = 0;
};
using TaskPtr = std::shared_ptr<Task>;

enum class Role { kEarly, kLate };

// A host thread whose waits the scheduler knows.
struct HostThread {
  int64_t number;
  bool blocked = false;
};

// The one scheduler of the process. One thread of its own runs all tasks.
class Scheduler {
 public:
  static Scheduler& get();

  // Called by host threads. Each raises the fault of a failed device, except `enqueue_always`.
  TaskPtr enqueue(StreamKey stream, std::string name, std::function<void()> work, TaskPtr after = nullptr);
  TaskPtr enqueue_always(StreamKey stream, std::string name, std::function<void()> work) noexcept;
  void wait_for(const TaskPtr& task);
  void wait_for_stream(StreamKey stream);
  void wait_for_device(c10::DeviceIndex device);
  bool is_done(const TaskPtr& task);
  bool has_passed(const TaskPtr& task) noexcept;  // without the effect of a poll
  int64_t time_ns(const TaskPtr& task);
  bool is_idle(StreamKey stream);
  StreamKey new_stream(c10::DeviceIndex device);

  // Controls.
  void run_freely(uint64_t seed);
  void run_adversarially(uint64_t seed);
  void set_role(StreamKey stream, std::optional<Role> role);
  void name_stream(StreamKey stream, std::string name);
  int64_t register_thread();
  void unregister_thread(int64_t number);
  void host_blocks(int64_t number);
  void host_unblocks(int64_t number);
  void wait_for_other_threads();  // until all other registered ones wait; serves none of them
  void set_fallback_after(double seconds);
  int64_t fallbacks();
  void inject_fault(c10::DeviceIndex device, int64_t after_kernels);
  void raise_fault(c10::DeviceIndex device);
  std::vector<std::string> journal();
  void keep_journal(size_t tasks);
  bool is_forked() const;
  void settle();  // waits until every stream is idle, whatever the mode
  void reset();   // settles, and forgets faults, roles, threads, journal and counts

 private:
  struct Queue {
    std::deque<TaskPtr> tasks;
    TaskPtr last;
    uint64_t enqueued = 0;
    std::optional<Role> role;
    std::string name;
  };
  // A host thread that waits for `target`, or a thread that polled it.
  struct Demand {
    TaskPtr target;
    HostThread* thread;
    bool at_once;  // of a thread that is not registered: nothing tells when it is the last one to run
  };

  Scheduler();
  void run_tasks();
  bool run_next(std::unique_lock<std::mutex>& lock);
  void execute(std::unique_lock<std::mutex>& lock, StreamKey stream);
  void finish(const TaskPtr& task);
  bool can_run(const Queue& queue) const;
  Role role_of(StreamKey stream, const Queue& queue) const;
  std::optional<StreamKey> early_stream();
  std::optional<StreamKey> any_stream();
  std::optional<StreamKey> stream_for_target();
  bool choose_demand();
  bool is_quiescent() const;
  void set_target(const TaskPtr& target);
  void answer_demands();
  void moved();
  void run_early_tasks(std::unique_lock<std::mutex>& lock);
  TaskPtr push(StreamKey stream, std::string name, std::function<void()> work, TaskPtr after);
  void wait_for_all(const std::vector<TaskPtr>& tasks);
  std::string words(StreamKey stream, const Queue& queue) const;

  const int process_;
  std::mutex mutex_;
  std::condition_variable work_there_, changed_;
  std::map<StreamKey, Queue> queues_;
  std::set<StreamKey> busy_;  // streams with tasks
  bool settling_ = false;
  int64_t last_ns_ = 0;

  bool adversarial_ = false;
  std::mt19937_64 random_{0};
  uint64_t seed_ = 0, redraws_ = 0;
  int decisions_left_ = 0;
  c10::StreamId next_stream_[kDevices] = {1, 1, 1, 1};
  c10::StreamId first_stream_[kDevices] = {1, 1, 1, 1};  // of this schedule
  TaskPtr target_;
  std::map<StreamKey, uint64_t> closure_;  // by stream, the last task that the target needs

  std::vector<std::unique_ptr<Demand>> demands_;
  std::vector<TaskPtr> polled_;
  std::map<int64_t, std::unique_ptr<HostThread>> threads_;
  std::vector<std::unique_ptr<HostThread>> gone_;  // their threads may still point to them
  int64_t next_thread_ = 1;
  double fallback_after_s_ = kFallbackAfterS;
  int64_t fallbacks_ = 0, moved_ns_ = 0;

  std::string faults_[kDevices];
  int64_t kernels_to_fault_[kDevices] = {-1, -1, -1, -1};
  std::deque<std::string> journal_;
  size_t journal_limit_ = 200;
};

// The current stream of the calling thread.
c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex device);
StreamKey current_stream(c10::DeviceIndex device);
void set_current_stream(StreamKey stream);

// Counts of operations that made a host thread wait, by name.
void count_synchronous(const std::string& name);
std::map<std::string, int64_t> synchronous_operations();
void forget_synchronous();

}  // namespace simulated
