"""Headers of safetensors files: the truth read as by the safetensors library, every lie refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from lmi_core.errors import ModelError
from lmi_core.weights.safetensors_file import DTYPE_BITS, read_header

TENSORS = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
    "c": {"dtype": "U8", "shape": [0, 7], "data_offsets": [32, 32]},
    "d": {"dtype": "F16", "shape": [], "data_offsets": [32, 34]},
}


def write(path: Path, header: Any, num_data_bytes: int = 34) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(num_data_bytes))
    return path


def changed(name: str, **fields: Any) -> dict[str, Any]:
    return {**TENSORS, name: {**TENSORS[name], **fields}}


def test_reads_what_the_library_wrote(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    arrays = {
        "x": np.arange(6, dtype=np.float32).reshape(2, 3),
        "y": np.arange(5, dtype=np.float16),
        "empty": np.zeros((0, 4), np.int8),
    }
    save_file(arrays, path, metadata={"format": "pt"})
    tensors = read_header(path)
    content = path.read_bytes()
    assert tensors.keys() == arrays.keys()
    for name, array in arrays.items():
        tensor = tensors[name]
        assert tensor.shape == array.shape
        raw = content[tensor.offset : tensor.offset + tensor.num_bytes]
        np.testing.assert_array_equal(np.frombuffer(raw, array.dtype).reshape(array.shape), array)


def test_a_correct_header(tmp_path: Path) -> None:
    tensors = read_header(write(tmp_path / "m", {"__metadata__": {"k": "v"}, **TENSORS}))
    assert {t.name: (t.dtype, t.shape, t.num_bytes) for t in tensors.values()} == {
        "a": ("F32", (2, 3), 24),
        "b": ("BF16", (4,), 8),
        "c": ("U8", (0, 7), 0),
        "d": ("F16", (), 2),
    }


def test_trailing_spaces_and_any_order(tmp_path: Path) -> None:
    header = json.dumps(dict(reversed(TENSORS.items()))).encode() + b"   "
    assert read_header(write(tmp_path / "m", header)).keys() == TENSORS.keys()


@pytest.mark.parametrize(
    ("header", "num_data_bytes", "message"),
    [
        (b" " + json.dumps(TENSORS).encode(), 34, "must start with"),
        (b"[]", 0, "must start with"),
        (b"", 0, "must start with"),
        (b'{"a": ', 0, "not valid JSON"),
        (b'{"\xff": 1}', 0, "not valid JSON"),
        (b'{"a":' + b"[" * 100_000, 0, "not valid JSON"),
        (b'{"a": ' + b"9" * 10_000 + b"}", 0, "not valid JSON"),
        (b'{"a": {}, "a": {}}', 0, "duplicate key 'a'"),
        (b'{"a": {"dtype": "U8", "dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}', 0, "dup"),
        ({"__metadata__": {"k": 1}}, 0, "strings to strings"),
        ({"__metadata__": "k"}, 0, "strings to strings"),
        ({"a": 5}, 0, "exactly dtype, shape and data_offsets"),
        ({"a": {"dtype": "F32", "shape": [1]}}, 4, "exactly"),
        (changed("a", extra=1), 34, "exactly"),
        (changed("a", dtype="F33"), 34, "unknown dtype 'F33'"),
        (changed("a", dtype=["F32"]), 34, "unknown dtype"),
        (changed("a", shape=[2, -3]), 34, "integers >= 0"),
        (changed("a", shape=[2.0, 3]), 34, "integers >= 0"),
        (changed("a", shape=[True, 6]), 34, "integers >= 0"),
        (changed("a", shape="23"), 34, "integers >= 0"),
        (changed("a", shape=[2**62, 2**62]), 34, "has 24 bytes"),
        (changed("a", shape=[2**70]), 34, "integers >= 0"),
        (changed("a", shape=[3, 3]), 34, "has 24 bytes, not 36"),
        (changed("a", dtype="F16"), 34, "has 24 bytes, not 12"),
        (changed("a", data_offsets=[0]), 34, "must be [begin, end]"),
        (changed("a", data_offsets=[24, 0]), 34, "outside 0 to 34"),
        (changed("a", data_offsets=[-24, 0]), 34, "must be [begin, end]"),
        (changed("d", data_offsets=[33, 35]), 34, "outside 0 to 34"),
        (changed("b", data_offsets=[20, 28]), 34, "overlaps"),
        (changed("b", data_offsets=[0, 8]), 34, "overlaps"),
        ({k: v for k, v in TENSORS.items() if k != "b"}, 34, "8 bytes before"),
        ({k: v for k, v in TENSORS.items() if k != "a"}, 34, "24 bytes before"),
        (TENSORS, 40, "6 bytes at the end"),
        (TENSORS, 30, "outside 0 to 30"),
    ],
)
def test_lies(tmp_path: Path, header: Any, num_data_bytes: int, message: str) -> None:
    path = write(tmp_path / "model.safetensors", header, num_data_bytes)
    with pytest.raises(ModelError) as caught:
        read_header(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.timeout(30)
def test_a_name_given_twice_among_many(tmp_path: Path) -> None:
    """In time that grows with their number, not with its square."""
    header = "".join(f'"{i}":0,' for i in range(200_000))
    path = write(tmp_path / "model.safetensors", f'{{{header}"199999":0}}'.encode())
    with pytest.raises(ModelError, match="duplicate key '199999'"):
        read_header(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds 0 bytes"),
        (b"\x02\0\0\0", "holds 4 bytes"),
        (b"\x03" + bytes(7) + b"{}", "ends beyond the file's 10"),
        (b"\xff" * 8 + b"{}", "header of 18446744073709551615 bytes is over"),
        (b"version https://git-lfs.github.com/spec/v1\n", r"a Git LFS pointer.*git lfs pull"),
    ],
)
def test_sizes(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=message):
        read_header(path)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="can't be read: No such file"):
        read_header(tmp_path / "model.safetensors")


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_mutated_files_are_read_safely_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    """Whatever happens to the bytes, tensors tile the data exactly and nothing else is raised; and
    what the safetensors library refuses, we refuse."""
    path = write(tmp_path / "m", TENSORS)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, len(content) - 1))
        if data.draw(st.booleans()):
            content[position] = data.draw(st.sampled_from(b'0123456789{}[],:"FBUab \x00\xff'))
        else:
            del content[position : position + data.draw(st.integers(1, 4))]
    path.write_bytes(content)
    try:
        tensors = read_header(path)
    except ModelError:
        return
    end = 8 + int.from_bytes(content[:8], "little")
    for tensor in sorted(tensors.values(), key=lambda t: (t.offset, t.num_bytes)):
        assert tensor.offset == end
        assert tensor.num_bytes * 8 == math.prod(tensor.shape) * DTYPE_BITS[tensor.dtype]
        end += tensor.num_bytes
    assert end == len(content)
    try:
        with safe_open(path, "np"):
            pass
    except SafetensorError as error:
        pytest.fail(f"the library refuses what was accepted: {error}")
