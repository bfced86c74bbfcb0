// Owner of a repacked weight matrix.
#pragma once

#include <cstdint>
#include <vector>

#include "common/packed_memory.h"
#include "cpu/kernels.h"

namespace lmi {

class LinearWeight {
 public:
  // Repacks the parts, concatenated along the outputs, on num_threads threads.
  LinearWeight(const std::vector<cpu::LinearPart>& parts, int64_t num_inputs, bool gated,
               cpu::LinearFormat format, int32_t num_threads);

  const cpu::PackedLinear& packed() const { return packed_; }
  int64_t num_bytes() const { return memory_.num_bytes(); }

 private:
  cpu::PackedLinear packed_;
  PackedMemory memory_;
};

}  // namespace lmi
