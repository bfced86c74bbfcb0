// Host code only, around the sample kernel.
#include "cuda/step_sampler.h"

#include <cstring>

namespace lmi::cuda {
namespace {

// Words behind one another, on the host and on the device.
class Words {
 public:
  explicit Words(const GrowingUpload& memory) : memory_(memory) {}

  // Where they will be on the device.
  template <typename T>
  const T* put(const T* source, int64_t count) {
    static_assert(sizeof(T) == 4);
    if (count > 0) std::memcpy(memory_.host() + 4 * count_, source, static_cast<size_t>(4 * count));
    const auto* place = reinterpret_cast<const T*>(memory_.device() + 4 * count_);
    count_ += count;
    return place;
  }
  int64_t num_bytes() const { return 4 * count_; }

 private:
  const GrowingUpload& memory_;
  int64_t count_ = 0;
};

}  // namespace

Results::Results(void* memory, int64_t num_rows, int64_t max_top) {
  auto* next = static_cast<int32_t*>(memory);
  token_ids = next;
  logprobs = reinterpret_cast<float*>(next + num_rows);
  num_top = next + 2 * num_rows;
  top_ids = next + 3 * num_rows;
  top_logprobs = reinterpret_cast<float*>(top_ids + num_rows * max_top);
}

void StepSampler::set(const LmiSample& args) {
  args_ = args;
  args_.num_mask_words = ceil_div(args.vocab_size, 32);
}

int32_t StepSampler::launch(const LmiStep& step, const StepInputs& inputs, void* results,
                            GrowingUpload& edits, void* stream) const {
  LmiSample args = args_;
  args.modified = nullptr;
  args.rows = inputs.sample_rows;
  args.biases.offsets = inputs.bias_offsets;
  args.seen.offsets = inputs.seen_offsets;
  args.bans.offsets = inputs.ban_offsets;
  args.num_rows = step.num_logit_rows;
  args.max_top = step.sampling.max_top;
  const Results places(results, args.num_rows, args.max_top);
  args.token_ids = places.token_ids;
  args.logprobs = places.logprobs;
  args.num_top = places.num_top;
  args.top_ids = places.top_ids;
  args.top_logprobs = places.top_logprobs;
  if (const int32_t status = upload_edits(step.sampling, args.num_rows, edits, stream, args)) {
    return status;
  }
  return lmi_cuda_sample(&args, stream);
}

int32_t StepSampler::upload_edits(const LmiStepSampling& sampling, int32_t num_rows,
                                  GrowingUpload& edits, void* stream, LmiSample& args) const {
  const int64_t num_biases = sampling.biases.offsets[num_rows];
  const int64_t num_seen = sampling.seen.offsets[num_rows];
  const int64_t num_bans = sampling.bans.offsets[num_rows];
  const int64_t num_words =
      2 * num_biases + 2 * num_seen + num_bans + int64_t{sampling.num_masks} * args.num_mask_words;
  if (num_words == 0) return kOk;
  args.modified = args_.modified;
  if (4 * num_words > edits.num_bytes()) {
    if (const int32_t status = edits.grow(8 * num_words)) return status;
  }
  Words words(edits);
  args.biases.ids = words.put(sampling.biases.ids, num_biases);
  args.biases.values = words.put(sampling.biases.values, num_biases);
  args.seen.ids = words.put(sampling.seen.ids, num_seen);
  args.seen.values = words.put(sampling.seen.values, num_seen);
  args.bans.ids = words.put(sampling.bans.ids, num_bans);
  if (sampling.num_masks > 0) sampling.wait_for_masks(sampling.context);
  for (int32_t i = 0; i < sampling.num_masks; ++i) {
    const uint32_t* mask = words.put(sampling.masks[i], args.num_mask_words);
    if (i == 0) args.masks = mask;
  }
  return runtime::upload(edits.device(), edits.host(), words.num_bytes(), stream);
}

}  // namespace lmi::cuda
