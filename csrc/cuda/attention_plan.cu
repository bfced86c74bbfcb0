// A step's attention plan behind the C interface; host code only.
#include "cuda/attention_plan.h"

#include "cuda/launch.cuh"

using namespace lmi::cuda;

int32_t lmi_cuda_plan_attention(LmiAttentionPlan* request, void*) {
  if (request->num_kv_heads < 1 || request->num_q_heads % request->num_kv_heads != 0 ||
      request->num_q_heads / request->num_kv_heads > kMaxGroup) {
    return fail("plan_attention: " + std::to_string(request->num_q_heads) + " query heads for " +
                std::to_string(request->num_kv_heads) + " KV heads");
  }
  if (request->split_tokens < 0 || request->split_tokens % kSplitUnit != 0) {
    return fail("plan_attention: splits of " + std::to_string(request->split_tokens) +
                " tokens; a multiple of " + std::to_string(kSplitUnit) + " can be had");
  }
  const AttentionPlan plan = plan_attention(*request);
  const size_t needed = std::max({plan.decode.size(), plan.prefill.size(), plan.merges.size()});
  if (needed > static_cast<size_t>(greater_of(request->capacity, 0))) {
    return fail("plan_attention: room for " + std::to_string(request->capacity) + " entries, " +
                std::to_string(needed) + " are needed");
  }
  std::copy(plan.decode.begin(), plan.decode.end(), request->decode);
  std::copy(plan.prefill.begin(), plan.prefill.end(), request->prefill);
  std::copy(plan.merges.begin(), plan.merges.end(), request->merges);
  request->num_decode = static_cast<int32_t>(plan.decode.size());
  request->num_prefill = static_cast<int32_t>(plan.prefill.size());
  request->num_merges = static_cast<int32_t>(plan.merges.size());
  request->num_partials = plan.num_partials;
  return kOk;
}
