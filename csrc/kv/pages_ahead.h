// A thread that has the kernel lay pages under KV blocks before a step writes to them.
//
// Memory is touched on use, and blocks that were never used are handed out in ascending order. All
// layers lie alike, so in one step in a few every layer crosses into a huge page that isn't there
// yet: the step that writes to them waits for all of those pages at once, as long as it computes.
// Laid ahead of use, by another thread, they delay nobody.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

#include "kv/kv_layout.h"

namespace lmi {

class PagesAhead {
 public:
  // What is kept ahead of the blocks in use, of all layers together; at most an eighth of them all.
  static constexpr int64_t kBytesAhead = int64_t{64} << 20;

  // The memory of `view` outlives this.
  explicit PagesAhead(const KvCacheView& view);
  ~PagesAhead();
  PagesAhead(const PagesAhead&) = delete;
  PagesAhead& operator=(const PagesAhead&) = delete;

  // Blocks below num_used are in use, or were. Called before each step; starts the thread.
  void follow(int32_t num_used);

 private:
  void run();
  bool lay(int32_t first, int32_t end) const;

  const KvCacheView view_;
  const int32_t num_at_once_;  // blocks of a layer that fill a huge page
  const int32_t num_ahead_;
  int32_t num_wanted_ = 0;  // by the caller's thread alone: what it last asked for
  std::mutex mutex_;
  std::condition_variable changed_;
  int32_t target_ = 0;  // guarded by mutex_, as is what follows
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace lmi
