#include "graph/linear_weight.h"

#include <algorithm>
#include <atomic>
#include <thread>

#include "common/check.h"
#include "common/checksum.h"
#include "cpu/finite.h"
#include "cpu/panel_rows.h"

namespace lmi {

namespace {

constexpr int64_t kFinitePiece = 1 << 20;  // numbers that a thread looks at in one go
constexpr int64_t kPieceBytes = 4 << 20;   // half of what is packed in one go, behind

// Calls work(i) for i in 0 .. num_threads - 1, each in a thread of its own, this one among them.
template <typename Work>
void run_in_threads(int64_t num_threads, const Work& work) {
  std::vector<std::thread> threads;
  for (int64_t i = 1; i < num_threads; ++i) threads.emplace_back(work, i);
  work(0);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

LinearWeight::LinearWeight(const std::vector<cpu::LinearPart>& parts, int64_t num_inputs,
                           bool gated, cpu::LinearFormat format, int32_t num_threads,
                           int64_t num_experts,
                           std::vector<std::shared_ptr<const MappedFile>> files)
    : files_(std::move(files)) {
  LMI_CHECK(!parts.empty(), "a weight needs parts and inputs");
  LMI_CHECK(num_experts > 0 && parts.size() % num_experts == 0, parts.size(), " parts of ",
            num_experts, " experts");
  const size_t num_parts = parts.size() / num_experts;
  LMI_CHECK(!gated || (num_parts == 2 && parts[0].num_outputs == parts[1].num_outputs),
            "a gated weight has two parts of one size, gate and up");
  int64_t num_outputs = 0;
  for (size_t i = 0; i < num_parts; ++i) num_outputs += parts[i].num_outputs;
  for (size_t i = num_parts; i < parts.size(); ++i) {
    LMI_CHECK(parts[i].num_outputs == parts[i - num_parts].num_outputs, "experts of ",
              parts[i - num_parts].num_outputs, " and ", parts[i].num_outputs, " outputs");
  }
  set_shape({num_outputs, num_inputs, gated, format, num_experts});
  memory_ = PackedMemory(num_bytes_);
  packed_.data = memory_.data();
  is_finite_ =
      num_experts > 1 ? pack_experts(parts, format, num_threads)
      : files_.empty()
          ? pack_panels(parts, format, 0, cpu::num_linear_panels(num_outputs, gated), num_threads)
          : leave_stored(parts, num_threads);
}

bool LinearWeight::leave_stored(const std::vector<cpu::LinearPart>& parts, int32_t num_threads) {
  LMI_CHECK(
      packed_.dtype == DType::kBF16 && packed_.num_experts == 1 && files_.size() == parts.size(),
      "only a bf16 matrix of its own can stay in its files");
  std::atomic<bool> is_finite{true};
  for (const cpu::LinearPart& part : parts) {
    LMI_CHECK(part.dtype == DType::kBF16, "a part of bf16, not ", dtype_name(part.dtype));
    const int64_t count = part.num_outputs * packed_.num_inputs;
    const int64_t num_pieces = count / kFinitePiece + 1;
    std::atomic<int64_t> next{0};
    run_in_threads(std::clamp<int64_t>(num_threads, 1, num_pieces), [&](int64_t) {
      for (int64_t piece; (piece = next++) < num_pieces;) {
        const int64_t first = piece * kFinitePiece;
        const void* data = static_cast<const bf16_t*>(part.data) + first;
        if (!cpu::all_finite(part.dtype, data, std::min(kFinitePiece, count - first))) {
          is_finite = false;
        }
      }
    });
  }
  const int64_t num_panels = cpu::num_linear_panels(packed_.num_outputs, packed_.gated);
  for (int64_t panel = 0; panel < num_panels; ++panel) {
    for (const cpu::PanelRow& row :
         cpu::find_rows(parts, packed_.num_inputs, packed_.gated, panel).at) {
      rows_.push_back(row.data);
    }
  }
  parts_ = parts;
  stored_ = std::make_unique<cpu::StoredRows>();
  stored_->rows = rows_.data();
  packed_.stored = stored_.get();
  return is_finite;
}

bool LinearWeight::pack_piece(int32_t num_threads) {
  const std::lock_guard lock(packing_);
  const int64_t num_panels = cpu::num_linear_panels(packed_.num_outputs, packed_.gated);
  if (is_packed() || num_packed_panels_ == num_panels) return true;
  // Gated panels go in pairs.
  const int64_t piece = std::max<int64_t>(kPieceBytes * num_panels / num_bytes_, 1) * 2;
  const int64_t end = std::min(num_packed_panels_ + piece, num_panels);
  pack_panels(parts_, {DType::kBF16}, num_packed_panels_, end, num_threads);
  num_packed_panels_ = end;
  if (end < num_panels) return false;
  for (const auto& file : files_) {
    if (file->is_lost()) return true;  // who reads it next is told
  }
  __atomic_store_n(&stored_->is_packed, 1, __ATOMIC_RELEASE);
  for (size_t i = 0; i < parts_.size(); ++i) {
    const auto* data = static_cast<const uint8_t*>(parts_[i].data);
    files_[i]->drop(data - files_[i]->data(0, 0),
                    parts_[i].num_outputs * parts_[i].row_bytes(packed_.num_inputs));
  }
  return true;
}

bool LinearWeight::pack_panels(const std::vector<cpu::LinearPart>& parts, cpu::LinearFormat format,
                               int64_t first_panel, int64_t end_panel, int32_t num_threads) {
  const int64_t num_inputs = packed_.num_inputs;
  const int64_t num_panels = end_panel - first_panel;
  // Few panels aren't worth a thread; gated ones go in pairs.
  const int64_t work = num_panels * cpu::kPanelOutputs * num_inputs / (1 << 18) + 1;
  const int64_t num_workers = std::clamp<int64_t>(work, 1, std::max(1, num_threads));
  const int64_t step = (num_panels / 2 + num_workers) / num_workers * 2;
  std::atomic<bool> is_finite{true};
  run_in_threads((num_panels + step - 1) / step, [&](int64_t i) {
    const int64_t first = first_panel + i * step;
    if (!cpu::pack_looked_at(parts, num_inputs, packed_.gated, format, memory_.data(), first,
                             std::min(first + step, end_panel))) {
      is_finite = false;
    }
  });
  return is_finite;
}

bool LinearWeight::pack_experts(const std::vector<cpu::LinearPart>& parts, cpu::LinearFormat format,
                                int32_t num_threads) {
  const int64_t num_parts = static_cast<int64_t>(parts.size()) / packed_.num_experts;
  const int64_t num_panels = cpu::num_linear_panels(packed_.num_outputs, packed_.gated);
  std::atomic<int64_t> next{0};
  std::atomic<bool> is_finite{true};
  run_in_threads(std::clamp<int64_t>(num_threads, 1, packed_.num_experts), [&](int64_t) {
    for (int64_t expert; (expert = next++) < packed_.num_experts;) {
      const auto first = parts.begin() + expert * num_parts;
      if (!cpu::pack_looked_at({first, first + num_parts}, packed_.num_inputs, packed_.gated,
                               format, memory_.data() + expert * packed_.expert_bytes, 0,
                               num_panels)) {
        is_finite = false;
      }
    }
  });
  return is_finite;
}

LinearWeight::LinearWeight(const LinearShape& shape, const PackedSlice& slice, int32_t num_threads)
    : files_{slice.file} {
  set_shape(shape);
  const MappedFile& file = *slice.file;
  LMI_CHECK(slice.num_bytes == num_bytes_, file.path(), " holds ", slice.num_bytes,
            " bytes of a matrix that has ", num_bytes_);
  const uint8_t* data = file.data(slice.offset, num_bytes_);
  LMI_CHECK(slice.offset % kAlignment == 0, "a matrix at ", slice.offset, " isn't aligned");
  packed_.data = data;

  const int64_t num_pieces = (num_bytes_ + kChecksumPieceBytes - 1) / kChecksumPieceBytes;
  std::vector<uint64_t> checksums(num_pieces);
  std::atomic<int64_t> next_piece{0};
  run_in_threads(std::clamp<int64_t>(num_threads, 1, num_pieces), [&](int64_t) {
    for (int64_t piece; (piece = next_piece++) < num_pieces;) {
      const int64_t first = piece * kChecksumPieceBytes;
      const int64_t count = std::min(kChecksumPieceBytes, num_bytes_ - first);
      file.populate(slice.offset + first, count);
      checksums[piece] = piece_checksum(data + first, count);
    }
  });
  LMI_CHECK(combine_checksums(checksums) == slice.checksum, file.path(), " is damaged at ",
            slice.offset);
}

void LinearWeight::order_inputs(std::vector<int32_t> order) {
  LMI_CHECK(packed_.takes_quantized_rows() && packed_.num_experts == 1,
            "only inputs of one matrix with quantised rows have another order");
  std::vector<int32_t> sorted = order;
  std::sort(sorted.begin(), sorted.end());
  bool is_complete = static_cast<int64_t>(order.size()) == packed_.num_inputs;
  for (size_t i = 0; i < sorted.size(); ++i) {
    is_complete = is_complete && sorted[i] == static_cast<int32_t>(i);
  }
  LMI_CHECK(is_complete, "an order has each of ", packed_.num_inputs, " inputs once");
  input_order_ = std::move(order);
  packed_.input_order = input_order_.data();
}

void LinearWeight::set_shape(const LinearShape& shape) {
  LMI_CHECK(shape.num_inputs > 0 && shape.num_outputs > 0, "a weight needs outputs and inputs");
  cpu::check_linear_format(shape.format, shape.num_inputs);
  const int64_t expert_bytes =
      cpu::packed_linear_bytes(shape.format, shape.num_outputs, shape.num_inputs, shape.gated);
  num_bytes_ = expert_bytes * shape.num_experts;
  packed_ = {.dtype = shape.format.dtype,
             .num_outputs = shape.num_outputs,
             .num_inputs = shape.num_inputs,
             .gated = shape.gated,
             .data = nullptr,
             .group_size = shape.format.group_size,
             .rounding = shape.format.rounding,
             .num_experts = shape.num_experts,
             .expert_bytes = expert_bytes};
}

}  // namespace lmi
