"""What was recorded, as a started step list with the memory that its kernels use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from lmi_core import _native
from lmi_core.ops.device.paged_cache import PagedCache
from lmi_core.ops.device.step_list import StepList, StepListSizes
from lmi_core.ops.graph import RowSymbol
from lmi_core.ops.kernels.cuda import cublaslt
from lmi_core.ops.kernels.cuda.library import DTYPES

ALIGNMENT = 256
"""Bytes that every activation starts on."""
_STRUCTS = {
    "embed": "gather_rows",
    "add_positions": "gather_rows",
    "gather_logit_rows": "gather_rows",
    "attention": "decode_attention",
    "linear": "linear_dense",
}
"""Of nodes with another name than their kernel's arguments."""
_MEETINGS = ("all_reduce", "gather_columns", "share_tokens")


@dataclass(slots=True, eq=False)
class Value:
    """An activation; ``first``, ``last``: the nodes between which it lives."""

    dtype: torch.dtype
    columns: int
    rows: RowSymbol
    first: int
    last: int
    offset: int = 0

    def num_bytes(self, num_rows: int) -> int:
        num_bytes = num_rows * self.columns * self.dtype.itemsize
        return -(-num_bytes // ALIGNMENT) * ALIGNMENT

    def view(self, arena: Tensor, num_rows: int) -> Tensor:
        num_bytes = num_rows * self.columns * self.dtype.itemsize
        part = arena[self.offset : self.offset + num_bytes]
        return part.view(self.dtype).view(num_rows, self.columns)


@dataclass(slots=True, eq=False)
class OneRow(Value):
    """Columns that are the same for any number of rows."""

    def num_bytes(self, num_rows: int) -> int:
        return Value.num_bytes(self, 1)


@dataclass(slots=True, eq=False)
class UnpackedWeight(OneRow):
    """Room for an unpacked weight of as many bytes as ``columns``, for one node: none where no step
    has more rows than ``most_rows``."""

    most_rows: int = 0

    def num_bytes(self, num_rows: int) -> int:
        return OneRow.num_bytes(self, 1) if num_rows > self.most_rows else 0


@dataclass(slots=True, eq=False)
class Node:
    """A kernel and what it is given, by the names of its arguments but for what a step says."""

    name: str
    rows: RowSymbol
    arguments: dict[str, object]
    """Numbers, dtypes, tensors, activations, and functions that give tensors: what is only known
    when the list is built."""


class RecordedSteps:
    """Not to be closed while a worker uses the list."""

    def __init__(
        self,
        nodes: Sequence[Node],
        values: Sequence[Value],
        logits: Value,
        sizes: StepListSizes,
        device: torch.device,
        ranks: int = 0,
    ) -> None:
        """``ranks``: the address of ``NcclRanks``."""
        self._ranks = ranks
        num_rows = {
            "T": sizes.max_tokens,
            "L": sizes.max_logit_rows,
            "E": sizes.max_tokens * sizes.experts_per_token,
        }
        num_bytes = assign_offsets(values, num_rows)
        self._arena = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._workspace = torch.empty(cublaslt.WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self.logits = logits.view(self._arena, sizes.max_logit_rows)
        """[max_logit_rows, vocab], of the last step."""
        self._modified = torch.empty_like(self.logits)
        self._nodes = nodes  # the kernels read their tensors
        self.list = StepList(sizes, device)
        try:
            for node in nodes:
                self._add(node)
            self.list.start()
            self.list.library.log_notices()
        except BaseException:
            self.list.close()
            raise

    def close(self) -> None:
        self.list.close()
        self._nodes = ()
        del self._arena, self._workspace, self._modified, self.logits

    def _add(self, node: Node) -> None:
        arguments = {name: self._plain(value) for name, value in node.arguments.items()}
        if node.name in ("linear", "linear_packed", "linear_quantized"):
            arguments["workspace"] = self._workspace.data_ptr()
            arguments["workspace_bytes"] = self._workspace.numel()
        elif node.name == "sample":
            arguments["modified"] = self._modified.data_ptr()
        elif node.name in _MEETINGS:
            arguments["ranks"] = self._ranks
        struct = self.list.library.interface.kernels[_STRUCTS.get(node.name, node.name)]
        self.list.add(node.name, node.rows, struct(**arguments))

    def _plain(self, value: object) -> object:
        """As a struct's field."""
        if isinstance(value, Value):
            return self._arena.data_ptr() + value.offset
        if callable(value) and not isinstance(value, Tensor):
            value = cast(Callable[[], Tensor], value)()
        if isinstance(value, Tensor):
            assert value.is_contiguous()
            return value.data_ptr()
        return DTYPES[value] if isinstance(value, torch.dtype) else value


def block_copies(caches: Sequence[PagedCache], block_size: int) -> list[Node]:
    """Of whole blocks, in every store of every cache."""
    nodes = []
    for store in (store for cache in caches for store in cache.stores):
        layer_bytes = store[0].numel() * store.element_size()
        arguments: dict[str, object] = {
            "store": store,
            "layer_bytes": layer_bytes,
            "block_bytes": layer_bytes // store.shape[1] * block_size,
            "num_layers": len(store),
        }
        nodes.append(Node("copy_blocks", "T", arguments))
    return nodes


def assign_offsets(values: Sequence[Value], num_rows: Mapping[str, int]) -> int:
    """Give values that live together different places. Returns the bytes of all."""
    lifetimes = [(v.num_bytes(num_rows[v.rows]), v.first, v.last) for v in values]
    offsets, num_bytes = _native.assign_offsets(lifetimes)
    for value, offset in zip(values, offsets, strict=True):
        value.offset = offset
    return num_bytes
