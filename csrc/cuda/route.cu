// Which experts a row takes: a warp has a row, and a lane every 32nd expert's score.
#include <climits>
#include <cmath>

#include "cuda/expert_tile.cuh"
#include "cuda/launch.cuh"

namespace lmi::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarpSize;
constexpr float kLeast = -INFINITY;

// Whether the lane's experts are left, chosen and so on: a bit of each.
using Bits = uint32_t;

template <int kSlots>
class Row {
 public:
  __device__ Row(const LmiRoute& args, int64_t row)
      : args_(args), y_(args.y + row * 2 * args.top_k) {
    const float* logits = args.logits + row * args.num_experts;
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      const int expert = expert_of(slot);
      is_left_ |= static_cast<Bits>(expert < args.num_experts) << slot;
      logits_[slot] = expert < args.num_experts ? logits[expert] : kLeast;
    }
  }

  __device__ void score() {
    float sum = 0.0f;
    const float largest = warp_max(largest_logit());
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      float& own = scores_[slot];
      own = logits_[slot];
      if (args_.scoring == LMI_SIGMOID) own = 1.0f / (1.0f + exp_of(-own));
      if (args_.scoring == LMI_SOFTMAX) own = is_bit(is_left_, slot) ? exp_of(own - largest) : 0;
      sum += own;
    }
    if (args_.scoring == LMI_SOFTMAX) {
      sum = warp_sum(sum);
#pragma unroll
      for (int slot = 0; slot < kSlots; ++slot) scores_[slot] /= sum;
    }
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      const bool is_biased = args_.bias != nullptr && is_bit(is_left_, slot);
      chances_[slot] = scores_[slot] + (is_biased ? args_.bias[expert_of(slot)] : 0.0f);
    }
  }

  // Leaves the groups whose sums of best chances are greatest.
  __device__ void choose_groups() {
    if (args_.top_groups >= args_.num_groups) return;
    const int size = args_.num_experts / args_.num_groups;
    float total = kLeast;  // of the group with the lane's number
    for (int group = 0; group < args_.num_groups; ++group) {
      Bits is_left = 0;
#pragma unroll
      for (int slot = 0; slot < kSlots; ++slot) {
        const bool is_own = expert_of(slot) / size == group;
        is_left |= static_cast<Bits>(is_own && is_bit(is_left_, slot)) << slot;
      }
      float own = 0.0f;
      for (int i = 0; i < args_.group_best; ++i) {
        const Best best = best_of_warp(best_of(chances_, is_left));
        own += best.value;
        is_left &= ~bit_of(best.place);
      }
      if (lane_id() == group) total = own;
    }
    Bits is_kept = 0;  // of groups
    for (int i = 0; i < args_.top_groups; ++i) {
      const bool is_open = lane_id() < args_.num_groups && !is_bit(is_kept, lane_id());
      const Best best = best_of_warp(is_open ? Best{number_of(total), lane_id()} : Best{});
      is_kept |= Bits{1} << best.place;
    }
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      if (is_bit(is_left_, slot) && !is_bit(is_kept, expert_of(slot) / size)) {
        is_left_ &= ~(Bits{1} << slot);
      }
    }
  }

  __device__ void choose_experts() {
    for (int i = 0; i < args_.top_k; ++i) {
      const Best best = best_of_warp(best_of(chances_, is_left_));
      if (args_.scoring == LMI_SPARSEMIXER) weigh_sparsely(best.place);
      is_chosen_ |= bit_of(best.place);
      is_left_ &= ~bit_of(best.place);
    }
  }

  __device__ void store() const {
    float sum = 1.0f;
    if (args_.normalizes) {
      sum = 0.0f;
#pragma unroll
      for (int slot = 0; slot < kSlots; ++slot) sum += is_bit(is_chosen_, slot) ? scores_[slot] : 0;
      sum = warp_sum(sum);
    }
    int place = 0;
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      const bool is_chosen = is_bit(is_chosen_, slot);
      const int next = place + sum_up_to_lane(is_chosen ? 1 : 0);
      if (is_chosen) {
        y_[next - 1] = static_cast<float>(expert_of(slot));
        y_[args_.top_k + next - 1] = scores_[slot] / sum * args_.scale;
      }
      place = shuffle(next, kWarpSize - 1);
    }
  }

 private:
  struct Best {
    float value = kLeast;
    int place = INT_MAX;
  };

  __device__ static int expert_of(int slot) { return slot * kWarpSize + lane_id(); }
  __device__ static bool is_bit(Bits bits, int at) { return (bits >> at & 1) != 0; }
  // Of an expert, in the lane that has it.
  __device__ static Bits bit_of(int expert) {
    const bool is_own = expert % kWarpSize == lane_id() && expert < kSlots * kWarpSize;
    return is_own ? Bits{1} << expert / kWarpSize : 0;
  }
  // No NaN is greater than another number.
  __device__ static float number_of(float value) { return value == value ? value : kLeast; }

  __device__ float largest_logit() const {
    float largest = kLeast;
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) largest = max_of(largest, logits_[slot]);
    return largest;
  }

  // Of this lane's.
  __device__ static Best best_of(const float (&values)[kSlots], Bits is_left) {
    Best best;
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      if (!is_bit(is_left, slot)) continue;
      const float value = number_of(values[slot]);
      if (best.place == INT_MAX || value > best.value) best = {value, expert_of(slot)};
    }
    return best;
  }

  // Of equals the lowest place.
  __device__ static Best best_of_warp(Best best) {
    for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
      const Best other = {shuffle_xor(best.value, distance), shuffle_xor(best.place, distance)};
      const bool is_equal = other.value == best.value;
      if (other.value > best.value || (is_equal && other.place < best.place)) best = other;
    }
    return best;
  }

  // Its share of those that are left and within the threshold of it.
  __device__ void weigh_sparsely(int chosen) {
    const Bits is_own = bit_of(chosen);
    float most = 0.0f;
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) most += is_bit(is_own, slot) ? logits_[slot] : 0.0f;
    most = warp_sum(most);
    float sum = 0.0f;
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      const float left = is_bit(is_left_, slot) ? logits_[slot] : most;
      const float size = max_of(left < 0.0f ? -left : left, most);
      const bool is_near = (most - left) / (size > 0.0f ? size : 1.0f) <= args_.threshold;
      sum += is_bit(is_left_, slot) && is_near ? exp_of(left - most) : 0.0f;
    }
    sum = warp_sum(sum);
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      if (is_bit(is_own, slot)) scores_[slot] = 1.0f / sum;
    }
  }

  const LmiRoute& args_;
  float* y_;
  float logits_[kSlots];
  float scores_[kSlots];   // weights, once chosen
  float chances_[kSlots];  // by which they are chosen
  Bits is_left_ = 0;
  Bits is_chosen_ = 0;
};

template <int kSlots>
__global__ void __launch_bounds__(kThreads) route_kernel(const LmiRoute args) {
  wait_for_earlier_kernels();
  const int64_t row = int64_t{blockIdx.x} * kWarps + warp_id();
  if (row >= args.num_rows) return;
  Row<kSlots> own(args, row);
  own.score();
  own.choose_groups();
  own.choose_experts();
  own.store();
}

template <int kSlots>
int32_t launch_slots(const LmiRoute& args, void* stream) {
  return launch("route", route_kernel<kSlots>, {ceil_div(args.num_rows, kWarps)}, kThreads, 0,
                stream, args);
}

}  // namespace
}  // namespace lmi::cuda

using namespace lmi::cuda;

int32_t lmi_cuda_route(const LmiRoute* args, void* stream) {
  if (args->num_experts > LMI_MAX_EXPERTS || args->num_groups > LMI_MAX_EXPERT_GROUPS) {
    return fail("route: " + std::to_string(args->num_experts) + " experts in " +
                std::to_string(args->num_groups) + " groups; at most " +
                std::to_string(LMI_MAX_EXPERTS) + " in " + std::to_string(LMI_MAX_EXPERT_GROUPS) +
                " can be had");
  }
  constexpr int kFewSlots = 4;
  if (args->num_experts <= kFewSlots * kWarpSize) return launch_slots<kFewSlots>(*args, stream);
  return launch_slots<LMI_MAX_EXPERTS / kWarpSize>(*args, stream);
}
