"""The step list of csrc/cuda/step_list.h: kernels that C++ launches for every step."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int32, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from lmi_core.ops.graph import RowSymbol
from lmi_core.ops.kernels.cuda import library

_ROWS = {"T": "TOKEN_ROWS", "L": "LOGIT_ROWS", "E": "EXPERT_ROWS"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepListSizes:
    """The most that a step has, and which decode steps are captured."""

    max_tokens: int
    max_seqs: int
    max_logit_rows: int
    max_copies: int
    max_blocks_per_seq: int
    block_size: int
    max_top: int
    num_attention_slots: int
    split_tokens: int
    scratch_block: int
    """A block of no sequence."""
    experts_per_token: int = 0
    """0: the model has none."""
    num_misses: int = 1
    """Steps that are launched kernel by kernel on a busy device before theirs is captured."""
    row_counts: Sequence[int] = ()
    key_counts: Sequence[int] = ()
    """What decode steps are captured for, ascending; none: never."""


@dataclass(frozen=True, slots=True)
class StepListState:
    """What was captured so far, and why nothing is any more ("": it is)."""

    num_captured: int
    num_replayed: int
    capture_error: str


class StepList:
    """Owns a list; ``close`` it when no worker uses it any more."""

    def __init__(self, sizes: StepListSizes, device: torch.device) -> None:
        self.library = library.load()
        self._functions = self.library.step_list_functions()
        self._device = device
        self.num_shapes = len(sizes.row_counts), len(sizes.key_counts)
        """Numbers of row counts and of key counts that decode steps are captured for."""
        counts = [(c_int32 * len(c))(*c) for c in (sizes.row_counts, sizes.key_counts)]
        arguments = self.library.interface.structs["StepSizes"](
            device=device.index or 0,
            row_counts=ctypes.addressof(counts[0]),
            key_counts=ctypes.addressof(counts[1]),
            num_row_counts=len(sizes.row_counts),
            num_key_counts=len(sizes.key_counts),
            **{
                name: getattr(sizes, name)
                for name in StepListSizes.__slots__
                if name not in ("row_counts", "key_counts")
            },
        )
        made = c_void_p()
        self._call("create", ctypes.byref(arguments), ctypes.byref(made))
        self.address: int = made.value or 0
        self._memory: Tensor | None = None

    def add(self, node: str, rows: RowSymbol, arguments: ctypes.Structure) -> None:
        """Append a node; what its arguments point to must outlive the list."""
        numbers = self.library.interface.numbers
        kind = numbers[f"NODE_{node.upper()}"], numbers[_ROWS[rows]]
        self._call("add", self.address, *kind, ctypes.byref(arguments))

    def set_adapter(self, slot: int, parts: int) -> None:
        """What a slot of steps' adapters is: the address of ``AdapterTable.described``, or 0.
        While no submitted step refers to the slot; of a closed list nothing is."""
        if self.address:
            self._call("set_adapter", self.address, slot, parts)

    @property
    def num_bytes(self) -> int:
        """Device memory that ``start`` allocates."""
        return int(self._functions["num_bytes"](self.address))

    def start(self) -> None:
        self._memory = torch.empty(self.num_bytes, dtype=torch.uint8, device=self._device)
        self._call("start", self.address, self._memory.data_ptr())

    def warm_up(self) -> None:
        """Run every shape that can be captured once. Not while a worker uses the list, as the
        following."""
        self._call("warm_up", self.address)

    def capture(self, row_count_id: int, key_count_id: int) -> None:
        """Capture a shape, given by the numbers of its counts."""
        self._call("capture", self.address, row_count_id, key_count_id)

    def state(self) -> StepListState:
        state = self.library.interface.structs["StepListState"]()
        self._functions["state"](self.address, ctypes.byref(state))
        return StepListState(state.num_captured, state.num_replayed, state.capture_error.decode())

    def close(self) -> None:
        if self.address:
            self._functions["destroy"](self.address)
            self.address = 0
            self._memory = None

    def _call(self, name: str, *arguments: object) -> None:
        if self._functions[name](*arguments) != 0:
            raise RuntimeError(self.library.error())
