// Host code only: each node copies its arguments, fills in the step's and calls the kernel.
#include "cuda/step_nodes.h"

#include "cuda/launch.cuh"
#include "cuda/linear_dense.h"
#include "cuda/linear_unpacked.h"

namespace lmi::cuda {
namespace {

bool has_few_rows(const LmiLinearDense& args) {
  return args.num_rows <= LMI_MAX_FEW_ROWS && args.num_inputs % 8 == 0;
}

// A kernel that wants nothing of a step but how many rows it has.
template <typename Args>
Launch row_node(const void* given, int32_t rows, int32_t (*launch)(const Args*, void*)) {
  return [given = *static_cast<const Args*>(given), rows, launch](const StepContext& step,
                                                                  void* stream) {
    Args args = given;
    args.num_rows = step.num_rows(rows);
    return launch(&args, stream);
  };
}

Launch copy_blocks_node(const LmiCopyBlocks& given) {
  return [given](const StepContext& step, void* stream) {
    LmiCopyBlocks args = given;
    args.src = step.inputs.copy_src;
    args.dst = step.inputs.copy_dst;
    args.num_copies = step.counts.num_copies;
    return lmi_cuda_copy_blocks(&args, stream);
  };
}

// By one of the step's arrays.
Launch gather_node(const void* given, int32_t rows, int32_t* StepInputs::* ids) {
  return [given = *static_cast<const LmiGatherRows*>(given), rows, ids](const StepContext& step,
                                                                        void* stream) {
    LmiGatherRows args = given;
    args.ids = step.inputs.*ids;
    args.num_rows = step.num_rows(rows);
    return lmi_cuda_gather_rows(&args, stream);
  };
}

Launch rope_cache_write_node(const LmiRopeCacheWrite& given) {
  return [given](const StepContext& step, void* stream) {
    LmiRopeCacheWrite args = given;
    args.positions = step.inputs.positions;
    args.slots = step.inputs.slots;
    args.num_tokens = step.counts.num_tokens;
    return lmi_cuda_rope_cache_write(&args, stream);
  };
}

Launch lora_add_node(const LmiLoraAdd& given) {
  return [given](const StepContext& step, void* stream) {
    LmiLoraAdd args = given;
    args.tiles = step.inputs.lora_tiles;
    args.num_tiles = step.counts.num_lora_tiles;
    return args.num_tiles == 0 ? kOk : lmi_cuda_lora_add(&args, stream);
  };
}

Launch linear_node(const LmiLinearDense& given, int32_t rows) {
  return [given, rows](const StepContext& step, void* stream) {
    LmiLinearDense args = given;
    args.num_rows = step.num_rows(rows);
    if (!has_few_rows(args)) return lmi_cuda_linear_dense(&args, stream);
    const LmiLinear few = {args.x,          args.weight,   args.bias,
                           args.y,          args.num_rows, args.num_outputs,
                           args.num_inputs, args.dtype,    args.y_dtype};
    return lmi_cuda_linear_few_rows(&few, stream);
  };
}

}  // namespace

Launch step_node(int32_t node, int32_t rows, const void* args) {
  switch (node) {
    case LMI_NODE_COPY_BLOCKS:
      return copy_blocks_node(*static_cast<const LmiCopyBlocks*>(args));
    case LMI_NODE_EMBED:
      return gather_node(args, LMI_TOKEN_ROWS, &StepInputs::token_ids);
    case LMI_NODE_ADD_POSITIONS:
      return gather_node(args, LMI_TOKEN_ROWS, &StepInputs::positions);
    case LMI_NODE_GATHER_LOGIT_ROWS:
      return gather_node(args, LMI_LOGIT_ROWS, &StepInputs::logit_token_rows);
    case LMI_NODE_RMS_NORM:
      return row_node(args, rows, lmi_cuda_rms_norm);
    case LMI_NODE_NORM:
      return row_node(args, rows, lmi_cuda_norm);
    case LMI_NODE_ACTIVATION:
      return row_node(args, rows, lmi_cuda_activation);
    case LMI_NODE_GATED_ACTIVATION:
      return row_node(args, rows, lmi_cuda_gated_activation);
    case LMI_NODE_ROPE_CACHE_WRITE:
      return rope_cache_write_node(*static_cast<const LmiRopeCacheWrite*>(args));
    case LMI_NODE_LINEAR:
      return linear_node(*static_cast<const LmiLinearDense*>(args), rows);
    case LMI_NODE_LINEAR_PACKED:
      return row_node(args, rows, lmi_cuda_linear_packed);
    case LMI_NODE_QUANTIZE_ROWS:
      return row_node(args, rows, lmi_cuda_quantize_rows);
    case LMI_NODE_LINEAR_QUANTIZED:
      return row_node(args, rows, lmi_cuda_linear_quantized);
    case LMI_NODE_HEAD_LINEAR:
      return row_node(args, rows, lmi_cuda_head_linear);
    case LMI_NODE_LORA_ADD:
      return lora_add_node(*static_cast<const LmiLoraAdd*>(args));
    case LMI_NODE_ROUTE:
      return row_node(args, rows, lmi_cuda_route);
    case LMI_NODE_GROUP_ROWS:
      return row_node(args, rows, lmi_cuda_group_rows);
    case LMI_NODE_LINEAR_EXPERTS:
      return row_node(args, rows, lmi_cuda_linear_experts);
    case LMI_NODE_ADD_EXPERTS:
      return row_node(args, rows, lmi_cuda_add_experts);
    case LMI_NODE_ALL_REDUCE:
      return row_node(args, rows, lmi_cuda_all_reduce);
    case LMI_NODE_SQUARE_HEADS:
      return row_node(args, rows, lmi_cuda_square_heads);
    case LMI_NODE_SCALE_HEADS:
      return row_node(args, rows, lmi_cuda_scale_heads);
    case LMI_NODE_GATHER_COLUMNS:
      return row_node(args, rows, lmi_cuda_gather_columns);
    default:
      return {};
  }
}

Launch attention_node(const LmiAttention& given, size_t shape_id) {
  return [given, shape_id](const StepContext& step, void* stream) -> int32_t {
    LmiAttention args = given;
    args.first_rows = step.inputs.first_rows;
    args.num_rows = step.inputs.num_rows;
    args.kv_lengths = step.inputs.kv_lengths;
    args.block_tables = step.inputs.block_tables;
    args.table_stride = step.counts.table_columns;
    args.block_size = step.block_size;
    const StepCounts::Work& lengths = step.counts.work[shape_id];
    const StepInputs::Work& lists = step.inputs.work[shape_id];
    if (lengths.num_decode > 0) {
      LmiAttention decode = args;
      decode.work = lists.decode;
      decode.num_work = lengths.num_decode;
      decode.partials = step.partials;
      decode.log_masses = step.log_masses;
      decode.arrivals = step.arrivals;
      if (const int32_t status = lmi_cuda_decode_attention(&decode, stream)) return status;
    }
    if (lengths.num_prefill == 0) return kOk;
    args.work = lists.prefill;
    args.num_work = lengths.num_prefill;
    return lmi_cuda_prefill_attention(&args, stream);
  };
}

int32_t prepare_linear(const LmiLinearDense& given, int32_t num_rows) {
  LmiLinearDense args = given;
  args.num_rows = num_rows;
  return has_few_rows(args) ? kOk : prepare_linear_dense(args);
}

namespace {

template <typename Args>
int32_t prepare_panels(const Args& given, int32_t num_rows) {
  Args args = given;
  args.num_rows = num_rows;
  return is_unpacked(args) ? prepare_linear_unpacked(args) : kOk;
}

}  // namespace

int32_t prepare_linear_packed(const LmiLinearPacked& given, int32_t num_rows) {
  return prepare_panels(given, num_rows);
}

int32_t prepare_linear_quantized(const LmiLinearQuantized& given, int32_t num_rows) {
  return prepare_panels(given, num_rows);
}

}  // namespace lmi::cuda
