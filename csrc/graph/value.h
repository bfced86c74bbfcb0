// What a recorded node reads or gives: what is known of it before there is memory for it.
#pragma once

#include <cstdint>
#include <string>

#include "common/dtype.h"

namespace lmi {

// kExperts: for each token, a row for each of its experts.
enum class RowSymbol : uint8_t { kTokens, kLogits, kExperts };

using ValueId = int32_t;

// kPartial, of a turn: where the other ranks read what this one's products gave.
enum class ValueMemory : uint8_t { kArena, kPartial, kLogits };

struct Value {
  std::string name;
  DType dtype = DType::kF32;
  int64_t columns = 0;
  RowSymbol rows = RowSymbol::kTokens;
  int32_t rows_per_token = 1;  // of kExperts
  int32_t first_node = 0;      // the node that defines it
  int32_t last_node = 0;       // the last node that reads it
  int64_t offset = 0;          // in the arena, after finish()
  ValueMemory memory = ValueMemory::kArena;
  int32_t turn = 0;  // of kPartial
};

}  // namespace lmi
