"""The values of a step that torch computes op by op."""

from __future__ import annotations

from typing import cast

from torch import Tensor

from lmi_core.ops.device.device_step import DeviceStep
from lmi_core.ops.device.expert_rows import ExpertRows
from lmi_core.ops.device.quantized_rows import QuantizedRows
from lmi_core.ops.graph import Handle


class Replay:
    """One execution: its step and the values that are still needed."""

    def __init__(self, step: DeviceStep) -> None:
        self.step = step
        self._values: dict[Handle, Tensor | QuantizedRows] = {}
        self._addends: dict[Handle, Tensor] = {}
        self._grouped: tuple[Handle, ExpertRows] | None = None

    def __getitem__(self, handle: Handle) -> Tensor:
        value = cast(Tensor, self._values[handle])
        addend = self.take_addend(handle)
        return value if addend is None else value.add_(addend)

    def operand(self, handle: Handle) -> Tensor | QuantizedRows:
        """The value, which may be quantised already, for a product with quantised weights."""
        value = self._values[handle]
        return value if isinstance(value, QuantizedRows) else self[handle]

    def __setitem__(self, handle: Handle, value: Tensor | QuantizedRows) -> None:
        self._values[handle] = value

    def add_later(self, handle: Handle, addend: Tensor) -> None:
        """Add at the next use of the value, which may do it in its own kernel."""
        self._values[handle] = self[handle]
        self._addends[handle] = addend

    def take(self, handle: Handle) -> tuple[Tensor, Tensor | None]:
        """The value, and what the caller must add to it in place."""
        return cast(Tensor, self._values[handle]), self.take_addend(handle)

    def take_addend(self, handle: Handle) -> Tensor | None:
        return self._addends.pop(handle, None)

    def drop(self, handle: Handle) -> None:
        self._values.pop(handle, None)
        self._addends.pop(handle, None)

    def grouped(self, routes: Handle) -> ExpertRows | None:
        """What ``group`` was given last, if it was for these."""
        return self._grouped[1] if self._grouped and self._grouped[0] is routes else None

    def group(self, routes: Handle, rows: ExpertRows) -> ExpertRows:
        """Keep them for the next product of the same experts."""
        self._grouped = routes, rows
        return rows
