// A thread that yields its processor and drive to everybody, for work that nobody waits for.
//
// No unprivileged process can raise a priority that was lowered, so whoever waits for such a thread
// waits as long as others keep it from running, also for a lock that it holds. It has one with its
// user alone, a thread that nobody waits for either while it is in run().
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

namespace lmi {

class YieldingThread {
 public:
  explicit YieldingThread(const char* name);
  ~YieldingThread();
  YieldingThread(const YieldingThread&) = delete;
  YieldingThread& operator=(const YieldingThread&) = delete;

  // Has `work` done, which may not throw, and waits for it. One at a time.
  void run(std::function<void()> work);
  // Joins it. Idempotent.
  void close();

 private:
  void main();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::function<void()> work_;  // empty: done
  bool is_closing_ = false;
  std::thread thread_;
};

}  // namespace lmi
