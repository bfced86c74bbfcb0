// NCCL's functions on host memory, as its documentation defines them, for what ranks.cu asks for:
// ranks are processes of this machine, each of which the emulator runs the stream of. Sums go in
// the order of ranks. Ranks that call different things, or of different sizes, get an error. As the
// real one, it doesn't notice that a rank is gone, and an abort ends waits at once, but returns
// only when the process' graphs are destroyed and the other ranks' processes have ended or aborted,
// too.
//
// LMI_NCCL_EMULATOR_FAILS=rank:file makes calls of the rank fail once there is the file;
// LMI_NCCL_EMULATOR_DIES=rank kills the process that should meet the others.
#include "cuda/nccl.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

using lmi::cuda::nccl::Id;

namespace {

constexpr int kSystemError = 2;
constexpr int kInvalidArgument = 4;
constexpr int kRemoteError = 6;
constexpr int kMaxRanks = 8;
constexpr size_t kPieceBytes = 1 << 16;
constexpr std::chrono::seconds kPatience{120};

struct Call {
  int function;
  int type;
  size_t count;
};

struct Shared {
  std::atomic<uint32_t> num_arrived[kMaxRanks];
  std::atomic<pid_t> processes[kMaxRanks];
  std::atomic<bool> has_left[kMaxRanks];
  Call calls[kMaxRanks];
  uint8_t pieces[kMaxRanks][kPieceBytes];
};

bool names(const char* chosen, int rank) { return chosen != nullptr && std::atoi(chosen) == rank; }

bool fails(int rank) {
  static const char* const chosen = std::getenv("LMI_NCCL_EMULATOR_FAILS");
  if (!names(chosen, rank)) return false;
  const char* const separator = std::strchr(chosen, ':');
  return separator != nullptr && access(separator + 1, F_OK) == 0;
}

bool dies(int rank) { return names(std::getenv("LMI_NCCL_EMULATOR_DIES"), rank); }

bool has_ended(pid_t process) {
  const int descriptor = static_cast<int>(syscall(SYS_pidfd_open, process, 0));
  if (descriptor < 0) return true;
  pollfd end = {descriptor, POLLIN, 0};
  const bool is_over = poll(&end, 1, 0) > 0;
  (void)close(descriptor);
  return is_over;
}

using NumGraphs = int64_t();

// Of the emulator that calls from this address.
NumGraphs* find_num_graphs(const void* caller) {
  Dl_info found = {};
  if (dladdr(caller, &found) == 0) return nullptr;
  void* emulator = dlopen(found.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  if (emulator == nullptr) return nullptr;
  return reinterpret_cast<NumGraphs*>(dlsym(emulator, "lmi_cuda_emulator_num_graphs"));
}

struct Communicator {
  Shared* shared;
  int num_ranks;
  int rank;
  NumGraphs* num_graphs;
  uint32_t num_meetings = 0;
  std::atomic<bool> is_aborted{false};

  bool is_alone() const {
    for (int other = 0; other < num_ranks; ++other) {
      if (other != rank && !shared->has_left[other] && !has_ended(shared->processes[other])) {
        return false;
      }
    }
    return true;
  }

  // False: it was aborted, or a rank doesn't come.
  bool meet() {
    shared->num_arrived[rank].store(++num_meetings);
    const auto end = std::chrono::steady_clock::now() + kPatience;
    while (true) {
      bool are_there = true;
      for (int other = 0; other < num_ranks; ++other) {
        const uint32_t count = shared->num_arrived[other].load();
        are_there = are_there && static_cast<int32_t>(count - num_meetings) >= 0;
      }
      if (are_there) return true;
      if (is_aborted.load()) return false;
      if (std::chrono::steady_clock::now() > end) return false;
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }

  int agree(const Call& call) {
    if (fails(rank)) return kSystemError;
    shared->calls[rank] = call;
    if (!meet()) return kRemoteError;
    for (int other = 0; other < num_ranks; ++other) {
      if (std::memcmp(&shared->calls[other], &call, sizeof(call)) != 0) return kInvalidArgument;
    }
    return meet() ? 0 : kRemoteError;
  }

  // Gives every rank's piece to action(first byte, bytes), piece by piece.
  template <typename Action>
  int exchange(const void* x, size_t num_bytes, const Action& action) {
    for (size_t first = 0; first < num_bytes; first += kPieceBytes) {
      const size_t count = std::min(kPieceBytes, num_bytes - first);
      std::memcpy(shared->pieces[rank], static_cast<const uint8_t*>(x) + first, count);
      if (!meet()) return kRemoteError;
      action(first, count);
      if (!meet()) return kRemoteError;
    }
    return 0;
  }
};

Communicator& of(void* communicator) { return *static_cast<Communicator*>(communicator); }

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

// The memory has no name that would outlive the processes: others open it by this one's descriptor.
EXPORTED int ncclGetUniqueId(Id* id) {
  const int file = memfd_create("lmi-nccl", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, sizeof(Shared)) != 0) return kSystemError;
  std::memset(id, 0, sizeof(*id));
  std::snprintf(id->bytes, sizeof(id->bytes), "/proc/%d/fd/%d", getpid(), file);
  return 0;
}

EXPORTED int ncclCommInitRank(void** made, int num_ranks, Id id, int rank) {
  if (num_ranks < 1 || num_ranks > kMaxRanks || rank < 0 || rank >= num_ranks) {
    return kInvalidArgument;
  }
  if (dies(rank)) (void)raise(SIGKILL);
  const int file = open(id.bytes, O_RDWR | O_CLOEXEC);
  if (file < 0) return kSystemError;
  void* memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  (void)close(file);
  if (memory == MAP_FAILED) return kSystemError;
  auto* communicator = new Communicator{static_cast<Shared*>(memory), num_ranks, rank,
                                        find_num_graphs(__builtin_return_address(0))};
  communicator->shared->processes[rank] = getpid();
  *made = communicator;
  const bool are_there = communicator->meet();
  int maker = -1, made_file = -1;
  if (are_there && std::sscanf(id.bytes, "/proc/%d/fd/%d", &maker, &made_file) == 2 &&
      maker == getpid()) {
    (void)close(made_file);
  }
  return are_there ? 0 : kRemoteError;
}

// Nothing is freed: what is on the stream looks at it once more.
EXPORTED int ncclCommAbort(void* communicator) {
  Communicator& ranks = of(communicator);
  ranks.is_aborted = true;
  ranks.shared->has_left[ranks.rank] = true;
  while (!ranks.is_alone() || (ranks.num_graphs != nullptr && ranks.num_graphs() > 0)) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return 0;
}

EXPORTED const char* ncclGetErrorString(int status) {
  switch (status) {
    case kInvalidArgument:
      return "invalid argument";
    case kRemoteError:
      return "remote process exited or there was a network error";
    default:
      return "system error";
  }
}

EXPORTED int ncclAllReduce(const void* x, void* y, size_t count, int type, int operation,
                           void* communicator, void*) {
  Communicator& ranks = of(communicator);
  if (type != lmi::cuda::nccl::kFloat32 || operation != lmi::cuda::nccl::kSum) {
    return kInvalidArgument;
  }
  if (const int status = ranks.agree({1, type, count})) return status;
  return ranks.exchange(x, 4 * count, [&](size_t first, size_t num_bytes) {
    for (size_t i = 0; i < num_bytes / 4; ++i) {
      float sum = 0;
      for (int rank = 0; rank < ranks.num_ranks; ++rank) {
        float part = 0;
        std::memcpy(&part, ranks.shared->pieces[rank] + 4 * i, 4);
        sum = rank == 0 ? part : sum + part;
      }
      std::memcpy(static_cast<uint8_t*>(y) + first + 4 * i, &sum, 4);
    }
  });
}

EXPORTED int ncclAllGather(const void* x, void* y, size_t count, int type, void* communicator,
                           void*) {
  Communicator& ranks = of(communicator);
  if (type != lmi::cuda::nccl::kFloat32) return kInvalidArgument;
  if (const int status = ranks.agree({2, type, count})) return status;
  return ranks.exchange(x, 4 * count, [&](size_t first, size_t num_bytes) {
    for (int rank = 0; rank < ranks.num_ranks; ++rank) {
      std::memcpy(static_cast<uint8_t*>(y) + static_cast<size_t>(rank) * 4 * count + first,
                  ranks.shared->pieces[rank], num_bytes);
    }
  });
}

EXPORTED int ncclBroadcast(const void* x, void* y, size_t count, int type, int root,
                           void* communicator, void*) {
  Communicator& ranks = of(communicator);
  if (type != lmi::cuda::nccl::kInt32 || root < 0 || root >= ranks.num_ranks) {
    return kInvalidArgument;
  }
  if (const int status = ranks.agree({3, type, count})) return status;
  return ranks.exchange(x, 4 * count, [&](size_t first, size_t num_bytes) {
    std::memcpy(static_cast<uint8_t*>(y) + first, ranks.shared->pieces[root], num_bytes);
  });
}
