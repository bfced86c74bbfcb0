"""The GGUF file that a quantised model is written to."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lmi_core.errors import UserError
from lmi_core.models.expert_tensors import with_layout
from lmi_core.models.found_model import FoundModel, spec_and_pooling
from lmi_core.models.gguf_spec import gguf_spec
from lmi_core.models.rope import inverse_frequencies
from lmi_core.models.spec import DecoderSpec
from lmi_core.models.tensor_check import check_tensors, expected_shapes
from lmi_core.quantize.formats import Measured, Method
from lmi_core.quantize.gguf.encode import encode
from lmi_core.quantize.gguf.metadata import architecture_of, factor_tensors, model_metadata
from lmi_core.quantize.gguf.mixes import Mix, fitting
from lmi_core.quantize.gguf.tensors import Target, targets
from lmi_core.quantize.gguf.tokenizer import check_tokenizer, tokenizer_metadata
from lmi_core.quantize.gguf.writer import GgufWriter
from lmi_core.quantize.grids import Grid
from lmi_core.quantize.stored import Stored, rounded_to, to_stored
from lmi_core.settings.engine_config import EngineConfig
from lmi_core.text.tokenizer import Tokenizer
from lmi_core.weights.block_matrix import BlockMatrix
from lmi_core.weights.float_tensors import FLOAT_DTYPES, to_float32
from lmi_core.weights.formats import FloatArray
from lmi_core.weights.gguf.architectures import ARCHITECTURES, MIXTURES
from lmi_core.weights.gguf.config import read_config
from lmi_core.weights.gguf.file import read_gguf
from lmi_core.weights.gguf.types import BLOCK_TYPES
from lmi_core.weights.hf_config import HfConfig

_NOT_COMPARED = ("architecture", "family", "names", "notes", "ropes")
_CLOSE = 1e-5
"""Relative: numbers are fp32 in a file."""


class GgufOutput:
    """A file at ``path`` of the model that was ``found``, with the types of ``mix``.

    Raises UserError for a model or a tokenizer that GGUF has no words for.
    """

    def __init__(self, path: Path, found: FoundModel, mix: Mix, tokenizer: Tokenizer) -> None:
        architecture = architecture_of(found)
        if architecture is None:
            raise _unknown(found, f"{found.config.architecture} has no name in GGUF")
        self._found, self._mix, self._path = found, mix, path
        vectors = factor_tensors(found.spec)
        self._targets = targets(found.spec, architecture, found.tensors)
        self._waiting: dict[str, Stored] = {}
        self._num_wanted = Counter(name for each in self._targets for name in each.sources)
        config = found.checkpoint.config
        of_tokenizer = tokenizer_metadata(
            tokenizer, found.checkpoint.path, found.spec.vocab_size, config.eos_token_ids
        )
        check_tokenizer(tokenizer, of_tokenizer, path)
        places = {
            target.name: (self._kind(target), self._shape(target)) for target in self._targets
        }
        places |= {name: ("F32", values.shape) for name, values in vectors.items()}
        metadata = model_metadata(found, architecture, mix.file_type) | of_tokenizer
        self._writer = GgufWriter(path, metadata, places)
        try:
            for name, values in vectors.items():
                self._writer.write(name, values)
            self._writer.flush()
            _check_spec(path, found, architecture)
        except BaseException:
            self._writer.close()
            raise

    @property
    def num_bytes(self) -> int:
        return self._writer.num_bytes

    @property
    def kinds(self) -> dict[str, str]:
        """The type of each of the checkpoint's matrices, by name."""
        return {name: self._kind(each) for each in self._targets for name in each.sources}

    def add(self, tensors: Mapping[str, Stored]) -> None:
        """Take tensors of the checkpoint: matrices of layers in their types, others in floats."""
        self._waiting |= {name: tensors[name] for name in tensors if self._num_wanted[name]}
        for target in self._targets:
            if target.sources[0] not in tensors and target.sources[-1] not in tensors:
                continue
            if all(source in self._waiting for source in target.sources):
                self._write(target)

    def finish(self) -> None:
        self._writer.finish()

    def close(self) -> None:
        self._writer.close()

    def _write(self, target: Target) -> None:
        kind = self._kind(target)
        stored = [self._waiting[source] for source in target.sources]
        if target.made is not None:
            made = target.made(to_float32(stored[0].values, stored[0].dtype))
            rows = np.ascontiguousarray(made.reshape(-1, made.shape[-1]))
            stored = [Stored("F32", rows)]
        parts = [_in_kind(each, kind, target.added) for each in stored]
        self._writer.write(target.name, target.assemble(parts))
        self._num_wanted.subtract(target.sources)
        for source in target.sources:
            if not self._num_wanted[source]:
                self._waiting.pop(source, None)

    def _kind(self, target: Target) -> str:
        if not target.is_matrix:
            return "F32"
        num_inputs = self._shape(target)[-1]
        if target.layer_id >= 0:
            layers = self._found.spec.num_layers
            return self._mix.kind_of(target.part, num_inputs, target.layer_id, layers)
        is_head = target.name == "output.weight" or self._found.spec.tied_head
        return fitting(self._mix.head if is_head else self._mix.kind, num_inputs)

    def _shape(self, target: Target) -> tuple[int, ...]:
        if target.shape:
            return target.shape
        first, *rest = (self._found.tensors[source].shape for source in target.sources)
        if target.num_stacked:
            return target.num_stacked, *first
        num_rows = first[0] + sum(shape[0] for shape in rest)
        return num_rows if target.rows is None else len(target.rows), *first[1:]


class GgufFormat:
    """Matrices in the types of a file, by ``kinds``; ``has_text``: weights count as much as what
    they are multiplied with is large."""

    grid: Grid | None = None

    def __init__(self, kinds: Mapping[str, str], *, has_text: bool) -> None:
        self._kinds = kinds
        self.method: Method = "importance" if has_text else "nearest"

    def make(
        self, name: str, weights: FloatArray, measured: Measured
    ) -> tuple[Mapping[str, Stored], FloatArray]:
        kind = self._kinds[name]
        if kind in FLOAT_DTYPES:
            return {"weight": to_stored(weights, kind)}, rounded_to(weights, kind)
        blocks = encode(weights, kind, measured if isinstance(measured, np.ndarray) else None)
        shape = (len(weights), weights.shape[1])
        kept = BlockMatrix(BLOCK_TYPES[kind], shape, blocks).to_float32()
        return {"weight": Stored(kind, blocks)}, kept

    def settings(self, routers: Sequence[str] = ()) -> dict[str, Any]:
        return {}


def _in_kind(stored: Stored, kind: str, added: float) -> npt.NDArray[np.generic]:
    if stored.dtype == kind and not added:
        return stored.values
    floats = to_float32(stored.values, stored.dtype) + np.float32(added)
    return to_stored(floats, kind).values if kind in FLOAT_DTYPES else encode(floats, kind)


def _unknown(found: FoundModel, problem: str) -> UserError:
    known = sorted({kind.name for kind in (*ARCHITECTURES.values(), *MIXTURES.values())})
    return UserError(
        f"{found.checkpoint.path} can't be written as GGUF: {problem}; models of "
        f"{', '.join(known)} can, and others in other formats",
        field="model",
    )


def _check_spec(path: Path, found: FoundModel, architecture: str) -> None:
    """Raise UserError unless the file says the very model."""
    file = read_gguf(path)
    config = HfConfig(path, read_config(file))
    asked = EngineConfig(model=found.checkpoint.path)
    _, read, _ = spec_and_pooling(config, asked)
    specs = [
        with_layout(gguf_spec(spec, architecture, file.tensors), file.tensors)
        for spec in (found.spec, read)
    ]
    check_tensors(path, specs[1], expected_shapes(specs[1]), file.tensors)
    changed = _differences(*specs)
    if not _same_ropes(*specs):
        changed.append("rotary positions")
    if changed:
        raise _unknown(found, f"its {', '.join(changed)} would be read otherwise")


def _differences(ours: DecoderSpec, theirs: DecoderSpec) -> list[str]:
    pairs = (
        (field.name, getattr(ours, field.name), getattr(theirs, field.name))
        for field in dataclasses.fields(ours)
        if field.name not in _NOT_COMPARED
    )
    return [name for name, a, b in pairs if not _is_same(a, b)]


def _is_same(a: object, b: object) -> bool:
    if isinstance(a, float) and isinstance(b, float | int):
        return bool(np.isclose(a, b, rtol=_CLOSE, atol=0))
    if dataclasses.is_dataclass(a) and not isinstance(a, type) and type(a) is type(b):
        names = [field.name for field in dataclasses.fields(a)]
        return all(_is_same(getattr(a, name), getattr(b, name)) for name in names)
    if isinstance(a, Sequence) and not isinstance(a, str) and isinstance(b, Sequence):
        return len(a) == len(b) and all(map(_is_same, a, b))
    return a == b


def _same_ropes(ours: DecoderSpec, theirs: DecoderSpec) -> bool:
    for a, b in zip(ours.ropes, theirs.ropes, strict=True):
        if a == b or a.kind == b.kind == "none":
            continue
        if a.rotary_dim != b.rotary_dim or not _is_same(a.attention_factor, b.attention_factor):
            return False
        first, second = (inverse_frequencies(rope, ours.max_positions) for rope in (a, b))
        if not np.allclose(first, second, rtol=_CLOSE, atol=0):
            return False
    return True
