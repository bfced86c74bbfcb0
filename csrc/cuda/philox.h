// Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): a token's
// random number depends on (seed, choice, position) only and is the one that csrc/cpu draws.
#pragma once

#include <cstdint>

#include "cuda/host_device.h"

namespace lmi::cuda {

struct PhiloxBlock {
  uint32_t word[4];
};

LMI_HOST_DEVICE inline PhiloxBlock philox(uint64_t key, PhiloxBlock counter) {
  auto key_low = static_cast<uint32_t>(key);
  auto key_high = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53u} * counter.word[0];
    const uint64_t b = uint64_t{0xCD9E8D57u} * counter.word[2];
    counter = {
        {static_cast<uint32_t>(b >> 32) ^ counter.word[1] ^ key_low, static_cast<uint32_t>(b),
         static_cast<uint32_t>(a >> 32) ^ counter.word[3] ^ key_high, static_cast<uint32_t>(a)}};
    key_low += 0x9E3779B9u;
    key_high += 0xBB67AE85u;
  }
  return counter;
}

// In [0, 1) with 53 random bits.
LMI_HOST_DEVICE inline double uniform(uint64_t seed, int32_t choice, int32_t position) {
  const PhiloxBlock block =
      philox(seed, {{static_cast<uint32_t>(position), static_cast<uint32_t>(choice), 0, 0}});
  const uint64_t bits = (uint64_t{block.word[0]} << 32 | block.word[1]) >> 11;
  return static_cast<double>(bits) * 0x1p-53;
}

}  // namespace lmi::cuda
