// From logits to tokens, one block per row: bound by reading the row a few times, mostly from L2.
#include "cuda/launch.cuh"
#include "cuda/philox.h"
#include "cuda/sample_block.cuh"

namespace lmi::cuda {
namespace {

// ---- the logits

// The first candidate, or 0 if a logit is NaN or infinite.
__device__ uint64_t best_candidate(const float* logits, int vocab_size, Shared& shared) {
  uint64_t best = 0;
  bool is_bad = false;
  for_own_tokens(vocab_size, [&](int token_id) {
    const float logit = logits[token_id];
    is_bad |= !(logit < INFINITY);
    best = greater_of(best, candidate_of(logit, token_id));
  });
  best = block_max(is_bad ? ~uint64_t{0} : best, shared);
  return best == ~uint64_t{0} || logit_of(best) < kLowestLogit ? 0 : best;
}

// Mass in the units of 1 / kUnit; that of each warp's segment stays in shared.masses, whose last
// readers have passed a barrier since.
__device__ uint64_t total_mass(const Distribution& distribution, Shared& shared) {
  uint64_t own = 0;
  for_own_tokens(distribution.vocab_size,
                 [&](int token_id) { own += distribution.mass(token_id); });
  own = warp_sum(own);
  if (lane_id() == 0) shared.masses[warp_id()] = own;
  block_barrier();
  uint64_t total = 0;
  for (int warp = 0; warp < kWarps; ++warp) total += shared.masses[warp];
  return total;
}

template <typename Action>
__device__ void for_edits(const LmiEdits& edits, int64_t row, int vocab_size,
                          const Action& action) {
  const int end = edits.offsets[row + 1];
  for (int i = edits.offsets[row] + static_cast<int>(threadIdx.x); i < end; i += kThreads) {
    if (edits.ids[i] >= 0 && edits.ids[i] < vocab_size) action(i, edits.ids[i]);
  }
  block_barrier();
}

__device__ bool has_edits(const LmiEdits& edits, int64_t row) {
  return edits.offsets[row + 1] > edits.offsets[row];
}

// The logits that the token is drawn by. Threads see those of their own tokens (for_own_tokens),
// and others' after the next barrier.
__device__ const float* modify(const LmiSample& args, int64_t row) {
  const float* logits = args.logits + row * args.vocab_size;
  if (args.modified == nullptr) return logits;
  const LmiSampleRow& rules = args.rows[row];
  if (!has_edits(args.biases, row) && !has_edits(args.seen, row) && !has_edits(args.bans, row) &&
      rules.mask < 0) {
    return logits;
  }
  float* modified = args.modified + row * args.vocab_size;
  for_own_tokens(args.vocab_size, [&](int token_id) { modified[token_id] = logits[token_id]; });
  block_barrier();
  for_edits(args.biases, row, args.vocab_size,
            [&](int i, int token_id) { atomic_add(modified + token_id, args.biases.values[i]); });
  for_edits(args.seen, row, args.vocab_size, [&](int i, int token_id) {
    const float times = args.seen.values[i];
    float logit = modified[token_id];
    logit = logit > 0.0f ? logit / rules.repetition_penalty : logit * rules.repetition_penalty;
    logit -= rules.frequency_penalty * times;
    if (times > 0.0f) logit -= rules.presence_penalty;
    modified[token_id] = logit;
  });
  for_edits(args.bans, row, args.vocab_size,
            [&](int, int token_id) { modified[token_id] = -INFINITY; });
  if (rules.mask >= 0) {
    const uint32_t* mask = args.masks + static_cast<int64_t>(rules.mask) * args.num_mask_words;
    for_own_tokens(args.vocab_size, [&](int token_id) {
      const bool is_allowed = mask[token_id / 32] >> (token_id % 32) & 1u;
      if (!is_allowed) modified[token_id] = -INFINITY;
    });
  }
  return modified;
}

// ---- choosing

// The token at the fraction `uniform` of the mass, in order of ids; shared.masses are the
// segments'.
__device__ int pick(const Distribution& distribution, uint64_t total, double fraction,
                    Shared& shared) {
  uint64_t rest = lower_of(static_cast<uint64_t>(fraction * static_cast<double>(total)), total - 1);
  int warp = 0;
  while (rest >= shared.masses[warp]) rest -= shared.masses[warp++];
  const Segment segment = segment_of(warp, distribution.vocab_size);
  if (threadIdx.x == 0) shared.token_id = -1;
  for (int begin = segment.begin; begin < segment.end; begin += kThreads * kPickWidth) {
    const int first = begin + static_cast<int>(threadIdx.x) * kPickWidth;
    uint64_t masses[kPickWidth];
    uint64_t own = 0;
#pragma unroll
    for (int i = 0; i < kPickWidth; ++i) {
      masses[i] = first + i < segment.end ? distribution.mass(first + i) : 0;
      own += masses[i];
    }
    uint64_t before = block_scan(own, shared);
    const uint64_t through = before + own;
#pragma unroll
    for (int i = 0; i < kPickWidth; ++i) {
      if (before <= rest && rest < before + masses[i]) shared.token_id = first + i;
      before += masses[i];
    }
    if (threadIdx.x == kThreads - 1) shared.above = through;
    block_barrier();
    if (shared.token_id >= 0) break;
    rest -= shared.above;  // which is written again after the next scan's barrier
  }
  return shared.token_id;
}

// Keeps the tokens nearest to the mean logit, that is those whose surprise is closest to the
// entropy (csrc/cpu/isa/typical.inc).
__device__ void keep_typical(float typical_p, Distribution& distribution, Shared& shared) {
  uint64_t mass = 0;
  uint64_t moment = 0;  // below the maximum: at most 1 / e times the greatest weight per token
  for_own_tokens(distribution.vocab_size, [&](int token_id) {
    const uint64_t own = distribution.mass(token_id);
    if (own == 0) return;
    const float below = distribution.maximum - distribution.logits[token_id];
    mass += own;
    moment +=
        static_cast<uint64_t>(static_cast<float>(own) * (below * distribution.inverse_temperature));
  });
  const auto total = static_cast<double>(block_sum(mass, shared.partials));
  const double mean_below = static_cast<double>(block_sum(moment, shared.masses)) / total;
  distribution.mean =
      distribution.maximum - static_cast<float>(mean_below) / distribution.inverse_temperature;
  const auto target = static_cast<uint64_t>(static_cast<double>(typical_p) * total);
  distribution.farthest =
      select_prefix([&](int token_id) { return distribution.by_distance(token_id); },
                    distribution.vocab_size, 0, greater_of<uint64_t>(target, 1),
                    [&](int token_id) { return distribution.mass(token_id); }, shared);
}

__device__ int draw(const LmiSampleRow& rules, Distribution distribution, Shared& shared) {
  const ByLogit order = {distribution.logits};
  const int vocab_size = distribution.vocab_size;
  if (rules.top_k > 0 && rules.top_k < vocab_size) {
    distribution.threshold = select_prefix(
        order, vocab_size, 0, static_cast<uint64_t>(rules.top_k), [](int) { return uint64_t{1}; },
        shared);
  }
  if (rules.top_p < 1.0f) {
    const auto mass = static_cast<double>(total_mass(distribution, shared));
    const auto target = static_cast<uint64_t>(static_cast<double>(rules.top_p) * mass);
    const uint64_t last = select_prefix(
        order, vocab_size, distribution.threshold, greater_of<uint64_t>(target, 1),
        [&](int token_id) { return distribution.mass(token_id); }, shared);
    distribution.threshold = greater_of(distribution.threshold, last);
  }
  distribution.min_p = rules.min_p;
  if (rules.typical_p < 1.0f) keep_typical(rules.typical_p, distribution, shared);
  const uint64_t total = total_mass(distribution, shared);
  return pick(distribution, total, uniform(rules.seed, rules.choice, rules.position), shared);
}

__device__ int choose(const LmiSample& args, int64_t row, Shared& shared) {
  const LmiSampleRow& rules = args.rows[row];
  const float* logits = modify(args, row);
  const uint64_t best = best_candidate(logits, args.vocab_size, shared);
  if (best == 0) return -1;
  if (!(rules.temperature > 0.0f)) return token_of(best);
  return draw(rules, {logits, args.vocab_size, logit_of(best), 1.0f / rules.temperature, 0, 0.0f},
              shared);
}

__device__ void report_top(const LmiSample& args, int64_t row, double log_mass, Shared& shared) {
  const float* logits = args.logits + row * args.vocab_size;
  const int num_top = lower_of(args.rows[row].num_top, args.vocab_size);
  if (num_top <= 0) return;
  const uint64_t last = select_prefix(
      ByLogit{logits}, args.vocab_size, 0, static_cast<uint64_t>(num_top),
      [](int) { return uint64_t{1}; }, shared);
  if (threadIdx.x == 0) shared.count = 0;
  block_barrier();
  for_own_tokens(args.vocab_size, [&](int token_id) {
    const uint64_t candidate = candidate_of(logits[token_id], token_id);
    if (candidate >= last) shared.top[atomic_add(&shared.count, 1)] = candidate;
  });
  block_barrier();
  for (int i = static_cast<int>(threadIdx.x); i < num_top; i += kThreads) {
    const uint64_t own = shared.top[i];
    int rank = 0;
    for (int other = 0; other < num_top; ++other) rank += shared.top[other] > own;
    const int64_t at = row * args.max_top + rank;
    args.top_ids[at] = token_of(own);
    args.top_logprobs[at] = static_cast<float>(static_cast<double>(logit_of(own)) - log_mass);
  }
}

// The target's place, from 1, equals in order of their ids.
__device__ void report_rank(const LmiSample& args, int64_t row, int target_id, Shared& shared) {
  const float* logits = args.logits + row * args.vocab_size;
  const float own = logits[target_id];
  uint64_t count = 0;
  for_own_tokens(args.vocab_size, [&](int token_id) {
    const float logit = logits[token_id];
    count += logit > own || (logit == own && token_id <= target_id);
  });
  count = block_sum(count, shared.partials);
  if (threadIdx.x == 0) args.target_ranks[row] = static_cast<int>(count);
}

__global__ void __launch_bounds__(kThreads) sample_kernel(const LmiSample args) {
  wait_for_earlier_kernels();
  __shared__ Shared shared;
  const int64_t row = blockIdx.x;
  const LmiSampleRow& rules = args.rows[row];
  const float* logits = args.logits + row * args.vocab_size;
  int token_id = rules.target_id;
  float logprob = 0.0f;
  int num_top = 0;
  int sampled_id = -1;
  if (threadIdx.x == 0) args.target_ranks[row] = 0;
  if (rules.is_sampled || token_id >= 0) {
    const uint64_t best = best_candidate(logits, args.vocab_size, shared);
    const bool is_valid = best != 0;
    double log_mass = 0.0;
    if (is_valid) {
      const Distribution plain = {logits, args.vocab_size, logit_of(best), 1.0f, 0, 0.0f};
      const auto mass = static_cast<double>(total_mass(plain, shared)) / double{kUnit};
      log_mass = static_cast<double>(plain.maximum) + log(mass);
      num_top = lower_of(rules.num_top, args.vocab_size);
      report_top(args, row, log_mass, shared);
      if (token_id >= 0) report_rank(args, row, token_id, shared);
      if (rules.is_sampled) token_id = sampled_id = choose(args, row, shared);
    }
    if (token_id >= 0) {
      logprob = static_cast<float>(static_cast<double>(logits[token_id]) - log_mass);
    }
  }
  if (threadIdx.x == 0) {
    args.token_ids[row] = sampled_id;
    args.logprobs[row] = logprob;
    args.num_top[row] = num_top;
  }
}

}  // namespace
}  // namespace lmi::cuda

using namespace lmi::cuda;

int32_t lmi_cuda_sample(const LmiSample* args, void* stream) {
  if (args->vocab_size < 1 || args->max_top < 0 || args->max_top > LMI_MAX_TOP) {
    return fail("sample: " + std::to_string(args->vocab_size) + " tokens, the first " +
                std::to_string(args->max_top) + " of them; at most " + std::to_string(LMI_MAX_TOP) +
                " can be had");
  }
  return launch("sample", sample_kernel, {args->num_rows}, kThreads, 0, stream, *args);
}
