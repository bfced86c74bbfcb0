#include "graph/lora_table.h"

#include <utility>

#include "common/check.h"

namespace lmi {

LoraTable::LoraTable(std::vector<LoraShape> linears, DType dtype)
    : linears_(std::move(linears)),
      dtype_(dtype),
      adapters_(kNumSlots),
      slots_(std::make_unique<const cpu::LoraLinear*[]>(kNumSlots)) {
  LMI_CHECK(!linears_.empty(), "a table without linears");
  LMI_CHECK(dtype == DType::kF32 || dtype == DType::kBF16, "adapters are fp32 or bf16, not ",
            dtype_name(dtype));
}

const LoraShape& LoraTable::linear(int32_t linear_id) const {
  LMI_CHECK(linear_id >= 0 && linear_id < static_cast<int32_t>(linears_.size()), "linear ",
            linear_id, " of ", linears_.size());
  return linears_[linear_id];
}

void LoraTable::set(int32_t slot, std::vector<cpu::LoraLinear> adapter) {
  check_slot(slot);
  LMI_CHECK(adapter.size() == linears_.size(), "an adapter of ", adapter.size(),
            " linears for a table of ", linears_.size());
  for (size_t id = 0; id < adapter.size(); ++id) {
    for (int32_t i = 0; i < adapter[id].num_parts; ++i) check(adapter[id].parts[i], linears_[id]);
  }
  adapters_[slot] = std::move(adapter);
  slots_[slot] = adapters_[slot].data();
}

void LoraTable::clear(int32_t slot) {
  check_slot(slot);
  slots_[slot] = nullptr;
  adapters_[slot] = {};
}

void LoraTable::check(const cpu::LoraPart& part, const LoraShape& shape) const {
  LMI_CHECK(part.a.dtype == dtype_ && part.b.dtype == dtype_, "A is ", dtype_name(part.a.dtype),
            " and B ", dtype_name(part.b.dtype), ", not ", dtype_name(dtype_));
  LMI_CHECK(!part.a.gated && !part.b.gated, "A and B aren't gated");
  LMI_CHECK(part.a.num_inputs == shape.num_inputs, "A has ", part.a.num_inputs, " inputs, not ",
            shape.num_inputs);
  LMI_CHECK(part.a.num_outputs == part.b.num_inputs && part.a.num_outputs <= cpu::kMaxLoraRank,
            "A has the rank ", part.a.num_outputs, " and B ", part.b.num_inputs, "; at most ",
            cpu::kMaxLoraRank);
  LMI_CHECK(part.first_output >= 0 && part.first_output + part.b.num_outputs <= shape.num_outputs,
            "B has ", part.b.num_outputs, " outputs from ", part.first_output, " on, of ",
            shape.num_outputs);
}

void LoraTable::check_slot(int32_t slot) const {
  LMI_CHECK(slot >= 0 && slot < kNumSlots, "adapter slot ", slot, " of ", kNumSlots);
}

}  // namespace lmi
