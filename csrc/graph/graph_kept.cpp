// Rows that are kept by slot, from one step to another: recorded, and where those of a step go.
#include <cstring>

#include "common/check.h"
#include "graph/graph.h"

namespace lmi {

ValueId Graph::kept_rows(cpu::EmbedArgs args) {
  const ValueId y = embed(args);
  std::get<EmbedNode>(nodes_.back()).ids = &StepView::slots;
  return y;
}

void Graph::keep_rows(ValueId x, uint8_t* table) {
  check_recording();
  const Value& rows = value(x);
  LMI_CHECK(rows.rows != RowSymbol::kExperts, "experts' rows have no slots");
  if (rows.rows == RowSymbol::kLogits && next_slots_ == nullptr) {
    next_slots_ = std::make_unique<int32_t[]>(config_.capacity.max_logit_rows);
  }
  const cpu::ScatterRowsArgs args{.y = table, .row_bytes = rows.columns * dtype_size(rows.dtype)};
  add_node(KeepRowsNode{args, x}, {x});
}

ValueId Graph::spread_columns(ValueId x, const int32_t* columns, int64_t num_columns) {
  check_recording();
  const int64_t count = value(x).columns;
  check_operand(x, DType::kF32, count, "spread_columns");
  for (int64_t i = 0; i < count; ++i) {
    LMI_CHECK(columns[i] > (i == 0 ? -1 : columns[i - 1]) && columns[i] < num_columns, "column ", i,
              " becomes ", columns[i], " of ", num_columns, ", in ascending order");
  }
  const ValueId y = add_value("spread", DType::kF32, num_columns, value(x).rows);
  const cpu::SpreadColumnsArgs args{
      .x_stride = count, .columns = columns, .num_columns = num_columns};
  add_node(SpreadColumnsNode{args, x, y}, {x, y});
  return y;
}

void Graph::bind_kept(KeepRowsNode& node, const StepView& step) const {
  const StepCapacity& capacity = step.capacity;
  if (values_[node.x].rows == RowSymbol::kTokens) {
    node.args.rows = step.slots;
    const int64_t block_bytes = capacity.block_size * node.args.row_bytes;
    for (int32_t i = 0; i < step.num_copies; ++i) {
      std::memcpy(node.args.y + step.copy_dst[i] * block_bytes,
                  node.args.y + step.copy_src[i] * block_bytes, static_cast<size_t>(block_bytes));
    }
    return;
  }
  int32_t sequence = 0;
  for (int32_t i = 0; i < step.num_logit_rows; ++i) {
    const int32_t token_row = step.logit_token_rows[i];
    while (step.first_rows[sequence] + step.num_rows[sequence] <= token_row) ++sequence;
    const int32_t position = step.positions[token_row] + 1;
    const int64_t table_row = step.table_rows[sequence];
    const int32_t block =
        step.block_tables[table_row * capacity.max_blocks_per_seq + position / capacity.block_size];
    next_slots_[i] = block * capacity.block_size + position % capacity.block_size;
  }
  node.args.rows = next_slots_.get();
}

}  // namespace lmi
