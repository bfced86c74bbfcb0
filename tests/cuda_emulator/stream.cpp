#include "cuda_emulator/stream.h"

#include <atomic>
#include <deque>
#include <mutex>
#include <string>
#include <utility>

#include "cuda/launch.cuh"

namespace lmi::cuda::emulator {
namespace {

struct Stream {
  std::mutex mutex;  // of all but `running`
  std::deque<Work> waiting;
  uint64_t num_enqueued = 0;
  uint64_t num_done = 0;
  bool is_capturing = false;
  std::vector<Work> captured;
  int32_t status = kOk;
  std::string error;
};

std::atomic<int64_t> num_graphs{0};

// Counted for as long as it is there.
std::vector<Work>* make_graph(std::vector<Work> captured) {
  ++num_graphs;
  return new std::vector<Work>(std::move(captured));
}
void delete_graph(const std::vector<Work>* captured) {
  --num_graphs;
  delete captured;
}

std::mutex running;  // a device runs one piece of work at a time

Stream& stream_of(void* stream) { return *static_cast<Stream*>(stream); }

}  // namespace

int32_t enqueue(void* stream, Work work) {
  if (stream == nullptr) return work();
  Stream& target = stream_of(stream);
  const std::lock_guard lock(target.mutex);
  if (target.is_capturing) {
    target.captured.push_back(std::move(work));
  } else {
    target.waiting.push_back(std::move(work));
    ++target.num_enqueued;
  }
  return kOk;
}

void* create_stream() { return new Stream; }

void destroy_stream(void* stream) { delete static_cast<Stream*>(stream); }

uint64_t position(void* stream) {
  Stream& target = stream_of(stream);
  const std::lock_guard lock(target.mutex);
  return target.num_enqueued;
}

int32_t run_until(void* stream, uint64_t position) {
  Stream& target = stream_of(stream);
  const std::lock_guard is_running(running);
  while (true) {
    Work work;
    {
      const std::lock_guard lock(target.mutex);
      if (target.num_done >= position) break;
      work = std::move(target.waiting.front());
      target.waiting.pop_front();
      ++target.num_done;
    }
    if (target.status != kOk) continue;
    target.status = work();
    if (target.status != kOk) target.error = error_text();
  }
  if (target.status != kOk) error_text() = target.error;
  return target.status;
}

int32_t begin_capture(void* stream) {
  Stream& target = stream_of(stream);
  const std::lock_guard lock(target.mutex);
  if (target.is_capturing) return fail("a capture's begin: the stream is being captured");
  target.is_capturing = true;
  return kOk;
}

int32_t end_capture(void* stream, Graph* graph) {
  Stream& target = stream_of(stream);
  const std::lock_guard lock(target.mutex);
  if (!target.is_capturing) return fail("a capture: the stream is not being captured");
  target.is_capturing = false;
  *graph = {make_graph(std::exchange(target.captured, {})), delete_graph};
  return kOk;
}

}  // namespace lmi::cuda::emulator

int64_t lmi_cuda_emulator_num_graphs() { return lmi::cuda::emulator::num_graphs.load(); }
