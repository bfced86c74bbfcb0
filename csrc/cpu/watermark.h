// Which tokens a watermark favours (Kirchenbauer et al. 2023), as text-generation-inference chooses
// them on a CPU.
#pragma once

#include <cstdint>

namespace lmi::cpu {

// Puts the tokens favoured behind `previous_id` in front of `order` [vocab_size], and returns how
// many there are: a share `gamma` of the vocabulary, rounded down. They are the first ones of what
// PyTorch's randperm(vocab_size) gives on a CPU, seeded with 15485863 times `previous_id`.
int32_t favour_tokens(int32_t previous_id, double gamma, int32_t vocab_size, int32_t* order);

}  // namespace lmi::cpu
