// What a block does with one row of logits: its own order of tokens, sums, and the end of a prefix.
//
// Nothing is sorted. Weights are integers, multiples of 2^-40 of the greatest, so that their sums
// are the same in whatever order threads add them; histograms over the digits of candidates find
// where a prefix of so many tokens, or of so much mass, ends.
#pragma once

#include <cmath>

#include "cuda/candidate.h"
#include "cuda/device.cuh"
#include "cuda/lmi_cuda.h"

namespace lmi::cuda {

// Results don't depend on it; the emulator takes its time for every thread.
#if defined(LMI_CUDA_EMULATOR)
constexpr int kThreads = 64;
#else
constexpr int kThreads = 1024;
#endif
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kDigitBits = 11;
constexpr int kBins = 1 << kDigitBits;
constexpr int kPickWidth = 4;  // tokens of a thread when a token is picked
constexpr float kUnit = 0x1p40f;
constexpr float kLowestLogit = -3.4028234663852886e38f;

// A sum in halves, since shared memory adds up no more than 32 bits at once.
struct Halves {
  uint32_t low;
  uint32_t high;

  __device__ uint64_t sum() const { return uint64_t{high} << 32 | low; }

  // Atomic; what others add meanwhile is in one half before it is in the other.
  __device__ void add(uint64_t value) {
    const auto own = static_cast<uint32_t>(value);
    const uint32_t before = atomic_add(&low, own);
    const uint32_t rest = static_cast<uint32_t>(value >> 32) + (before + own < own ? 1 : 0);
    if (rest != 0) (void)atomic_add(&high, rest);
  }
};

struct Shared {
  Halves bins[kBins];
  uint64_t partials[kWarps];
  uint64_t masses[kWarps];
  uint64_t top[LMI_MAX_TOP];
  uint64_t above;
  int digit;
  int count;
  int token_id;
};

// The tokens kept of a row, and their weights.
struct Distribution {
  const float* logits;
  int vocab_size;
  float maximum;
  float inverse_temperature;
  uint64_t threshold;  // the last candidate kept
  float min_p;
  float mean = 0.0f;      // of the logits
  uint64_t farthest = 0;  // the last kept by distance from the mean; 0: all are

  __device__ float weight(float logit) const {
    return exp_of((logit - maximum) * inverse_temperature);
  }
  __device__ uint64_t mass(int token_id) const {
    const float logit = logits[token_id];
    if (candidate_of(logit, token_id) < threshold) return 0;
    const float own = weight(logit);
    if (farthest != 0 && by_distance(token_id) < farthest) return 0;
    return own >= min_p ? static_cast<uint64_t>(own * kUnit) : 0;
  }
  // In the order of distances from the mean.
  __device__ uint64_t by_distance(int token_id) const {
    return candidate_of(-fabsf(logits[token_id] - mean), token_id);
  }
};

// The order of logits.
struct ByLogit {
  const float* logits;
  __device__ uint64_t operator()(int token_id) const {
    return candidate_of(logits[token_id], token_id);
  }
};

// ---- over the block

// A warp's tokens, neighbours in the order of ids.
struct Segment {
  int begin;
  int end;
};

__device__ Segment segment_of(int warp, int vocab_size) {
  const int size = round_up(ceil_div(vocab_size, kWarps), kWarpSize);
  return {lower_of(warp * size, vocab_size), lower_of((warp + 1) * size, vocab_size)};
}

template <typename Action>
__device__ void for_own_tokens(int vocab_size, const Action& action) {
  const Segment segment = segment_of(warp_id(), vocab_size);
#pragma unroll 4
  for (int token_id = segment.begin + lane_id(); token_id < segment.end; token_id += kWarpSize) {
    action(token_id);
  }
}

__device__ uint64_t block_max(uint64_t value, Shared& shared) {
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    value = greater_of(value, shuffle_xor(value, distance));
  }
  if (lane_id() == 0) shared.partials[warp_id()] = value;
  block_barrier();
  for (int warp = 0; warp < kWarps; ++warp) value = greater_of(value, shared.partials[warp]);
  block_barrier();
  return value;
}

// The sum over the threads before this one. shared.partials are free for other use again after the
// next barrier.
__device__ uint64_t block_scan(uint64_t value, Shared& shared) {
  uint64_t sum = value;
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const uint64_t other = shuffle(sum, greater_of(lane_id() - distance, 0));
    if (lane_id() >= distance) sum += other;
  }
  if (lane_id() == kWarpSize - 1) shared.partials[warp_id()] = sum;
  block_barrier();
  for (int warp = 0; warp < warp_id(); ++warp) sum += shared.partials[warp];
  return sum - value;
}

// ---- choosing

// The last candidate of the shortest prefix, in descending order, whose weight reaches the target;
// 0 if all together don't. `order` gives a token's candidate, `weight` its weight; candidates below
// `floor` have none.
template <typename Order, typename Weight>
__device__ uint64_t select_prefix(const Order& order, int vocab_size, uint64_t floor,
                                  uint64_t target, const Weight& weight, Shared& shared) {
  uint64_t prefix = 0;  // the digits found so far
  for (int shift = 64;;) {
    const int bits = lower_of(shift, kDigitBits);
    shift -= bits;
    for (int bin = static_cast<int>(threadIdx.x); bin < kBins; bin += kThreads) {
      shared.bins[bin] = {};
    }
    if (threadIdx.x == 0) shared.digit = -1;
    block_barrier();
    for_own_tokens(vocab_size, [&](int token_id) {
      const uint64_t candidate = order(token_id);
      if (candidate < floor) return;
      // The digits above; none in the first round, where a shift by 64 would be undefined.
      if (shift + bits < 64 && candidate >> (shift + bits) != prefix) return;
      const uint64_t own = weight(token_id);
      const auto digit = static_cast<int>(candidate >> shift & ((uint64_t{1} << bits) - 1));
      if (own != 0) shared.bins[kBins - 1 - digit].add(own);
    });
    block_barrier();

    constexpr int kOwnBins = kBins / kThreads;
    const int first = static_cast<int>(threadIdx.x) * kOwnBins;
    uint64_t own = 0;
    for (int bin = first; bin < first + kOwnBins; ++bin) own += shared.bins[bin].sum();
    uint64_t above = block_scan(own, shared);
    for (int bin = first; bin < first + kOwnBins; ++bin) {
      const uint64_t through = above + shared.bins[bin].sum();
      if (above < target && through >= target) {
        shared.digit = kBins - 1 - bin;
        shared.above = above;
        shared.count = through == target;  // the bin is kept as a whole
      }
      above = through;
    }
    block_barrier();
    const int digit = shared.digit;
    const bool is_whole = shared.count != 0;
    target -= digit < 0 ? 0 : shared.above;
    block_barrier();
    if (digit < 0) return 0;
    prefix = prefix << bits | static_cast<uint64_t>(digit);
    if (is_whole || shift == 0) return prefix << shift;
  }
}

}  // namespace lmi::cuda
