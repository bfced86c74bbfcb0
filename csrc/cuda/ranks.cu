// The ranks of a model with a device each, as one of them meets the others: by NCCL.
#include <dlfcn.h>

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>

#include "cuda/launch.cuh"
#include "cuda/nccl.h"
#include "cuda/runtime.cuh"

namespace lmi::cuda {
namespace {

constexpr int kThreads = 256;
// For calls of NCCL under way when a rank is lost: the others' processes are dead by then.
constexpr std::chrono::seconds kPatience{10};

// The opened library.
class Nccl {
 public:
  // Never destroyed: the driver may be gone when the process ends.
  static Nccl& instance() {
    static auto* one = new Nccl;
    return *one;
  }

  int32_t open(const char* path) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (is_open_) return kOk;
    void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return fail(std::string("NCCL: ") + dlerror());
    const char* missing = nullptr;
    const auto find = [&](const char* name, auto& function) {
      void* symbol = dlsym(library, name);
      if (symbol == nullptr) missing = name;
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(symbol);
    };
    find("ncclGetUniqueId", functions_.make_id);
    find("ncclCommInitRank", functions_.join);
    find("ncclCommAbort", functions_.abort);
    find("ncclAllReduce", functions_.all_reduce);
    find("ncclAllGather", functions_.all_gather);
    find("ncclBroadcast", functions_.broadcast);
    find("ncclGetErrorString", functions_.error);
    if (missing != nullptr) {
      (void)dlclose(library);
      return fail(std::string("NCCL: ") + path + " has no " + missing);
    }
    is_open_ = true;
    return kOk;
  }

  bool is_open() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return is_open_;
  }
  // Once it is open.
  const nccl::Functions& functions() const { return functions_; }

 private:
  std::mutex mutex_;
  bool is_open_ = false;
  nccl::Functions functions_ = {};
};

const nccl::Functions& functions() { return Nccl::instance().functions(); }

struct Ranks {
  nccl::Communicator communicator = nullptr;
  std::mutex mutex;
  std::condition_variable changed;
  int32_t num_calls = 0;  // of NCCL, under way
  bool is_aborted = false;
};

// A call with the communicator, which isn't freed meanwhile.
class Call {
 public:
  explicit Call(Ranks& ranks) : ranks_(ranks) {
    const std::lock_guard<std::mutex> lock(ranks.mutex);
    is_allowed_ = !ranks.is_aborted;
    if (is_allowed_) ++ranks.num_calls;
  }
  ~Call() {
    if (!is_allowed_) return;
    const std::lock_guard<std::mutex> lock(ranks_.mutex);
    --ranks_.num_calls;
    ranks_.changed.notify_all();
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
  bool is_allowed() const { return is_allowed_; }

 private:
  Ranks& ranks_;
  bool is_allowed_ = false;
};

int32_t fail_at(const char* what, int status) {
  return fail(std::string(what) + " of NCCL: " + functions().error(status));
}

// Puts what `function` does with the communicator onto the stream.
template <typename Function>
int32_t meet(const char* what, void* ranks, void* stream, const Function& function) {
  auto& met = *static_cast<Ranks*>(ranks);
  const Call call(met);
  if (!call.is_allowed()) return fail(std::string(what) + ": another rank is lost");
  nccl::Communicator communicator = met.communicator;
  return runtime::enqueue(stream, [=]() -> int32_t {
    const int status = function(communicator);
    return status == 0 ? kOk : fail_at(what, status);
  });
}

struct JoinColumns {
  const float* parts;
  const int32_t* first_columns;
  float* y;
  int64_t part_size;
  int32_t num_columns;
};

__global__ void join_columns_kernel(const JoinColumns args) {
  wait_for_earlier_kernels();
  const int64_t row = blockIdx.x;
  const int column = static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x);
  if (column >= args.num_columns) return;
  int rank = 0;
  while (column >= args.first_columns[rank + 1]) ++rank;
  const int first = args.first_columns[rank];
  const int width = args.first_columns[rank + 1] - first;
  args.y[row * args.num_columns + column] =
      args.parts[rank * args.part_size + row * width + column - first];
}

}  // namespace
}  // namespace lmi::cuda

using namespace lmi::cuda;

int32_t lmi_cuda_open_nccl(const char* path) { return Nccl::instance().open(path); }

int32_t lmi_cuda_make_ranks_id(void* id) {
  if (!Nccl::instance().is_open()) return fail("NCCL has not been opened");
  const int status = functions().make_id(static_cast<nccl::Id*>(id));
  return status == 0 ? kOk : fail_at("an id", status);
}

int32_t lmi_cuda_join_ranks(const void* id, int32_t num_ranks, int32_t rank, int32_t device,
                            void** ranks) {
  if (!Nccl::instance().is_open()) return fail("NCCL has not been opened");
  if (const int32_t status = runtime::use_device(device)) return status;
  nccl::Id given;
  std::memcpy(&given, id, sizeof(given));
  nccl::Communicator communicator = nullptr;
  const int status = functions().join(&communicator, num_ranks, given, rank);
  if (status != 0) return fail_at("meeting the other ranks", status);
  auto* made = new Ranks;
  made->communicator = communicator;
  *ranks = made;
  return kOk;
}

int32_t lmi_cuda_abort_ranks(void* ranks) {
  auto& lost = *static_cast<Ranks*>(ranks);
  {
    std::unique_lock<std::mutex> lock(lost.mutex);
    lost.is_aborted = true;
    if (!lost.changed.wait_for(lock, kPatience, [&] { return lost.num_calls == 0; })) {
      return fail("a call of NCCL doesn't come back from a rank that is lost");
    }
  }
  (void)functions().abort(lost.communicator);
  return kOk;
}

void lmi_cuda_leave_ranks(void* ranks) { delete static_cast<Ranks*>(ranks); }

int32_t lmi_cuda_all_reduce(const LmiAllReduce* args, void* stream) {
  const size_t count = static_cast<size_t>(args->num_rows) * static_cast<size_t>(args->num_columns);
  if (count == 0) return kOk;
  float* x = args->x;
  return meet("a sum", args->ranks, stream, [=](nccl::Communicator communicator) {
    return functions().all_reduce(x, x, count, nccl::kFloat32, nccl::kSum, communicator, stream);
  });
}

int32_t lmi_cuda_gather_columns(const LmiGatherColumns* args, void* stream) {
  const int64_t part_size = int64_t{args->num_rows} * args->most_columns;
  if (part_size == 0) return kOk;
  const LmiGatherColumns given = *args;
  const int32_t status = meet("columns", given.ranks, stream, [=](nccl::Communicator communicator) {
    return functions().all_gather(given.x, given.parts, static_cast<size_t>(part_size),
                                  nccl::kFloat32, communicator, stream);
  });
  if (status != kOk || given.y == nullptr) return status;
  const JoinColumns joined = {given.parts, given.first_columns, given.y, part_size,
                              given.num_columns};
  return launch("gather_columns", join_columns_kernel,
                {given.num_rows, ceil_div(given.num_columns, kThreads)}, kThreads, 0, stream,
                joined);
}

int32_t lmi_cuda_share_tokens(const LmiShareTokens* args, void* stream) {
  const auto count = static_cast<size_t>(args->num_rows);
  if (count == 0) return kOk;
  int32_t* ids = args->token_ids;
  return meet("token ids", args->ranks, stream, [=](nccl::Communicator communicator) {
    return functions().broadcast(ids, ids, count, nccl::kInt32, 0, communicator, stream);
  });
}
