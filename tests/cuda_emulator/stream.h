// Streams of the emulator: what is put onto one runs when somebody waits for it, so that memory
// that is reused too early shows.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace lmi::cuda::emulator {

using Work = std::function<int32_t()>;  // 0, or an error that stays the stream's
using Graph = std::shared_ptr<const std::vector<Work>>;

// Runs it at once where there is no stream; into the graph of one that is being captured.
int32_t enqueue(void* stream, Work work);

void* create_stream();
void destroy_stream(void* stream);

// How much was put onto the stream so far.
uint64_t position(void* stream);
// Runs everything up to there; what the first failure returned, from then on.
int32_t run_until(void* stream, uint64_t position);

// 0, or -1 if the stream is being captured already, or isn't.
int32_t begin_capture(void* stream);
int32_t end_capture(void* stream, Graph* graph);

}  // namespace lmi::cuda::emulator

// Graphs of this process that aren't destroyed.
extern "C" __attribute__((visibility("default"))) int64_t lmi_cuda_emulator_num_graphs();
