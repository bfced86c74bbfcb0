"""What a rank other than 0 does besides steps, as rank 0 says."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmi_core.runners.cpu.ranks import MAX_MESSAGE_BYTES
from lmi_core.sandbox import message

if TYPE_CHECKING:
    from lmi_core import _native
    from lmi_core.adapters.store import LoraStore, PackedLora
    from lmi_core.runners.cpu.cpu_model import RecordedModel

log = logging.getLogger(__name__)


class AdapterOrders:
    """Carries out orders one after the other, which steps wait for, and beside them what is asked.

    An order that fails ends the process: no step is right without it."""

    def __init__(self, connection: socket.socket, store: LoraStore | None) -> None:
        self._connection = connection
        self._store = store
        self._adapters: dict[int, PackedLora] = {}
        self._sending = threading.Lock()

    def take(self, kind: str, number: int, name: str, arguments: tuple[Any, ...]) -> None:
        """An order, or what is asked."""
        if kind == "order":
            self._carry_out(number, name, arguments)
        else:
            asked = (number, name, arguments)
            threading.Thread(target=self._answer, args=asked, daemon=True).start()

    def _carry_out(self, number: int, name: str, arguments: tuple[Any, ...]) -> None:
        try:
            result = getattr(self, name)(*arguments)
        except Exception:
            log.exception("%s failed", name)
            os._exit(1)
        self._finish_order()
        self._send(("done", number, result))

    def _finish_order(self) -> None:
        """Let steps that wait for it begin."""

    def _answer(self, number: int, name: str, arguments: tuple[Any, ...]) -> None:
        try:
            answer = ("done", number, getattr(self, name)(*arguments))
        except Exception as error:
            answer = ("failed", number, message.portable(error))
        self._send(answer)

    def _send(self, answer: tuple[Any, ...]) -> None:
        with self._sending, suppress(OSError):
            message.send(self._connection, message.encode(answer))

    def pack_adapter(self, key: int, path: Path, dropped: Sequence[int]) -> int:
        """Asked; returns its bytes."""
        assert self._store is not None
        for other in dropped:
            self._adapters.pop(other, None)
        packed = self._adapters[key] = self._store.pack(path)
        return packed.num_bytes

    def set_adapter(self, slot: int, key: int | None) -> None:
        """An order."""
        assert self._store is not None
        self._store.set(slot, None if key is None else self._adapters[key])


class RankOrders(AdapterOrders):
    """And copies of KV blocks."""

    def __init__(
        self,
        connection: socket.socket,
        group: _native.RankGroup,
        recorded: RecordedModel,
        store: LoraStore | None,
    ) -> None:
        super().__init__(connection, store)
        self._group = group
        self._recorded = recorded

    def run(self) -> None:
        """Until rank 0 says nothing more: then it is gone, or will be, and so is this process."""
        with suppress(EOFError, OSError):
            while True:
                self.take(*message.decode(message.receive(self._connection, MAX_MESSAGE_BYTES)))
        os._exit(0)

    def _finish_order(self) -> None:
        self._group.finish_order()

    def copy_out(self, block_id: int) -> bytes:
        """An order."""
        content = bytearray(self._recorded.cache.bytes_per_block)
        self._recorded.cache.copy_out(block_id, content)
        return bytes(content)

    def copy_in(self, block_id: int, content: bytes) -> None:
        """An order."""
        self._recorded.cache.copy_in(block_id, content)
