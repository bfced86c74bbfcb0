// Owner of a repacked weight matrix.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "common/mapped_file.h"
#include "common/packed_memory.h"
#include "cpu/kernels.h"

namespace lmi {

struct LinearShape {
  int64_t num_outputs = 0;
  int64_t num_inputs = 0;
  bool gated = false;
  cpu::LinearFormat format;
  int64_t num_experts = 1;
};

// Where a packed matrix lies in a file, and the checksum that its bytes must have.
struct PackedSlice {
  std::shared_ptr<const MappedFile> file;
  int64_t offset = 0;  // a multiple of 64
  int64_t num_bytes = 0;
  uint64_t checksum = 0;
};

class LinearWeight {
 public:
  // Repacks the parts, concatenated along the outputs, on num_threads threads. Of several experts,
  // each has as many parts, the first one's first. With `files`, which the parts of a bf16 matrix
  // lie in as bf16, they are only looked at: products read them there until finish_packing().
  LinearWeight(const std::vector<cpu::LinearPart>& parts, int64_t num_inputs, bool gated,
               cpu::LinearFormat format, int32_t num_threads, int64_t num_experts = 1,
               std::vector<std::shared_ptr<const MappedFile>> files = {});
  // What an equal weight's data() held, left where it is in the file. Throws Error if it isn't what
  // was written, which reading it all with num_threads threads tells.
  LinearWeight(const LinearShape& shape, const PackedSlice& slice, int32_t num_threads);

  // Says that the packed matrix's inputs are these of a row's, each of which is one. Throws Error
  // for others, and where rows aren't quantised or each expert has a matrix of its own.
  void order_inputs(std::vector<int32_t> order);

  // Packs a piece of what was left in its files, beside steps that read it; the last one gives the
  // files' pages back. False: there is more. A matrix whose file was truncated stays as it is. From
  // any thread.
  bool pack_piece(int32_t num_threads);
  void finish_packing(int32_t num_threads) {
    while (!pack_piece(num_threads)) continue;
  }
  bool is_packed() const {
    return stored_ == nullptr || __atomic_load_n(&stored_->is_packed, __ATOMIC_ACQUIRE) != 0;
  }

  const cpu::PackedLinear& packed() const { return packed_; }
  const uint8_t* data() const { return static_cast<const uint8_t*>(packed_.data); }
  int64_t num_bytes() const { return num_bytes_; }
  // Whether no part held a NaN or an infinity; of a weight that was read, it was seen when packed.
  bool is_finite() const { return is_finite_; }
  // The files that the weight was left in.
  const std::vector<std::shared_ptr<const MappedFile>>& files() const { return files_; }

 private:
  void set_shape(const LinearShape& shape);
  // Whether all is finite, as the next.
  bool leave_stored(const std::vector<cpu::LinearPart>& parts, int32_t num_threads);
  bool pack_panels(const std::vector<cpu::LinearPart>& parts, cpu::LinearFormat format,
                   int64_t first_panel, int64_t end_panel, int32_t num_threads);
  bool pack_experts(const std::vector<cpu::LinearPart>& parts, cpu::LinearFormat format,
                    int32_t num_threads);

  cpu::PackedLinear packed_;
  std::vector<int32_t> input_order_;
  int64_t num_bytes_ = 0;
  bool is_finite_ = true;
  PackedMemory memory_;  // of a weight that was packed here
  std::vector<std::shared_ptr<const MappedFile>> files_;
  // Of one that is packed while it is used:
  std::mutex packing_;
  std::vector<cpu::LinearPart> parts_;  // each of one of the files
  std::vector<const uint8_t*> rows_;
  int64_t num_packed_panels_ = 0;
  std::unique_ptr<cpu::StoredRows> stored_;
};

}  // namespace lmi
