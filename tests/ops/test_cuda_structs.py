"""What Python repeats of csrc/cuda's C headers is what a C compiler makes of them."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch", exc_type=ImportError)

from lmi_core.ops.device import step_list
from lmi_core.ops.device.quantized_rows import CODE_STRIDE
from lmi_core.ops.kernels.cuda import arguments, library, sampling
from lmi_core.ops.kernels.cuda.activation import ACTIVATIONS, MAX_CODED_COLUMNS
from lmi_core.ops.kernels.cuda.attention import (
    MAX_GROUP,
    MAX_HEAD_DIM,
    NARROW_HEAD_DIM,
    WIDE_HEAD_BYTES,
)
from lmi_core.ops.kernels.cuda.linear import MAX_FEW_ROWS
from lmi_core.ops.kernels.cuda.norm import MAX_COLUMNS

CSRC = Path(__file__).parents[2] / "csrc"
STRUCTS = {
    **{f"Lmi{struct.__name__}": struct for struct in arguments.ARGUMENTS.values()},
    "LmiEdits": arguments.Edits,
    "LmiStepSizes": step_list._Sizes,
    "LmiStepListState": step_list._State,
}
DTYPE_NAMES = {
    "float32": "LMI_F32",
    "bfloat16": "LMI_BF16",
    "float16": "LMI_F16",
    "int8": "LMI_I8",
    "float8_e4m3fn": "LMI_E4M3",
    "float8_e5m2": "LMI_E5M2",
}


def expected() -> Iterator[tuple[str, int]]:
    """C expressions and what they should be."""
    for name, struct in STRUCTS.items():
        yield f"sizeof({name})", ctypes.sizeof(struct)
        for field, *_ in struct._fields_:
            yield f"offsetof({name}, {field})", getattr(struct, field).offset
            yield f"sizeof((({name}*)0)->{field})", getattr(struct, field).size
    row = sampling.ROW
    yield "sizeof(LmiSampleRow)", row.itemsize
    for field, (dtype, offset, *_) in (row.fields or {}).items():
        named = {"target_ids": "target_id"}.get(field, field)
        yield f"offsetof(LmiSampleRow, {named})", offset
        yield f"sizeof(((LmiSampleRow*)0)->{named})", dtype.itemsize
    yield "sizeof(LmiAttentionWork)", 4 * 4
    yield "sizeof(LmiAttentionMerge)", 3 * 4
    for torch_dtype, number in library.DTYPES.items():
        yield DTYPE_NAMES[str(torch_dtype)[6:]], number
    for node, number in step_list.NODES.items():
        yield f"LMI_NODE_{node.upper()}", number
    yield "LMI_TOKEN_ROWS", step_list.ROWS["T"]
    yield "LMI_LOGIT_ROWS", step_list.ROWS["L"]
    for name, number in ACTIVATIONS.items():
        yield f"LMI_{name.upper()}", number
    yield "LMI_CUDA_VERSION", library.VERSION
    yield "LMI_MAX_NORM_COLUMNS", MAX_COLUMNS
    yield "LMI_MAX_CODED_COLUMNS", MAX_CODED_COLUMNS
    yield "LMI_MAX_TOP", sampling.MAX_TOP
    yield "LMI_MAX_FEW_ROWS", MAX_FEW_ROWS
    yield "LMI_CODE_STRIDE", CODE_STRIDE
    yield "cuda::kMaxHeadDim", MAX_HEAD_DIM
    yield "cuda::kMaxGroup", MAX_GROUP
    yield "cuda::kNarrowHeadDim", NARROW_HEAD_DIM
    yield "cuda::kWideHeadBytes", WIDE_HEAD_BYTES


def test_structs_and_numbers_are_those_of_the_headers(tmp_path: Path) -> None:
    wanted = dict(expected())
    lines = "".join(f'  printf("%lld\\n", static_cast<long long>({c}));\n' for c in wanted)
    source = tmp_path / "dump.cpp"
    source.write_text(
        "#include <cstddef>\n#include <cstdio>\n"
        '#include "cuda/attention_plan.h"\n#include "cuda/step_list.h"\n'
        f"using namespace lmi;\nint main() {{\n{lines}}}\n"
    )
    program = tmp_path / "dump"
    compiler = os.environ.get("CXX", "c++").split()
    subprocess.run(
        [*compiler, "-std=c++17", f"-I{CSRC}", str(source), "-o", str(program)], check=True
    )
    found = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout
    assert dict(zip(wanted, map(int, found.split()), strict=True)) == wanted


def test_no_field_of_the_headers_is_missing() -> None:
    """Sizes would tell, but for what fits into padding."""
    text = (CSRC / "cuda/lmi_cuda.h").read_text() + (CSRC / "cuda/step_list.h").read_text()
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    for name, struct in STRUCTS.items():
        body = text[: text.index(f"}} {name};")].rpartition("typedef struct {")[2]
        assert body.count(";") == len(struct._fields_), name
