// The ids that the step before sampled, as inputs of the next one: the host needn't know them.
#include "cuda/take_tokens.h"

#include "cuda/launch.cuh"

namespace lmi::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void take_tokens_kernel(const TakeTokens args) {
  wait_for_earlier_kernels();
  const int token = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (token >= args.num_tokens || args.rows[token] < 0) return;
  args.token_ids[token] = greater_of(args.sampled_ids[args.rows[token]], 0);
}

}  // namespace

int32_t take_tokens(const TakeTokens& args, void* stream) {
  return launch("take_tokens", take_tokens_kernel, {ceil_div(args.num_tokens, kThreads)}, kThreads,
                0, stream, args);
}

}  // namespace lmi::cuda
