#include "check.h"
#include "cuda/candidate.h"
#include "cuda/philox.h"

namespace lmi::cuda {
namespace {

// The published answers of Philox 4x32-10.
TEST(cuda_philox_gives_the_published_numbers) {
  const PhiloxBlock zeros = philox(0, {{0, 0, 0, 0}});
  const uint32_t expected[] = {0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u};
  const PhiloxBlock ones = philox(~uint64_t{0}, {{~0u, ~0u, ~0u, ~0u}});
  const uint32_t expected_ones[] = {0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu};
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(zeros.word[i], expected[i]);
    EXPECT_EQ(ones.word[i], expected_ones[i]);
  }
}

TEST(cuda_candidates_are_in_order) {
  const float logits[] = {3.5f, 0.25f, 0.0f, -1e-30f, -2.0f, -3e38f};
  for (int i = 0; i < 5; ++i) {
    EXPECT(candidate_of(logits[i], 9) > candidate_of(logits[i + 1], 0));
    EXPECT(candidate_of(logits[i], 3) > candidate_of(logits[i], 4));
    EXPECT_EQ(token_of(candidate_of(logits[i], 131071)), 131071);
    EXPECT_EQ(logit_of(candidate_of(logits[i], 7)), logits[i]);
  }
  EXPECT_EQ(candidate_of(0.0f, 5), candidate_of(-0.0f, 5));
}

}  // namespace
}  // namespace lmi::cuda
