#include "common/lost_pages.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <mutex>

namespace lmi {
namespace {

constexpr int32_t kMaxRanges = 4096;

// Read by the signal's handler, which takes no lock.
std::array<std::atomic<LostPages*>, kMaxRanges> ranges;
std::atomic<int32_t> num_ranges{0};  // slots that have ever been used
std::atomic<uintptr_t> handled_page_bytes{4096};
struct sigaction before;

}  // namespace

// Calls nothing that isn't safe in a handler: mmap is a system call alone.
struct LostPagesHandler {
  static void handle(int number, siginfo_t* info, void* context) {
    const int error = errno;
    const auto address = reinterpret_cast<uintptr_t>(info->si_addr);
    if (!cover(address)) pass_on(number, info, context);
    errno = error;
  }

  // Puts zeros in the place of the page and of what follows it: it all lies behind the file's end.
  static bool cover(uintptr_t address) {
    const int32_t count = num_ranges.load(std::memory_order_acquire);
    for (int32_t slot = 0; slot < count; ++slot) {
      LostPages* range = ranges[slot].load(std::memory_order_acquire);
      if (range == nullptr || address < range->begin_ || address >= range->end_) continue;
      const uintptr_t page = address & ~(handled_page_bytes.load(std::memory_order_relaxed) - 1);
      void* zeros = mmap(reinterpret_cast<void*>(page), range->end_ - page, PROT_READ,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
      if (zeros == MAP_FAILED) return false;
      range->is_lost_.store(true, std::memory_order_release);
      return true;
    }
    return false;
  }

  static void pass_on(int number, siginfo_t* info, void* context) {
    if ((before.sa_flags & SA_SIGINFO) != 0 && before.sa_sigaction != nullptr) {
      before.sa_sigaction(number, info, context);
    } else if (before.sa_handler == SIG_DFL || before.sa_handler == SIG_IGN) {
      signal(number, SIG_DFL);  // The instruction is run again, and ends the process.
    } else {
      before.sa_handler(number);
    }
  }

  static void install() {
    handled_page_bytes.store(static_cast<uintptr_t>(sysconf(_SC_PAGESIZE)));
    struct sigaction action{};
    action.sa_sigaction = &handle;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigemptyset(&action.sa_mask);
    sigaction(SIGBUS, &action, &before);
  }

  static int32_t take_slot(LostPages* range) {
    static std::mutex mutex;
    static std::once_flag installed;
    std::call_once(installed, install);
    const std::lock_guard lock(mutex);
    const int32_t count = num_ranges.load(std::memory_order_relaxed);
    for (int32_t slot = 0; slot < kMaxRanges; ++slot) {
      LostPages* none = nullptr;
      if (!ranges[slot].compare_exchange_strong(none, range)) continue;
      if (slot >= count) num_ranges.store(slot + 1, std::memory_order_release);
      return slot;
    }
    return -1;
  }
};

LostPages::LostPages(const uint8_t* data, int64_t num_bytes)
    : begin_(reinterpret_cast<uintptr_t>(data)), end_(begin_ + static_cast<uintptr_t>(num_bytes)) {
  slot_ = LostPagesHandler::take_slot(this);
}

LostPages::~LostPages() {
  if (slot_ >= 0) ranges[slot_].store(nullptr, std::memory_order_release);
}

}  // namespace lmi
