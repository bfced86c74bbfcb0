"""What Python reads from csrc/cuda's C headers, or repeats of them, is what a C compiler makes of
them."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", exc_type=ImportError)

from lmi_core.ops.device.quantized_rows import CODE_STRIDE  # noqa: E402
from lmi_core.ops.kernels import library_file  # noqa: E402
from lmi_core.ops.kernels.cuda import (  # noqa: E402
    arguments,
    library,
    sampling,
)
from lmi_core.ops.kernels.cuda.activation import ACTIVATIONS, MAX_CODED_COLUMNS  # noqa: E402
from lmi_core.ops.kernels.cuda.attention import (  # noqa: E402
    MAX_GROUPS,
    MAX_HEAD_DIM,
    NARROW_HEAD_DIM,
    WIDE_HEAD_BYTES,
)
from lmi_core.ops.kernels.cuda.linear import MAX_FEW_ROWS  # noqa: E402
from lmi_core.ops.kernels.cuda.norm import KINDS, MAX_COLUMNS  # noqa: E402
from tests.ops.cuda_kernels import use_cuda_kernels  # noqa: E402

CSRC = Path(__file__).parents[2] / "csrc"
HEADERS = "".join(
    (CSRC / "cuda" / name).read_text()
    for name in (
        "lmi_cuda.h",
        "lmi_adapters.h",
        "lmi_experts.h",
        "lmi_products.h",
        "lmi_ranks.h",
        "step_list.h",
    )
)
INTERFACE = arguments.parse(HEADERS)
DTYPE_NAMES = {
    "float32": "LMI_F32",
    "bfloat16": "LMI_BF16",
    "int8": "LMI_I8",
    "float8_e4m3fn": "LMI_E4M3",
    "float8_e5m2": "LMI_E5M2",
}


def expected() -> Iterator[tuple[str, int]]:
    """C expressions and what they should be."""
    for name, struct in INTERFACE.structs.items():
        yield f"sizeof(Lmi{name})", ctypes.sizeof(struct)
        for field, *_ in struct._fields_:
            yield f"offsetof(Lmi{name}, {field})", getattr(struct, field).offset
            yield f"sizeof(((Lmi{name}*)0)->{field})", getattr(struct, field).size
    for name, number in INTERFACE.numbers.items():
        yield f"LMI_{name}", number
    for torch_dtype, number in library.DTYPES.items():
        yield DTYPE_NAMES[str(torch_dtype)[6:]], number
    for name, number in ACTIVATIONS.items():
        yield f"LMI_{name.upper()}", number
    for name, number in KINDS.items():
        yield f"LMI_NORM_{name.upper()}", number
    yield "LMI_CUDA_VERSION", library_file.VERSION
    yield "LMI_MAX_NORM_COLUMNS", MAX_COLUMNS
    yield "LMI_MAX_CODED_COLUMNS", MAX_CODED_COLUMNS
    yield "LMI_MAX_TOP", sampling.MAX_TOP
    yield "LMI_MAX_FEW_ROWS", MAX_FEW_ROWS
    yield "LMI_CODE_STRIDE", CODE_STRIDE
    yield "cuda::kMaxHeadDim", MAX_HEAD_DIM
    for head_dim, group in MAX_GROUPS.items():
        yield f"cuda::max_group({head_dim})", group
    yield "cuda::kNarrowHeadDim", NARROW_HEAD_DIM
    yield "cuda::kWideHeadBytes", WIDE_HEAD_BYTES


def test_structs_and_numbers_are_those_of_the_headers(tmp_path: Path) -> None:
    wanted = dict(expected())
    lines = "".join(f'  printf("%lld\\n", static_cast<long long>({c}));\n' for c in wanted)
    source = tmp_path / "dump.cpp"
    source.write_text(
        "#include <cstddef>\n#include <cstdio>\n"
        '#include "cuda/attention_lists.h"\n#include "cuda/step_list.h"\n'
        f"using namespace lmi;\nint main() {{\n{lines}}}\n"
    )
    program = tmp_path / "dump"
    compiler = os.environ.get("CXX", "c++").split()
    subprocess.run(
        [*compiler, "-std=c++17", f"-I{CSRC}", str(source), "-o", str(program)], check=True
    )
    found = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout
    assert dict(zip(wanted, map(int, found.split()), strict=True)) == wanted


def test_every_struct_kernel_and_number_is_read() -> None:
    text = re.sub(r"/\*.*?\*/", "", HEADERS, flags=re.DOTALL)
    for name, struct in INTERFACE.structs.items():
        body = text[: text.index(f"}} Lmi{name};")].rpartition("typedef struct {")[2]
        assert body.count(";") == len(struct._fields_), name
    assert len(INTERFACE.structs) == text.count("typedef struct {")
    assert len(INTERFACE.kernels) == text.count(", void* stream);")
    assert {f"LMI_{name}" for name in INTERFACE.numbers} == set(
        re.findall(r"(LMI_\w+)(?= = \d| \d)", text)
    )


def test_a_field_of_an_unknown_type_is_refused() -> None:
    with pytest.raises(ValueError, match="a field 'short x'; known types are"):
        arguments.parse("typedef struct {\n  short x;\n} LmiOdd;")


def test_the_library_has_the_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    use_cuda_kernels(torch.device("cpu"), monkeypatch)
    assert library.load()._functions.lmi_cuda_interface().decode() == HEADERS
