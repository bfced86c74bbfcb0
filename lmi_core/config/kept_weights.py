"""What ``lmi explain`` says of a checkpoint's weights: what is kept, and what multiplied with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from lmi_core.config.model_config import ModelConfig
from lmi_core.weights.quantized.methods import GGUF, MXFP4, stored_as

if TYPE_CHECKING:
    from lmi_core.models.found_model import FoundModel
    from lmi_core.settings.engine_config import EngineConfig
    from lmi_core.weights.formats import RowRounding

    _Rounding = RowRounding | Literal["static"]
    """static: to fp8, by a scale that the checkpoint has."""

_PICKLED = {"lmi": "tensors are read where they lie, without torch; nothing else in it is used"}
_LEFT = "left to the library, which reads its tensors with torch"
_FLOATS = {"F32", "F16", "BF16"}
"""Types of GGUF's tensors without blocks."""
_UNROUNDED = "rows as they are"
_STATIC = "rows rounded to fp8 by the checkpoint's scales"
_UNUSED = "; scales of activations aren't used"
_ROWS = {
    "auto": "rows of 8 bits, a row's largest numbers of 16",
    "int8": "rows of 8 bits",
    "bf16": _UNROUNDED,
}
"""What quantised weights are multiplied with on the CPU, by option.activations."""
_BUT_FOR_LARGE = "rows of 8 bits, but for inputs from 6 on"
"""LLM.int8's."""
_LOWER_CASE = ("int4", "int8", "nf4", "fp4", "fp8")
"""Formats that have their names so; others are GGUF's."""


def weight_lines(model: ModelConfig, found: FoundModel | None) -> Iterator[str]:
    """A sentence each; ``found``: what the loader made of the files, None where they aren't here or
    can't be read."""
    if model.files.pickled:
        yield f"{model.files.pickled}: {_PICKLED.get(model.backend, _LEFT)}"
    if model.engine is None:
        return
    if model.files.gguf_types:
        yield _gguf_weights(model, model.engine.config)
    settings = model.files.quantization
    if found is None or settings is None or settings.method == GGUF:
        return
    made, is_in_fp8 = found.quantize, model.files.is_in_fp8
    if made is not None and not (made == "fp8" and is_in_fp8):
        yield f"{stored_as(settings)}: quantised anew to {made} while it is loaded"
        return
    yield f"{stored_as(settings)}: {_kept(found)}"


def _gguf_weights(model: ModelConfig, config: EngineConfig) -> str:
    """What a GGUF file has, and what becomes of it."""
    found = model.files.gguf_types
    types = ", ".join(f"{count} {name}" for name, count in found.items())
    if config.device != "cpu":
        return f"GGUF, tensors: {types}; matrices are widened to the dtype on this device"
    if _FLOATS.issuperset(found):
        return f"GGUF, tensors: {types}; kept as stored"
    rows = _ROWS[config.activations]
    return f"GGUF, tensors: {types}; kept as stored, blocks multiplied with {rows}"


def _kept(found: FoundModel) -> str:
    """Of all that the checkpoint has in codes, by what becomes of it."""
    counts: Counter[str] = Counter()
    leaves_scales = False
    for format, rounding in _formats(found):
        rows = _rows(format, rounding, found.asked)
        counts[f"{_held(format, found)}, multiplied with {rows}"] += 1
        leaves_scales |= rounding == "static" and rows != _STATIC
    unused = _UNUSED if leaves_scales else ""
    if len(counts) == 1:
        return next(iter(counts)) + unused
    parts = (f"{count} matrices {words}" for words, count in counts.most_common())
    return "; ".join(parts) + unused


def _formats(found: FoundModel) -> Iterator[tuple[str | None, _Rounding | None]]:
    """That matrices are kept in, None: floats; with what their schemes say of rows, None: nothing.
    Experts in common tensors count as one matrix."""
    from lmi_core.models.weights import is_transposed
    from lmi_core.weights.fp8_checkpoint import FP8_DTYPES, row_scale_of
    from lmi_core.weights.fp8_matrix import FP8_BLOCK

    on_cpu = found.asked.device == "cpu"
    kept = found.quantized.kept(keeps_blocks=on_cpu, keeps_orders=found.keeps_orders)
    yield from kept.values()
    settings = found.checkpoint.quantization
    if settings is not None and settings.method == MXFP4:
        yield (MXFP4 if on_cpu else None), None
    for name, shape in found.shapes.items():
        tensor = None if name in kept else found.tensors.get(name)
        if tensor is not None and (code := FP8_DTYPES.get(tensor.dtype)):
            is_kept = shape[-1] % FP8_BLOCK == 0 if on_cpu else code == "e4m3"
            is_kept = is_kept and not is_transposed(found.spec, name)
            has_scale = row_scale_of(tensor, found.tensors, settings) is not None
            yield ("fp8" if is_kept else None), "static" if has_scale else None


def _held(format: str | None, found: FoundModel) -> str:
    if format is None:
        return f"widened to {found.dtype}"
    return f"kept as {format if format in _LOWER_CASE else format.upper()}"


def _rows(format: str | None, rounding: _Rounding | None, config: EngineConfig) -> str:
    """What a matrix in ``format`` is multiplied with."""
    on_cpu = config.device == "cpu"
    if not on_cpu and format == "fp8":
        return _STATIC if rounding == "static" else "rows rounded to fp8"
    if format in (None, "fp8") or (not on_cpu and format == "int4"):
        return _UNROUNDED
    if config.activations == "auto":
        if rounding == "int8":
            return _ROWS["int8"]
        if rounding == "llm_int8" and on_cpu:
            return _BUT_FOR_LARGE
    return _ROWS[config.activations]
