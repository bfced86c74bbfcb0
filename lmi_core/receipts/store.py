"""The files that receipts are kept in, written by a thread of their own.

A directory per tenant holds files of JSON lines for their owner only. Whoever puts a receipt never
waits and never fails for it: what can't be written is dropped, and the log says so once.
"""

from __future__ import annotations

import errno
import logging
import os
import queue
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from lmi_core.receipts.receipt import Receipt, encode
from lmi_core.settings.record_config import RecordConfig

log = logging.getLogger(__name__)

_MAX_PENDING = 1024
_MAX_PENDING_TOKENS = 4 << 20
"""Receipts, and tokens in them, that wait to be written; more are dropped."""
_SUFFIX = ".jsonl"


@dataclass(slots=True)
class _File:
    path: Path
    descriptor: int
    num_bytes: int = 0


class ReceiptStore:
    """``put`` is for one thread, that of the event loop."""

    def __init__(self, config: RecordConfig) -> None:
        self._config = config
        self._file_bytes = max(1, config.max_bytes // config.max_files)
        self._queue: queue.SimpleQueue[tuple[str, Receipt, int] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_pending = self._num_pending_tokens = 0
        self._thread: threading.Thread | None = None
        self._files: dict[str, _File] = {}
        self._said: set[str] = set()
        self.num_kept = self.num_dropped = 0

    @property
    def share(self) -> float:
        return self._config.share

    def put(self, tenant: str, receipt: Receipt) -> None:
        """``tenant``: the name of its directory."""
        num_tokens = receipt.num_prompt_tokens + sum(c.num_tokens for c in receipt.choices)
        with self._lock:
            is_full = self._num_pending >= _MAX_PENDING
            is_full |= self._num_pending_tokens + num_tokens > _MAX_PENDING_TOKENS
            if not is_full:
                self._num_pending += 1
                self._num_pending_tokens += num_tokens
        if is_full:
            self._drop("they come faster than the disk takes them")
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="receipts", daemon=True)
            self._thread.start()
        self._queue.put((tenant, receipt, num_tokens))

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what waits, as far as the time allows."""
        if self._thread is None:
            return
        self._queue.put(None)
        self._thread.join(timeout_s)
        self._thread = None
        log.info("%d receipts kept, %d dropped", self.num_kept, self.num_dropped)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            tenant, receipt, num_tokens = item
            try:
                self._write(tenant, encode(receipt.redacted() if self._config.redact else receipt))
                self.num_kept += 1
            except OSError as error:
                self._drop(f"{self._config.directory}: {error.strerror or error}")
            except Exception as error:  # the next one may be fine
                self._drop(f"{type(error).__name__}: {error}")
            with self._lock:
                self._num_pending -= 1
                self._num_pending_tokens -= num_tokens
        for file in self._files.values():
            os.close(file.descriptor)
        self._files.clear()

    def _drop(self, reason: str) -> None:
        self.num_dropped += 1
        if reason not in self._said and len(self._said) < _MAX_PENDING:
            self._said.add(reason)
            log.warning("receipts of requests are dropped: %s", reason)

    def _write(self, tenant: str, line: bytes) -> None:
        if len(line) > self._file_bytes:
            text = f"one is longer than {self._file_bytes} bytes (record_size by record_files)"
            raise OSError(errno.EFBIG, text)
        file = self._files.get(tenant)
        if file is None or file.num_bytes + len(line) > self._file_bytes:
            file = self._begin(tenant)
        num_written = os.write(file.descriptor, line)
        if num_written < len(line):
            os.ftruncate(file.descriptor, file.num_bytes)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        file.num_bytes += num_written

    def _begin(self, tenant: str) -> _File:
        """A new file for a tenant, in the place of the one that is full."""
        self._end(tenant)
        directory = self._config.directory / tenant
        self._config.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
        self._make_room()
        path = directory / f"{time.time_ns():020d}-{os.getpid()}{_SUFFIX}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        file = self._files[tenant] = _File(path, os.open(path, flags, 0o600))
        return file

    def _end(self, tenant: str) -> None:
        file = self._files.pop(tenant, None)
        if file is not None:
            os.close(file.descriptor)

    def _make_room(self) -> None:
        """Remove the oldest files of whoever has the most, until there is room for one more."""
        paths = sorted(self._config.directory.glob(f"*/*{_SUFFIX}"), key=lambda path: path.name)
        counts = Counter(path.parent for path in paths)
        while len(paths) >= self._config.max_files:
            owner = counts.most_common(1)[0][0]
            oldest = next(path for path in paths if path.parent == owner)
            paths.remove(oldest)
            counts[owner] -= 1
            if (file := self._files.get(owner.name)) is not None and file.path == oldest:
                self._end(owner.name)
            oldest.unlink(missing_ok=True)
