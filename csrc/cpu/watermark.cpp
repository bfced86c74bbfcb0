#include "cpu/watermark.h"

#include <numeric>
#include <random>
#include <utility>

namespace lmi::cpu {

int32_t favour_tokens(int32_t previous_id, double gamma, int32_t vocab_size, int32_t* order) {
  constexpr uint64_t kHashKey = 15485863;
  std::mt19937 random(static_cast<uint32_t>(kHashKey * static_cast<uint64_t>(previous_id)));
  std::iota(order, order + vocab_size, 0);
  const auto count = static_cast<int32_t>(static_cast<double>(vocab_size) * gamma);
  // What a shuffle from the front has placed stays, so the rest of it isn't needed.
  for (int32_t i = 0; i < count && i < vocab_size - 1; ++i) {
    std::swap(order[i],
              order[i + static_cast<int32_t>(random() % static_cast<uint32_t>(vocab_size - i))]);
  }
  return count;
}

}  // namespace lmi::cpu
