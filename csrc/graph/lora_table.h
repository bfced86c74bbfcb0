// LoRA adapters in memory by slot: what the adapter slots of steps refer to.
//
// The loop's thread sets and clears slots while the worker reads others: a slot may be changed only
// while no step that was submitted refers to it. Places never move.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "cpu/kernels.h"

namespace lmi {

// Of a linear that adapters may add to.
struct LoraShape {
  int64_t num_inputs = 0;
  int64_t num_outputs = 0;
};

class LoraTable {
 public:
  static constexpr int32_t kNumSlots = 1 << 16;

  // linears: by linear id. dtype: of x, A and B.
  LoraTable(std::vector<LoraShape> linears, DType dtype);

  const LoraShape& linear(int32_t linear_id) const;
  DType dtype() const { return dtype_; }

  // What an adapter adds, by linear id; the weights' memory is the caller's. Throws Error if it
  // doesn't fit the linears' shapes.
  void set(int32_t slot, std::vector<cpu::LoraLinear> adapter);
  void clear(int32_t slot);
  bool has(int32_t slot) const { return slot >= 0 && slot < kNumSlots && slots_[slot] != nullptr; }

  const cpu::LoraLinear* const* slots() const { return slots_.get(); }

 private:
  void check(const cpu::LoraPart& part, const LoraShape& shape) const;
  void check_slot(int32_t slot) const;

  std::vector<LoraShape> linears_;
  DType dtype_;
  std::vector<std::vector<cpu::LoraLinear>> adapters_;
  std::unique_ptr<const cpu::LoraLinear*[]> slots_;
};

}  // namespace lmi
