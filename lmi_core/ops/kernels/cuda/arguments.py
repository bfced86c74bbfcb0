"""The argument structs of csrc/cuda/lmi_cuda.h."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p


class RmsNorm(ctypes.Structure):
    _fields_ = [
        ("x", c_void_p),
        ("addend", c_void_p),
        ("weight", c_void_p),
        ("y", c_void_p),
        ("num_rows", c_int32),
        ("num_columns", c_int32),
        ("eps", c_float),
        ("y_dtype", c_int32),
        ("codes", c_void_p),
        ("scales", c_void_p),
        ("stride", c_int32),
        ("code_type", c_int32),
    ]


class GatedActivation(ctypes.Structure):
    _fields_ = [
        ("gate_up", c_void_p),
        ("y", c_void_p),
        ("num_rows", c_int32),
        ("num_columns", c_int32),
        ("activation", c_int32),
        ("y_dtype", c_int32),
        ("codes", c_void_p),
        ("scales", c_void_p),
        ("stride", c_int32),
        ("code_type", c_int32),
    ]


class RopeCacheWrite(ctypes.Structure):
    _fields_ = [
        ("qkv", c_void_p),
        ("q", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("num_tokens", c_int32),
        ("num_q_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("half_rotary", c_int32),
        ("norm_eps", c_float),
        ("q_dtype", c_int32),
        ("kv_dtype", c_int32),
        ("key_scales", c_void_p),
        ("value_scales", c_void_p),
        ("key_scale", c_float),
        ("value_scale", c_float),
    ]


class GatherRows(ctypes.Structure):
    _fields_ = [
        ("table", c_void_p),
        ("ids", c_void_p),
        ("y", c_void_p),
        ("num_rows", c_int32),
        ("num_columns", c_int32),
        ("scale", c_float),
        ("table_dtype", c_int32),
    ]


class CopyBlocks(ctypes.Structure):
    _fields_ = [
        ("store", c_void_p),
        ("src", c_void_p),
        ("dst", c_void_p),
        ("layer_bytes", c_int64),
        ("block_bytes", c_int64),
        ("num_layers", c_int32),
        ("num_copies", c_int32),
    ]


class AttentionPlan(ctypes.Structure):
    """Host pointers; what follows ``capacity`` and the lists are results."""

    _fields_ = [
        ("num_rows", c_void_p),
        ("kv_lengths", c_void_p),
        ("num_seqs", c_int32),
        ("num_q_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("window", c_int32),
        ("num_slots", c_int32),
        ("split_tokens", c_int32),
        ("capacity", c_int32),
        ("decode", c_void_p),
        ("prefill", c_void_p),
        ("merges", c_void_p),
        ("num_decode", c_int32),
        ("num_prefill", c_int32),
        ("num_merges", c_int32),
        ("num_partials", c_int32),
    ]


class Attention(ctypes.Structure):
    _fields_ = [
        ("q", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("y", c_void_p),
        ("first_rows", c_void_p),
        ("num_rows", c_void_p),
        ("kv_lengths", c_void_p),
        ("block_tables", c_void_p),
        ("work", c_void_p),
        ("merges", c_void_p),
        ("partials", c_void_p),
        ("log_masses", c_void_p),
        ("num_work", c_int32),
        ("num_merges", c_int32),
        ("table_stride", c_int32),
        ("block_size", c_int32),
        ("num_q_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("window", c_int32),
        ("scale", c_float),
        ("soft_cap", c_float),
        ("dtype", c_int32),
        ("kv_dtype", c_int32),
        ("value_scale", c_float),
        ("key_scales", c_void_p),
        ("value_scales", c_void_p),
    ]


class Edits(ctypes.Structure):
    _fields_ = [("offsets", c_void_p), ("ids", c_void_p), ("values", c_void_p)]


class Sample(ctypes.Structure):
    _fields_ = [
        ("logits", c_void_p),
        ("modified", c_void_p),
        ("rows", c_void_p),
        ("biases", Edits),
        ("seen", Edits),
        ("bans", Edits),
        ("masks", c_void_p),
        ("token_ids", c_void_p),
        ("logprobs", c_void_p),
        ("num_top", c_void_p),
        ("top_ids", c_void_p),
        ("top_logprobs", c_void_p),
        ("num_rows", c_int32),
        ("vocab_size", c_int32),
        ("max_top", c_int32),
        ("num_mask_words", c_int32),
    ]


class Linear(ctypes.Structure):
    _fields_ = [
        ("x", c_void_p),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("y", c_void_p),
        ("num_rows", c_int32),
        ("num_outputs", c_int32),
        ("num_inputs", c_int32),
        ("dtype", c_int32),
    ]


class LinearDense(ctypes.Structure):
    _fields_ = [
        ("x", c_void_p),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("y", c_void_p),
        ("workspace", c_void_p),
        ("workspace_bytes", c_int64),
        ("num_rows", c_int32),
        ("num_outputs", c_int32),
        ("num_inputs", c_int32),
        ("y_stride", c_int32),
        ("dtype", c_int32),
    ]


class LinearPacked(ctypes.Structure):
    _fields_ = [
        ("x", c_void_p),
        ("panels", c_void_p),
        ("bias", c_void_p),
        ("y", c_void_p),
        ("unpacked", c_void_p),
        ("unpacked_bytes", c_int64),
        ("workspace", c_void_p),
        ("workspace_bytes", c_int64),
        ("max_packed_rows", c_int32),
        ("num_rows", c_int32),
        ("num_outputs", c_int32),
        ("num_inputs", c_int32),
        ("group_size", c_int32),
        ("is_gated", c_int32),
        ("dtype", c_int32),
    ]


class QuantizeRows(ctypes.Structure):
    _fields_ = [
        ("x", c_void_p),
        ("codes", c_void_p),
        ("scales", c_void_p),
        ("num_rows", c_int32),
        ("num_columns", c_int32),
        ("stride", c_int32),
        ("dtype", c_int32),
        ("code_type", c_int32),
    ]


class LinearQuantized(ctypes.Structure):
    _fields_ = [
        ("codes", c_void_p),
        ("row_scales", c_void_p),
        ("panels", c_void_p),
        ("bias", c_void_p),
        ("y", c_void_p),
        ("num_rows", c_int32),
        ("num_outputs", c_int32),
        ("num_inputs", c_int32),
        ("stride", c_int32),
        ("group_size", c_int32),
        ("is_gated", c_int32),
        ("code_type", c_int32),
    ]


ARGUMENTS: dict[str, type[ctypes.Structure]] = {
    "rms_norm": RmsNorm,
    "gated_activation": GatedActivation,
    "rope_cache_write": RopeCacheWrite,
    "gather_rows": GatherRows,
    "copy_blocks": CopyBlocks,
    "plan_attention": AttentionPlan,
    "decode_attention": Attention,
    "prefill_attention": Attention,
    "sample": Sample,
    "linear_few_rows": Linear,
    "linear_dense": LinearDense,
    "linear_tiled": LinearDense,
    "linear_packed": LinearPacked,
    "quantize_rows": QuantizeRows,
    "linear_quantized": LinearQuantized,
}
