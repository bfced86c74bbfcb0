// What becomes of mapped files that end early: another program truncates one that is mapped, and
// whoever reads a page behind its new end gets SIGBUS.
#pragma once

#include <atomic>
#include <cstdint>

namespace lmi {

// While it lives, reading a page of [data, data + num_bytes) that the file doesn't have any more
// gives zeros, from whatever thread, and sets is_lost(). SIGBUS elsewhere does what it did before.
class LostPages {
 public:
  LostPages(const uint8_t* data, int64_t num_bytes);
  ~LostPages();
  LostPages(const LostPages&) = delete;
  LostPages& operator=(const LostPages&) = delete;

  bool is_lost() const { return is_lost_.load(std::memory_order_acquire); }

 private:
  friend struct LostPagesHandler;

  const uintptr_t begin_;
  const uintptr_t end_;
  std::atomic<bool> is_lost_{false};
  int32_t slot_ = -1;  // in the handler's table; -1: it is full
};

}  // namespace lmi
