"""GGUF's headers: what was written is read, and every lie is refused before memory is spent."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmi_core.errors import ModelError
from lmi_core.weights.gguf.file import gguf_of, read_gguf
from tests.gguf_files import BLOCKS, TYPE_IDS, Stored, random_blocks, write_gguf
from tests.weights.gguf_fuzz import mutate_and_read, sound_file

METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "a.number": 7,
    "a.float": 0.5,
    "a.flag": True,
    "a.list": ["x", "größe", ""],
    "some.numbers": np.arange(5, dtype=np.float32),
}


def tensors() -> dict[str, Stored]:
    rng = np.random.default_rng(0)
    found: dict[str, Stored] = {"norm": ("F32", (3,), np.arange(3, dtype=np.float32))}
    for kind in BLOCKS:
        found[kind] = (kind, (5, 512), random_blocks(kind, 5, 512, rng))
    return found


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "model.gguf", METADATA, tensors())


@pytest.mark.parametrize("alignment", [8, 32, 256])
def test_what_was_written_is_read(tmp_path: Path, alignment: int) -> None:
    metadata = METADATA | {"general.alignment": alignment}
    file = read_gguf(write_gguf(tmp_path / "m.gguf", metadata, tensors(), alignment))
    content = file.path.read_bytes()
    for key, value in metadata.items():
        assert np.array_equal(file.metadata[key], value)
    assert list(file.tensors) == list(tensors())
    for name, (kind, shape, values) in tensors().items():
        tensor = file.tensors[name]
        assert (tensor.dtype, tensor.shape) == (kind, shape)
        assert content[tensor.offset : tensor.offset + tensor.num_bytes] == values.tobytes()


def _cut(num_bytes: int) -> Callable[[bytes], bytes]:
    return lambda raw: raw[:num_bytes]


def _put(at: int, format: str, value: int) -> Callable[[bytes], bytes]:
    return lambda raw: raw[:at] + struct.pack(format, value) + raw[at + struct.calcsize(format) :]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_cut(0), "0 bytes that don't begin as a GGUF file"),
        (_cut(23), "23 bytes that don't begin"),
        (_cut(30), "ends in a metadata key"),
        (_cut(400), "are left"),
        (_cut(-40), "ends at"),
        (_put(0, "<I", 0x46554746), "don't begin as a GGUF file"),
        (_put(4, "<I", 1), "version 1 of GGUF; 2, 3 can be read"),
        (_put(8, "<Q", 2**60), f"claims {2**60} tensors"),
        (_put(16, "<Q", 2**60), f"{2**60} pairs of metadata"),
        (_put(24, "<Q", 2**40), "has a metadata key of"),
        (_put(52, "<I", 77), "of type 77, which there isn't"),
    ],
)
def test_a_damaged_file_is_named(path: Path, change: Callable[[bytes], bytes], words: str) -> None:
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ModelError, match=words) as caught:
        read_gguf(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "shape", "words"),
    [
        (16, (4, 256), "in IQ2_XXS; F32, F16, BF16, Q4_0"),
        (99, (4, 256), "of type 99, which there isn't"),
        (12, (4, 255), "in Q4_K, whose rows are of whole blocks of 256"),
        (0, (0, 4), r"\[0, 4\] in F32"),
        (0, (2**40, 2**40), "ends at"),
        (0, (2**62, 2**62, 2**62, 2**62), "ends at"),
    ],
)
def test_tensors_that_cant_be_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: int, shape: tuple[int, ...], words: str
) -> None:
    monkeypatch.setitem(TYPE_IDS, "odd", kind)
    path = write_gguf(tmp_path / "m.gguf", {}, {"w": ("odd", shape, np.zeros(4, np.uint8))})
    with pytest.raises(ModelError, match=words):
        read_gguf(path)


def test_long_lists_are_refused_by_their_length(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {"key": ["a"]}, {})
    raw = path.read_bytes()
    at = raw.index(b"key") + 3 + 4 + 4
    path.write_bytes(raw[:at] + struct.pack("<Q", 2**50) + raw[at + 8 :])
    with pytest.raises(ModelError, match=f"of {2**50} items"):
        read_gguf(path)


def test_tensors_in_one_place_are_refused(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    name = raw.index(b"Q4_1") + 4  # after it: dimensions, type, offset
    at = name + 4 + 16 + 4
    raw[at : at + 8] = struct.pack("<Q", 0)
    path.write_bytes(raw)
    with pytest.raises(ModelError, match="in one place"):
        read_gguf(path)


def test_mutated_headers_are_read_or_refused(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    assert mutate_and_read(sound_file(tmp_path), 200, seed=1) > 50


def test_parts_are_read_as_one(tmp_path: Path) -> None:
    wanted = tensors()
    names = list(wanted)
    for number in range(3):
        part = {name: wanted[name] for name in names[number::3]}
        split = {"split.no": number, "split.count": 3, "split.tensors.count": len(names)}
        write_gguf(tmp_path / f"m-{number + 1:05}-of-00003.gguf", METADATA | split, part)
    first = gguf_of(tmp_path)
    assert first == tmp_path / "m-00001-of-00003.gguf"
    assert read_gguf(first).tensors.keys() == wanted.keys()
    with pytest.raises(ModelError, match="later part of a model: name its first, m-00001-of-00003"):
        read_gguf(tmp_path / "m-00002-of-00003.gguf")
    (tmp_path / "m-00003-of-00003.gguf").unlink()
    with pytest.raises(ModelError, match="lacks 1 of 3 parts of the model: m-00003-of-00003"):
        read_gguf(first)
    first.rename(tmp_path / "other.gguf")
    with pytest.raises(ModelError, match="is one of 3 parts, whose names must end"):
        read_gguf(tmp_path / "other.gguf")


def test_a_directory_of_several_models_is_asked_about(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        write_gguf(tmp_path / name, {}, {})
    with pytest.raises(ModelError, match=r"holds 2 models in GGUF \(a.gguf, b.gguf\): name one"):
        gguf_of(tmp_path)
