// Whole KV blocks copied in every layer: bound by memory.
#include "cuda/launch.cuh"

namespace lmi::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kVectorBytes = sizeof(Word4);

__global__ void copy_blocks_kernel(const LmiCopyBlocks args) {
  wait_for_earlier_kernels();
  uint8_t* layer = static_cast<uint8_t*>(args.store) + blockIdx.y * args.layer_bytes;
  const uint8_t* source = layer + args.src[blockIdx.x] * args.block_bytes;
  uint8_t* target = layer + args.dst[blockIdx.x] * args.block_bytes;
  for (int64_t at = threadIdx.x * kVectorBytes; at < args.block_bytes;
       at += kThreads * kVectorBytes) {
    *reinterpret_cast<Word4*>(target + at) = *reinterpret_cast<const Word4*>(source + at);
  }
}

}  // namespace
}  // namespace lmi::cuda

using namespace lmi::cuda;

int32_t lmi_cuda_copy_blocks(const LmiCopyBlocks* args, void* stream) {
  if (args->block_bytes % kVectorBytes != 0 || args->layer_bytes % kVectorBytes != 0 ||
      !is_aligned(args->store)) {
    return fail("copy_blocks: blocks of " + std::to_string(args->block_bytes) +
                " bytes; they must be whole and start on " + std::to_string(kVectorBytes));
  }
  return launch("copy_blocks", copy_blocks_kernel, {args->num_copies, args->num_layers}, kThreads,
                0, stream, *args);
}
