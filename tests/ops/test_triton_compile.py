"""Every Triton kernel compiles for the GPUs it is meant for; no GPU is needed."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("triton")

HEAD = {"NUM_KV_HEADS": 8, "GROUP": 4, "HEAD_DIM": 128, "BLOCK_SIZE": 32, "BLOCK_DIM": 128}
TILE = {"BLOCK_KEYS": 32, "HAS_WINDOW": True, "HAS_SOFT_CAP": True, "IS_WIDENED": False}
TILE |= {"HAS_SLOPES": False, "CODE": ""}
INT8, E4M3, E5M2 = ({**TILE, "CODE": code} for code in ("int8", "e4m3", "e5m2"))
E4NV = {**TILE, "CODE": "e4nv"}
POINTERS = {
    "q_ptr": "*bf16",
    "keys_ptr": "*bf16",
    "values_ptr": "*bf16",
    "y_ptr": "*bf16",
    "seqs_ptr": "*i32",
    "tiles_ptr": "*i32",
    "tables_ptr": "*i32",
    "first_rows_ptr": "*i32",
    "num_rows_ptr": "*i32",
    "kv_lengths_ptr": "*i32",
    "positions_ptr": "*i32",
    "slots_ptr": "*i32",
    "codes_ptr": "*u8",
    "halves_ptr": "*fp16",
    "row_codes_ptr": "*u8",
    "outliers_ptr": "*i32",
    "token_rows_ptr": "*i32",
    "places_ptr": "*i32",
    "addresses_ptr": "*i64",
}
POINTERS_OF = {
    "linear": {"x_ptr": "*bf16"},
    "linear_unpacked": {"words_ptr": "*i32", "y_ptr": "*bf16"},
    "row_codes": {"x_ptr": "*bf16"},
    "experts": {"x_ptr": "*bf16", "y_ptr": "*fp32"},
    "routing": {"y_ptr": "*fp32"},
    "invariant.linear": {"x_ptr": "*bf16", "weight_ptr": "*bf16", "y_ptr": "*fp32"},
}
CODE_POINTERS = {"int8": "*i8", "e4m3": "*u8", "e4nv": "*u8", "e5m2": "*u8"}
FLOATS = {"eps", "norm_eps", "scale", "soft_cap", "cap", "key_scale", "value_scale", "threshold"}
FLOATS |= {"fixed_scale"}
SINKS = {"HAS_SINKS": False}
OF_HEADS = {"HAS_SLOPES": True, "HAS_SINKS": True}
PLAIN = {**TILE, "HAS_WINDOW": False, "HAS_SOFT_CAP": False}
ROPE = {"HEAD_DIM": 128, "BLOCK": 128, "CODE": ""}
ODD_HEAD = {**HEAD, "GROUP": 3, "HEAD_DIM": 80}
WIDE_HEAD = {**HEAD, "GROUP": 6}
ONE_HEAD = {**HEAD, "GROUP": 1}
WIDEST_HEAD = {**ONE_HEAD, "HEAD_DIM": 256, "BLOCK_DIM": 256}
ONE_MATRIX = {"NUM_EXPERTS": 0, "BLOCK_EXPERTS": 1, "IS_BY_TOKEN": False}
EXPERTS = {"NUM_EXPERTS": 128, "BLOCK_EXPERTS": 128, "IS_BY_TOKEN": True}
PACKED = {
    **ONE_MATRIX,
    "HAS_BIAS": True,
    "IS_GATED": True,
    "GROUP": 128,
    "HEADER": 64,
    "GROUP_BYTES": 1088,
    "BLOCK_ROWS": 16,
    "BLOCK_PANELS": 2,
    "IS_WIDENED": False,
}
UNPACKED = {"GROUP_STEPS": 16, "HEADER": 64, "STEP": 64, "BLOCK_OUTPUTS": 16, "BLOCK_STEPS": 32}
QUANTIZED = {
    **ONE_MATRIX,
    "HAS_BIAS": True,
    "HAS_OUTLIERS": False,
    "IS_GATED": True,
    "HEADER": 64,
    "BLOCK_ROWS": 64,
    "BLOCK_PANELS": 4,
    "BLOCK_INPUTS": 128,
    "IS_INT8": False,
    "IS_GROUPED": False,
    "IS_DECODED": False,
    "IS_WIDENED": False,
}
FEW_ROWS = {"BLOCK_ROWS": 16, "BLOCK_PANELS": 2}
RESULTS: dict[str, Any] = {"ELEMENT": "bf16", "CODES": ""}
GATED = {**RESULTS, "IS_GATED": True}
CODED_ROW = {**GATED, "ACTIVATION": "silu", "BLOCK": 16384}
CAUSAL = {"SEES_LATER": False, "HAS_RELATIVE": False}
BOTH_WAYS = {"SEES_LATER": True, "HAS_RELATIVE": True}
PREFILL = {"BLOCK_GROUP": 4, "QUERY_TILE": 32, **CAUSAL}
PARTITION = {"BLOCK_GROUP": 4, "QUERY_TILE": 16, "PARTITION_KEYS": 256, **CAUSAL}
DECODE = {"BLOCK_GROUP": 16, "BLOCK_KEYS": 64}
LINEAR = {
    "HAS_BIAS": True,
    "BLOCK_ROWS": 64,
    "BLOCK_OUTPUTS": 32,
    "BLOCK_INPUTS": 64,
    "IS_WIDENED": False,
}
WIDE = {
    "NUM_KV_HEADS": 1,
    "GROUP": 128,
    "HEAD_DIM": 576,
    "BLOCK_SIZE": 32,
    "BLOCK_DIM": 512,
    "BLOCK_REST": 64,
    "BLOCK_KEYS": 32,
    "BLOCK_GROUP": 64,
    "QUERY_TILE": 1,
    "TILE_TOKENS": 1,
    "IS_LATENT": True,
    "IS_WIDENED": False,
    "IS_DECODE": False,
    "IS_SPLIT": False,
    "CODE": "",
}
FEW_WIDE_KEYS = {**WIDE, "BLOCK_KEYS": 16}
FP32_WIDE = {**FEW_WIDE_KEYS, "BLOCK_GROUP": 16, "POINTER": "*fp32"}
WIDE_DECODE = {"IS_DECODE": True, "IS_SPLIT": True, "BLOCK_GROUP": 16}
NORM = {"HAS_ADDEND": True, "HAS_WEIGHT": True, "HAS_BIAS": True, **RESULTS, "BLOCK": 4096}
RMS_NORM = {**NORM, "KIND": "rms", "HAS_BIAS": False}
PLAIN_ROW = {**RESULTS, "IS_GATED": False, "BLOCK": 1024}
SCORINGS = ("softmax", "sigmoid", "sparsemixer")
ROUTE = {
    "NUM_EXPERTS": 160,
    "TOP_K": 6,
    "HAS_BIAS": False,
    "GROUP_SIZE": 20,
    "NUM_GROUPS": 0,
    "TOP_GROUPS": 3,
    "GROUP_BEST": 2,
    "NORMALIZES": True,
    "BLOCK": 256,
}
PLAIN_KERNELS = {
    ("norm", "_norm_kernel"),
    ("activation", "_activation_kernel"),
    ("activation", "_bounding_kernel"),
    ("rope", "_rope_cache_write_kernel"),
    ("row_codes", "_quantize_rows_kernel"),
    ("linear_unpacked", "_unpack_kernel"),
    ("experts", "_group_kernel"),
    ("experts", "_combine_kernel"),
    ("routing", "_route_kernel"),
}
"""Without products, which is what differs between architectures."""
OLD_CODES = {"row_codes": ("fp8",), "rope": ("e4m3",), "attention": ("", "e4m3")}
"""That older architectures convert by more instructions: a kernel each way of using them."""
OPTIONS = {"wide_attention": {"num_warps": 8, "num_stages": 2}}
"""That kernels are launched with."""
SHARED_BYTES = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10}
"""That a block can have; for 89, tiles of wide heads have FEW_WIDE_KEYS."""
KERNELS: list[tuple[str, str, dict[str, Any]]] = [
    ("norm", "_norm_kernel", RMS_NORM),
    ("norm", "_norm_kernel", {**RMS_NORM, "HAS_ADDEND": False}),
    ("norm", "_norm_kernel", {**RMS_NORM, "CODES": "int8"}),
    ("norm", "_norm_kernel", {**RMS_NORM, "CODES": "fp8"}),
    *(
        ("activation", "_activation_kernel", {**GATED, "ACTIVATION": name, "BLOCK": 1024})
        for name in ("silu", "gelu_tanh", "gelu", "relu", "relu2", "clamped_swiglu")
    ),
    ("activation", "_activation_kernel", {**CODED_ROW, "BLOCK": 4096, "CODES": "int8"}),
    ("activation", "_activation_kernel", {**CODED_ROW, "BLOCK": 4096, "CODES": "outliers"}),
    ("activation", "_activation_kernel", {**CODED_ROW, "CODES": "fp8"}),
    ("rope", "_rope_cache_write_kernel", {"HAS_Q_NORM": True, "HAS_K_NORM": True, **ROPE}),
    ("rope", "_rope_cache_write_kernel", {"HAS_Q_NORM": False, "HAS_K_NORM": False, **ROPE}),
    *(
        (
            "rope",
            "_rope_cache_write_kernel",
            {**ROPE, "HAS_Q_NORM": True, "HAS_K_NORM": True, "CODE": code},
        )
        for code in ("int8", "e4m3", "e5m2")
    ),
    ("attention", "_decode_kernel", {**HEAD, **TILE, **SINKS, **DECODE}),
    ("attention", "_decode_kernel", {**HEAD, **INT8, **SINKS, "BLOCK_GROUP": 16}),
    ("attention", "_decode_kernel", {**HEAD, **E4M3, **SINKS, "BLOCK_GROUP": 16}),
    ("attention", "_decode_kernel", {**HEAD, **E5M2, **SINKS, "BLOCK_GROUP": 16}),
    ("attention", "_decode_kernel", {**ODD_HEAD, **PLAIN, **SINKS, **DECODE}),
    ("attention", "_prefill_kernel", {**PREFILL, **HEAD, **TILE, **SINKS}),
    ("attention", "_prefill_kernel", {**PREFILL, **HEAD, **INT8, **SINKS}),
    ("attention", "_prefill_kernel", {**PREFILL, **HEAD, **E4M3, **SINKS}),
    ("attention", "_prefill_kernel", {**PREFILL, **HEAD, **E5M2, **SINKS}),
    (
        "attention",
        "_prefill_kernel",
        {**PREFILL, **ODD_HEAD, **PLAIN, **SINKS},
    ),
    (
        "attention",
        "_prefill_kernel",
        {**CAUSAL, "BLOCK_GROUP": 8, "QUERY_TILE": 16, **WIDE_HEAD, **PLAIN, **SINKS},
    ),
    (
        "attention",
        "_prefill_kernel",
        {**CAUSAL, "BLOCK_GROUP": 1, "QUERY_TILE": 128, **ONE_HEAD, **TILE, **SINKS},
    ),
    (
        "attention",
        "_prefill_kernel",
        {**CAUSAL, "BLOCK_GROUP": 1, "QUERY_TILE": 64, **WIDEST_HEAD, **TILE, **SINKS},
    ),
    ("linear", "_linear_packed_kernel", PACKED),
    ("linear", "_linear_packed_kernel", {**PACKED, "BLOCK_ROWS": 64}),
    ("linear_unpacked", "_unpack_kernel", {**UNPACKED, "IS_GATED": True}),
    ("linear_unpacked", "_unpack_kernel", {**UNPACKED, "IS_GATED": False}),
    ("row_codes", "_quantize_rows_kernel", {"CODES": "int8", "BLOCK": 4096}),
    ("row_codes", "_quantize_rows_kernel", {"CODES": "outliers", "BLOCK": 4096}),
    ("row_codes", "_quantize_rows_kernel", {"CODES": "fp8", "BLOCK": 4096}),
    ("linear_quantized", "_linear_quantized_kernel", {**QUANTIZED, "IS_INT8": True}),
    (
        "linear_quantized",
        "_linear_quantized_kernel",
        {**QUANTIZED, "IS_INT8": True, "HAS_OUTLIERS": True},
    ),
    ("linear_quantized", "_linear_quantized_kernel", QUANTIZED),
    ("linear_quantized", "_linear_quantized_kernel", {**QUANTIZED, "IS_GROUPED": True}),
    (
        "linear_quantized",
        "_linear_quantized_kernel",
        {**QUANTIZED, **FEW_ROWS, "IS_INT8": True, "IS_GATED": False},
    ),
    ("linear_quantized", "_linear_quantized_kernel", {**QUANTIZED, **FEW_ROWS}),
    ("invariant.attention", "_partition_kernel", {**PARTITION, **HEAD, **TILE}),
    ("invariant.attention", "_partition_kernel", {**PARTITION, **HEAD, **INT8}),
    ("invariant.attention", "_partition_kernel", {**PARTITION, **HEAD, **E4M3}),
    ("invariant.attention", "_partition_kernel", {**PARTITION, **ODD_HEAD, **PLAIN}),
    (
        "invariant.attention",
        "_merge_kernel",
        {"HEAD_DIM": 80, "BLOCK_DIM": 128, "PARTITION_KEYS": 256, "HAS_WINDOW": True, **SINKS}
        | {"SEES_LATER": True},
    ),
    ("attention", "_prefill_kernel", {**PREFILL, **ONE_HEAD, **TILE, **SINKS, **BOTH_WAYS}),
    ("invariant.attention", "_partition_kernel", {**PARTITION, **HEAD, **TILE, **BOTH_WAYS}),
    ("invariant.linear", "_linear_kernel", LINEAR),
    ("attention", "_decode_kernel", {**HEAD, **E4NV, **SINKS, "BLOCK_GROUP": 16}),
    ("attention", "_prefill_kernel", {**PREFILL, **HEAD, **E4NV, **SINKS}),
    (
        "rope",
        "_rope_cache_write_kernel",
        {**ROPE, "HAS_Q_NORM": True, "HAS_K_NORM": True, "CODE": "e4nv"},
    ),
    ("attention", "_decode_kernel", {**WIDEST_HEAD, **TILE, **SINKS, "BLOCK_GROUP": 16}),
    ("attention", "_merge_kernel", {"HEAD_DIM": 80, "BLOCK_DIM": 128, "BLOCK_SPLITS": 32}),
    ("attention", "_decode_kernel", {**HEAD, **TILE, **OF_HEADS, **DECODE}),
    (
        "attention",
        "_prefill_kernel",
        {**PREFILL, **HEAD, **TILE, **OF_HEADS},
    ),
    ("invariant.attention", "_partition_kernel", {**PARTITION, **HEAD, **TILE, "HAS_SLOPES": True}),
    *(("wide_attention", "_wide_kernel", {**WIDE, "CODE": code}) for code in ("", "int8", "e4m3")),
    ("wide_attention", "_wide_kernel", {**WIDE, **WIDE_DECODE}),
    *(("wide_attention", "_wide_kernel", {**FEW_WIDE_KEYS, "CODE": code}) for code in ("", "int8")),
    ("wide_attention", "_wide_kernel", FP32_WIDE),
    ("wide_attention", "_wide_kernel", {**FP32_WIDE, "IS_DECODE": True, "IS_SPLIT": True}),
    ("wide_attention", "_merge_wide_kernel", {"HEAD_DIM": 576, "BLOCK_DIM": 1024}),
    *(("norm", "_norm_kernel", {**NORM, "KIND": kind, "CODES": ""}) for kind in ("layer", "none")),
    ("norm", "_norm_kernel", {**NORM, "KIND": "rms", "CODES": "int8"}),
    ("norm", "_norm_kernel", {**NORM, "KIND": "layer", "CODES": "fp8"}),
    ("activation", "_activation_kernel", {**PLAIN_ROW, "ACTIVATION": "gelu"}),
    ("activation", "_activation_kernel", {**PLAIN_ROW, "ACTIVATION": "relu2", "CODES": "fp8"}),
    ("activation", "_bounding_kernel", {"IS_SOFT": True, "BLOCK": 1024}),
    ("activation", "_bounding_kernel", {"IS_SOFT": False, "BLOCK": 1024}),
    ("linear", "_linear_packed_kernel", {**PACKED, **EXPERTS}),
    ("linear_quantized", "_linear_quantized_kernel", {**QUANTIZED, **EXPERTS, "IS_INT8": True}),
    ("linear_quantized", "_linear_quantized_kernel", {**QUANTIZED, **EXPERTS}),
    *(("experts", "_grouped_kernel", {**LINEAR, **EXPERTS, "BLOCK_ROWS": n}) for n in (16, 64)),
    ("experts", "_group_kernel", {"TOP_K": 8, "BLOCK": 1024}),
    ("experts", "_combine_kernel", {"TOP_K": 8, "BLOCK": 1024}),
    *(("routing", "_route_kernel", {**ROUTE, "SCORING": name}) for name in SCORINGS),
    (
        "routing",
        "_route_kernel",
        {**ROUTE, "SCORING": "sigmoid", "NUM_GROUPS": 8, "HAS_BIAS": True},
    ),
]


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter replaces the compiler"
)
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("architecture", ["80", "90"])
def test_every_kernel_compiles(architecture: str) -> None:
    """In a process of its own: Triton's compiler may write to standard error."""
    result = subprocess.run(
        [sys.executable, "-m", __name__, architecture],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == [name for _, name, _ in kernels_for(int(architecture))]


def kernels_for(architecture: int) -> list[tuple[str, str, dict[str, Any]]]:
    """All but those with instructions that it doesn't have; of an older one its products, and
    its conversions once each: everything else is the same for both."""
    if architecture >= 89:
        return KERNELS
    asked: dict[tuple[str, str, str], tuple[str, str, dict[str, Any]]] = {}
    for module, name, constants in KERNELS:
        code = constants.get("CODE") or constants.get("CODES") or ""
        if code in OLD_CODES.get(module, ("",)) and (code or (module, name) not in PLAIN_KERNELS):
            is_large = constants.get("BLOCK_ROWS", 0) >= 64 or constants.get("HEAD_DIM", 0) >= 256
            kind = f"{code} {is_large} {constants.get('IS_INT8')}"
            asked.setdefault((module, name, kind), (module, name, constants))
    return list(asked.values())


def compile_kernel(module: str, name: str, constants: dict[str, Any], architecture: int) -> Any:
    """As Triton does it for tensors on 16 bytes and for numbers that are multiples of 16, where it
    copies in the background, and needs the most shared memory."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if "IS_DECODED" in constants:  # as ``linear_quantized`` decides it
        constants = {**constants, "IS_DECODED": architecture < 89}
    if "ELEMENT" in constants:
        constants = {**constants, "ELEMENT": triton.language.bfloat16}
    function = getattr(importlib.import_module(f"lmi_core.ops.kernels.triton.{module}"), name)
    signature = {
        parameter: "constexpr" if parameter in constants else _type_of(module, parameter, constants)
        for parameter in function.arg_names
    }
    unspecialised = function.do_not_specialize or ()
    attributes = {
        (index,): [["tt.divisibility", 16]]
        for index, (parameter, kind) in enumerate(signature.items())
        if kind.startswith("*") or (kind == "i32" and parameter not in unspecialised)
    }
    constants = {name: value for name, value in constants.items() if name in signature}
    source = ASTSource(function, signature, constants, attributes)
    options = OPTIONS.get(module)
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


def _type_of(module: str, parameter: str, constants: dict[str, Any]) -> str:
    if constants.get("CODE") and parameter in ("keys_ptr", "values_ptr"):
        return CODE_POINTERS[constants["CODE"]]
    if "POINTER" in constants and POINTERS.get(parameter) == "*bf16":
        return str(constants["POINTER"])
    if parameter.endswith("_ptr"):
        return {**POINTERS, **POINTERS_OF.get(module, {})}.get(parameter, "*fp32")
    return "fp32" if parameter in FLOATS else "i32"


def main(architecture: int) -> None:
    for module, name, constants in kernels_for(architecture):
        has_few = module == "wide_attention" and constants.get("BLOCK_KEYS") == 16
        target = 89 if has_few else architecture
        compiled = compile_kernel(module, name, constants, target)
        assert f".entry {name}(" in compiled.asm["ptx"]
        num_bytes = compiled.metadata.shared
        assert num_bytes <= SHARED_BYTES[target], (name, constants, num_bytes)
        print(name)


if __name__ == "__main__":
    main(int(sys.argv[1]))
