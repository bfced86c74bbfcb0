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
  LmiEdits put(const LmiEdits& edits, int32_t num_rows, bool has_values) {
    const int64_t count = edits.offsets[num_rows];
    return {put(edits.offsets, num_rows + 1), put(edits.ids, count),
            has_values ? put(edits.values, count) : nullptr};
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
  target_ranks = next + 3 * num_rows;
  top_ids = next + 4 * num_rows;
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
  args.num_rows = step.num_logit_rows;
  args.max_top = step.sampling.max_top;
  const Results places(results, args.num_rows, args.max_top);
  args.token_ids = places.token_ids;
  args.logprobs = places.logprobs;
  args.num_top = places.num_top;
  args.target_ranks = places.target_ranks;
  args.top_ids = places.top_ids;
  args.top_logprobs = places.top_logprobs;
  const LmiStepEdits& wanted = *step.sampling.edits(step.sampling.context);
  if (const int32_t status = upload_edits(wanted, edits, stream, args)) return status;
  return lmi_cuda_sample(&args, stream);
}

int32_t StepSampler::upload_edits(const LmiStepEdits& wanted, GrowingUpload& edits, void* stream,
                                  LmiSample& args) const {
  const int32_t num_rows = args.num_rows;
  const int64_t num_edits = 2 * int64_t{wanted.biases.offsets[num_rows]} +
                            2 * int64_t{wanted.seen.offsets[num_rows]} +
                            wanted.bans.offsets[num_rows];
  if (num_edits + wanted.num_masks == 0) return kOk;
  args.modified = args_.modified;
  const int64_t num_words =
      3 * (int64_t{num_rows} + 1) + num_edits + int64_t{wanted.num_masks} * args.num_mask_words;
  if (4 * num_words > edits.num_bytes()) {
    if (const int32_t status = edits.grow(8 * num_words)) return status;
  }
  Words words(edits);
  args.biases = words.put(wanted.biases, num_rows, true);
  args.seen = words.put(wanted.seen, num_rows, true);
  args.bans = words.put(wanted.bans, num_rows, false);
  for (int32_t i = 0; i < wanted.num_masks; ++i) {
    const uint32_t* mask = words.put(wanted.masks[i], args.num_mask_words);
    if (i == 0) args.masks = mask;
  }
  return runtime::upload(edits.device(), edits.host(), words.num_bytes(), stream);
}

}  // namespace lmi::cuda
