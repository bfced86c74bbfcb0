"""Matrices as products take them: each in the format that it has, or that is asked for."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import numpy as np

from lmi_core.errors import ModelError
from lmi_core.models.slices import Bounds
from lmi_core.models.weights import WeightPacker
from lmi_core.ops.operands import JoinedWeight, LinearWeight, SlicedWeight
from lmi_core.weights.block_matrix import BlockMatrix
from lmi_core.weights.float_code_matrix import CODE_BLOCK, FloatCodeMatrix
from lmi_core.weights.formats import BlockFormat, PackFormat, Quantization, WeightFormat
from lmi_core.weights.fp8_matrix import Fp8Matrix
from lmi_core.weights.integer_matrix import IntegerMatrix
from lmi_core.weights.made_codes import through_codes, to_eetq, to_fp8, to_int8
from lmi_core.weights.matrix import Matrix, as_floats, dense, inputs_of

_log = logging.getLogger(__name__)

_FORMATS: tuple[Quantization, ...] = ("int4", "int8", "fp8")
_OwnFormat = BlockFormat | Literal["fp16", "nf4", "fp4"]
"""That only products of their own kind take."""


class WeightPacking:
    """Packs for ``packer``, and notes what became of the matrices. ``quantize``: what those of
    layers become; ``weight_format``: what others are. ``keeps_halves``: fp16 stays so where
    ``packer`` has products with it, ``keeps_orders``: int4 with inputs in another order.
    NotFiniteError for what is damaged."""

    def __init__(
        self,
        packer: WeightPacker,
        weight_format: WeightFormat,
        quantize: Quantization | None,
        *,
        keeps_halves: bool = False,
        keeps_orders: bool = False,
    ) -> None:
        self.kept: set[Quantization] = set()
        """What matrices of layers were in the checkpoint, and still are."""
        self.widened: set[Quantization] = set()
        """What they were where they are of ``weight_format`` now."""
        self.own_formats: Counter[_OwnFormat] = Counter()
        """Weights of matrices that only products of their own kind take."""
        self.most_rounding = 0.0
        """The largest change of a scale, relative to it."""
        self.weight_format = weight_format
        self.head_format: PackFormat = weight_format if quantize is None else "int8"
        self.quantize = quantize
        self.keeps_halves = keeps_halves and packer.keeps_blocks
        self.keeps_orders = keeps_orders and packer.keeps_blocks
        self.packer = packer

    @property
    def keeps_blocks(self) -> bool:
        """Whether matrices that are in blocks stay so."""
        return self.packer.keeps_blocks and self.quantize is None

    @property
    def kept_format(self) -> str | None:
        """Of the smallest of the matrices that were kept; of blocks, all there are, those of most
        weights first."""
        if self.own_formats:
            return ", ".join(name for name, _ in self.own_formats.most_common())
        return next((name for name in _FORMATS if name in self.kept), None)

    def note_rounding(self, change: float) -> None:
        """Of a scale, relative to it."""
        self.most_rounding = max(self.most_rounding, change)

    def report(self) -> None:
        """Log what of the checkpoint's quantisation isn't as it was."""
        if "fp8" in self.widened:
            _log.warning(
                "the checkpoint's fp8 weights are held as %s here; quantize=int8 keeps them as "
                "small as they are",
                self.weight_format,
            )
        if self.widened & {"int4", "int8"}:
            _log.warning(
                "matrices that are multiplied as one are quantised in part or in different ways: "
                "they are held as %s",
                self.weight_format,
            )
        if self.most_rounding > 0:
            _log.warning(
                "scales of the checkpoint's int4 weights are rounded to fp16: they change by at "
                "most %.2g %%",
                100 * self.most_rounding,
            )

    def pack(
        self,
        parts: Sequence[Matrix],
        names: Sequence[str],
        *,
        gated: bool = False,
        format: PackFormat | None = None,
    ) -> LinearWeight | JoinedWeight:
        """As one, or side by side where each stays as it is in a format or an order of its own."""
        own = {(self._own_format(part), _order_of(part)) for part in parts}
        if len(own) > 1:
            return JoinedWeight(
                tuple(
                    self._pack_one([part], [name], format=format)
                    for part, name in zip(parts, names, strict=True)
                )
            )
        return self._pack_one(parts, names, gated=gated, format=format)

    def sliced(
        self,
        experts: Sequence[Sequence[Matrix]],
        names: Sequence[str],
        bounds: Bounds,
        *,
        format: PackFormat | None = None,
    ) -> SlicedWeight:
        """Of one matrix, or of several experts', slices of inputs."""
        slices = []
        for first, end in bounds:
            try:
                own = [[inputs_of(part, first, end) for part in parts] for parts in experts]
            except ValueError as error:
                raise ModelError(
                    f"{names[0]} can't be cut for tensor_parallel_degree or tp_invariant: {error}; "
                    "write another degree, or leave them out",
                    field="option.tensor_parallel_degree",
                ) from None
            labels = [f"{names[0]}[{first}:{end}]"]
            if len(own) == 1:
                slices.append(self._pack_one(own[0], labels, format=format))
            else:
                slices.append(self.pack_experts(own, labels, gated=False))
        return SlicedWeight(tuple(slices))

    def _pack_one(
        self,
        parts: Sequence[Matrix],
        names: Sequence[str],
        *,
        gated: bool = False,
        format: PackFormat | None = None,
    ) -> LinearWeight:
        (made,), packed = self._made_of([parts], format)
        return self.packer.pack(made, names=names, format=packed, gated=gated)

    def pack_experts(
        self, experts: Sequence[Sequence[Matrix]], names: Sequence[str], *, gated: bool
    ) -> LinearWeight:
        made, packed = self._made_of(experts, None)
        return self.packer.pack_experts(made, names=names, format=packed, gated=gated)

    def _made_of(
        self, experts: Sequence[Sequence[Matrix]], format: PackFormat | None
    ) -> tuple[list[Sequence[Matrix]], PackFormat]:
        """Matrices, each of its own parts, for packing as one weight, and the format that they are
        packed in. ``format``: None: that of layers."""
        parts = [part for expert in experts for part in expert]
        formats = {self._own_format(part) for part in parts}
        own = formats.pop() if len(formats) == 1 else None
        if own is not None:
            self.own_formats[own] += sum(len(part) * part.shape[1] for part in parts)
        chosen = own or self._kept_format(parts) or format or self._layer_format(parts)
        coded = (part for part in parts if isinstance(part, IntegerMatrix | BlockMatrix))
        if any(part.format != chosen for part in coded):
            experts = [dense(expert) for expert in experts]
        made = [self._made(expert, chosen) for expert in experts]
        return [expert for expert, _ in made], made[0][1]

    def _made(
        self, parts: Sequence[Matrix], chosen: PackFormat | Quantization
    ) -> tuple[Sequence[Matrix], PackFormat]:
        """``parts`` for packing as ``chosen``, and the format that they are packed in."""
        if chosen == "smoothquant":
            return parts, "int8"
        if chosen == "llm_int8":
            return [to_int8(part, "llm_int8") for part in as_floats(parts)], "int8"
        if chosen == "eetq":
            return [to_eetq(part) for part in as_floats(parts)], "int8"
        if chosen == "nf4" or chosen == "fp4":
            if any(isinstance(part, FloatCodeMatrix) for part in parts):
                return parts, chosen
            made = [through_codes(part, chosen) for part in as_floats(parts)]
            has_blocks = parts[0].shape[1] % CODE_BLOCK == 0
            return made, chosen if has_blocks else self.weight_format
        if chosen == "fp8" and not all(isinstance(part, Fp8Matrix) for part in parts):
            in_fp8 = [to_fp8(part) for part in as_floats(parts)]
            return in_fp8, "fp8" if self.packer.keeps_fp8(in_fp8) else self.weight_format
        return parts, chosen

    def _own_format(self, part: Matrix) -> _OwnFormat | None:
        """Of a matrix that only products of its own kind take as it is."""
        if isinstance(part, BlockMatrix | FloatCodeMatrix):
            return part.format
        is_half = isinstance(part, np.ndarray) and part.dtype == np.float16
        return "fp16" if is_half and self.keeps_halves else None

    def _kept_format(self, parts: Sequence[Matrix]) -> Quantization | None:
        """Of matrices in integers that can be packed as one as they are; None: others."""
        formats = {part.format if isinstance(part, IntegerMatrix) else None for part in parts}
        kept = formats.pop() if len(formats) == 1 else None
        if kept is not None:
            self.kept.add(kept)
        return kept

    def _layer_format(self, parts: Sequence[Matrix]) -> PackFormat | Quantization:
        if self.quantize is not None:
            return self.quantize
        in_fp8 = [part for part in parts if isinstance(part, Fp8Matrix)]
        if len(in_fp8) == len(parts) and self.packer.keeps_fp8(in_fp8):
            self.kept.add("fp8")
            return "fp8"
        if in_fp8:
            self.widened.add("fp8")
        self.widened |= {part.format for part in parts if isinstance(part, IntegerMatrix)}
        return self.weight_format


def _order_of(part: Matrix) -> bytes | None:
    """Of the inputs, where products take them in another than the rows'."""
    order = part.order if isinstance(part, IntegerMatrix) else None
    return None if order is None else order.tobytes()
