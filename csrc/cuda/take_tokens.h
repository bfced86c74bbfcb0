// Token ids that a step takes from the one before, on the device.
#pragma once

#include <cstdint>

namespace lmi::cuda {

// token_ids[i] = max(sampled_ids[rows[i]], 0) for i < num_tokens, where rows[i] >= 0.
struct TakeTokens {
  const int32_t* sampled_ids;
  const int32_t* rows;
  int32_t* token_ids;
  int32_t num_tokens;
};
int32_t take_tokens(const TakeTokens& args, void* stream);

}  // namespace lmi::cuda
