// How much memory attention may use to hand out partitions of a tile separately.
#include "cpu/kernels.h"

namespace lmi::cpu {

namespace {

constexpr int64_t kLanes = 16;
constexpr int64_t kMinPartialBytes = 1 << 20;
constexpr int64_t kMaxPartialBytes = 64 << 20;
constexpr int64_t kSplitSeqs = 4;  // longest sequences at once: with more, threads have enough work

constexpr int64_t round_up(int64_t value) { return (value + kLanes - 1) / kLanes * kLanes; }

}  // namespace

int64_t attention_workspace_bytes(const StepCapacity& capacity, int32_t num_q_heads,
                                  const KvCacheView& cache) {
  const int64_t group = num_q_heads / cache.num_kv_heads;
  const int64_t max_tokens =
      static_cast<int64_t>(capacity.max_blocks_per_seq) * capacity.block_size;
  const int64_t num_partitions = (max_tokens + kAttentionPartition - 1) / kAttentionPartition;
  const int64_t partial_floats = 2 * round_up(group) + group * round_up(cache.head_dim);
  int64_t bytes = kSplitSeqs * (num_partitions + 1) * cache.num_kv_heads * partial_floats * 4;
  if (bytes < kMinPartialBytes) bytes = kMinPartialBytes;
  if (bytes > kMaxPartialBytes) bytes = kMaxPartialBytes;
  return kAttentionMarkBytes + bytes;
}

}  // namespace lmi::cpu
