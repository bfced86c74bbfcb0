"""The formats that ``lmi quantize`` writes: what a linear's tensors are, and what config.json says.

Format: TGI's sources, GPTQ, AWQ, fp8 and compressed-tensors; ``lmi_core/weights/quantized``
reads them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Protocol

import numpy as np

from lmi_core.quantize.gptq import DAMPING, Factor, gptq
from lmi_core.quantize.grids import Coded, Grid, round_to_nearest
from lmi_core.quantize.stored import Stored, rounded_to, to_stored
from lmi_core.quantize.words import pack_awq, pack_columns, pack_rows
from lmi_core.weights.formats import FloatArray
from lmi_core.weights.fp8_matrix import Fp8Matrix
from lmi_core.weights.made_codes import to_fp8

Method = Literal["nearest", "gptq", "ordered gptq", "awq", "importance"]
"""How codes are found: each for itself; with a text by GPTQ, or by GPTQ with the largest inputs
first, or by AWQ's factors; or each for itself, with errors that count by how large inputs are."""


Measured = FloatArray | Factor | None
"""Of what a linear reads."""


class Format(Protocol):
    """How linears are written."""

    @property
    def method(self) -> Method: ...
    @property
    def grid(self) -> Grid | None:
        """None: what is written isn't on one."""
        ...

    def make(
        self, name: str, weights: FloatArray, measured: Measured
    ) -> tuple[Mapping[str, Stored], FloatArray]:
        """The tensors of the linear [outputs, inputs] whose weight has this name, by what follows
        its own, and the weights that they stand for. ``measured``: by GPTQ, of its ``Hessian`` the
        factor; by importance, what its ``MeanSquares`` are."""
        ...

    def settings(self, routers: Sequence[str] = ()) -> dict[str, Any]:
        """config.json's ``quantization_config``. ``routers``: modules that stay as they are, as
        the embedding's head does."""
        ...


@dataclass(frozen=True, slots=True)
class IntegerFormat:
    """Whole numbers in groups."""

    method: Method
    grid: Grid
    scale_dtype: str
    pack: Callable[[Coded, str], Mapping[str, Stored]]
    describe: Callable[[Grid, Method, Sequence[str]], dict[str, Any]]

    def make(
        self, name: str, weights: FloatArray, measured: Measured
    ) -> tuple[Mapping[str, Stored], FloatArray]:
        if isinstance(measured, Factor):
            coded = gptq(weights, self.grid, measured)
        else:
            coded = round_to_nearest(weights, self.grid)
        return self.pack(coded, self.scale_dtype), coded.floats()

    def settings(self, routers: Sequence[str] = ()) -> dict[str, Any]:
        return self.describe(self.grid, self.method, routers)


@dataclass(frozen=True, slots=True)
class Fp8Format:
    """e4m3 with a scale per output; activations get one per token while they are multiplied."""

    scale_dtype: str
    method: Method = "nearest"
    grid: Grid | None = None

    def make(
        self, name: str, weights: FloatArray, measured: Measured
    ) -> tuple[Mapping[str, Stored], FloatArray]:
        made = to_fp8(weights)
        scales = to_stored(made.scales, self.scale_dtype)
        kept = Fp8Matrix(made.codes, rounded_to(made.scales, self.scale_dtype))
        return {"weight": Stored("F8_E4M3", made.codes), "weight_scale": scales}, kept.to_float32()

    def settings(self, routers: Sequence[str] = ()) -> dict[str, Any]:
        weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
        inputs = weights | {"strategy": "token", "dynamic": True}
        return _compressed("float-quantized", weights | {"dynamic": False}, inputs, routers)


def _gptq_tensors(coded: Coded, scale_dtype: str) -> dict[str, Stored]:
    bits = coded.grid.num_bits
    # This layout stores what zero points are more than 1.
    zeros = (coded.zeros.astype(np.uint8) - np.uint8(1)) & np.uint8(coded.grid.most)
    return {
        "qweight": Stored("I32", pack_columns(coded.codes.T, bits)),
        "qzeros": Stored("I32", pack_rows(np.ascontiguousarray(zeros.T), bits)),
        "scales": _transposed(to_stored(coded.scales, scale_dtype)),
        "g_idx": Stored("I32", coded.groups),
    }


def _gptq_settings(grid: Grid, method: Method, routers: Sequence[str]) -> dict[str, Any]:
    settings = {
        "quant_method": "gptq",
        "bits": grid.num_bits,
        "group_size": grid.group_size or -1,
        "desc_act": method == "ordered gptq",
        "sym": grid.is_symmetric,
        "damp_percent": DAMPING,
        "true_sequential": False,
        "checkpoint_format": "gptq",
    }
    if routers:
        settings["dynamic"] = {f"-:^{re.escape(name)}$": {} for name in routers}  # as GPTQModel
    return settings


def _awq_tensors(coded: Coded, scale_dtype: str) -> dict[str, Stored]:
    zeros = coded.zeros.astype(np.uint8)
    return {
        "qweight": Stored("I32", pack_awq(np.ascontiguousarray(coded.codes.T))),
        "qzeros": Stored("I32", pack_awq(np.ascontiguousarray(zeros.T))),
        "scales": _transposed(to_stored(coded.scales, scale_dtype)),
    }


def _awq_settings(grid: Grid, method: Method, routers: Sequence[str]) -> dict[str, Any]:
    return {
        "quant_method": "awq",
        "bits": grid.num_bits,
        "group_size": grid.group_size or -1,
        "zero_point": not grid.is_symmetric,
        "version": "gemm",
        "modules_to_not_convert": [*routers] or None,
    }


def _compressed_tensors(coded: Coded, scale_dtype: str) -> dict[str, Stored]:
    shape = np.array(coded.codes.shape, np.int64)
    return {
        "weight_packed": Stored("I32", pack_rows(coded.codes, coded.grid.num_bits)),
        "weight_scale": to_stored(coded.scales, scale_dtype),
        "weight_shape": Stored("I64", shape),
    }


def _compressed_settings(grid: Grid, method: Method, routers: Sequence[str]) -> dict[str, Any]:
    weights = {
        "num_bits": grid.num_bits,
        "type": "int",
        "symmetric": grid.is_symmetric,
        "strategy": "group" if grid.group_size else "channel",
        "group_size": grid.group_size or None,
        "dynamic": False,
    }
    return _compressed("pack-quantized", weights, None, routers)


def _plain_int8_tensors(coded: Coded, scale_dtype: str) -> dict[str, Stored]:
    signed = (coded.codes.astype(np.int16) - 128).astype(np.int8)
    return {"weight": Stored("I8", signed), "weight_scale": to_stored(coded.scales, scale_dtype)}


def _w8a8_settings(grid: Grid, method: Method, routers: Sequence[str]) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    inputs = weights | {"strategy": "token", "dynamic": True}
    return _compressed("int-quantized", weights | {"dynamic": False}, inputs, routers)


def _compressed(
    format: str,
    weights: dict[str, Any],
    inputs: dict[str, Any] | None,
    routers: Sequence[str],
) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", *routers],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _transposed(stored: Stored) -> Stored:
    return replace(stored, values=np.ascontiguousarray(stored.values.T))


@dataclass(frozen=True, slots=True)
class _Integers:
    """What a format of whole numbers is but for its groups and the type of its scales."""

    num_bits: int
    has_groups: bool
    is_symmetric: bool
    pack: Callable[[Coded, str], Mapping[str, Stored]]
    describe: Callable[[Grid, Method, Sequence[str]], dict[str, Any]]
    method: Method | None = None
    """None: GPTQ with a text, else to the nearest."""
    is_in_fp16: bool = False
    """Scales are, whatever the checkpoint is in."""


_W4A16 = _Integers(4, True, True, _compressed_tensors, _compressed_settings)
_INTEGERS = {
    "gptq": _Integers(4, True, True, _gptq_tensors, _gptq_settings, "gptq", is_in_fp16=True),
    "awq": _Integers(4, True, False, _awq_tensors, _awq_settings, "awq", is_in_fp16=True),
    "compressed-tensors": _W4A16,
    "compressed-tensors-w4a16": _W4A16,
    "compressed-tensors-w8a16": _Integers(
        8, False, True, _compressed_tensors, _compressed_settings
    ),
    "compressed-tensors-w8a8": _Integers(8, False, True, _plain_int8_tensors, _w8a8_settings),
}
_FP8 = "compressed-tensors-fp8"
FORMATS = (*_INTEGERS, _FP8)
NEEDING_TEXT = tuple(name for name, kind in _INTEGERS.items() if kind.method is not None)


def has_groups(name: str) -> bool:
    """Whether a format has several scales for an output."""
    return name in _INTEGERS and _INTEGERS[name].has_groups


def format_of(
    name: str, *, group_size: int, dtype: str, has_text: bool, is_ordered: bool = False
) -> Format:
    """The format of this name. ``dtype``: of the checkpoint's floats; ``is_ordered``: by GPTQ, the
    largest inputs first."""
    if name == _FP8:
        return Fp8Format(dtype)
    kind = _INTEGERS[name]
    scale_dtype = "F16" if kind.is_in_fp16 else dtype
    grid = Grid(
        num_bits=kind.num_bits,
        group_size=group_size if kind.has_groups else 0,
        is_symmetric=kind.is_symmetric,
        store=partial(rounded_to, dtype=scale_dtype),
    )
    method = kind.method or ("gptq" if has_text else "nearest")
    method = "ordered gptq" if is_ordered else method
    return IntegerFormat(method, grid, scale_dtype, kind.pack, kind.describe)
