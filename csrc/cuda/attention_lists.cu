// A step's attention lists behind the C interface; host code only.
#include "cuda/attention_lists.h"

#include "cuda/launch.cuh"

using namespace lmi::cuda;

int32_t lmi_cuda_list_attention(LmiAttentionLists* request, void*) {
  if (request->num_kv_heads < 1 || request->num_q_heads % request->num_kv_heads != 0 ||
      request->num_q_heads / request->num_kv_heads > max_group(request->head_dim)) {
    return fail("list_attention: " + std::to_string(request->num_q_heads) + " query heads for " +
                std::to_string(request->num_kv_heads) + " KV heads");
  }
  if (request->split_tokens < 0 || request->split_tokens % kSplitUnit != 0) {
    return fail("list_attention: splits of " + std::to_string(request->split_tokens) +
                " tokens; a multiple of " + std::to_string(kSplitUnit) + " can be had");
  }
  const AttentionLists lists = list_attention(*request);
  const size_t needed = std::max(lists.decode.size(), lists.prefill.size());
  if (needed > static_cast<size_t>(greater_of(request->capacity, 0))) {
    return fail("list_attention: room for " + std::to_string(request->capacity) + " entries, " +
                std::to_string(needed) + " are needed");
  }
  std::copy(lists.decode.begin(), lists.decode.end(), request->decode);
  std::copy(lists.prefill.begin(), lists.prefill.end(), request->prefill);
  request->num_decode = static_cast<int32_t>(lists.decode.size());
  request->num_prefill = static_cast<int32_t>(lists.prefill.size());
  request->num_partials = lists.num_partials;
  return kOk;
}
