"""Files and batches of the Batch API, in a directory that a restart finds again.

``ROOT/TENANT/files/ID.json`` describes a file whose content is ``ID.data`` beside it;
``ROOT/TENANT/batches/ID.json`` is a batch, ``ID.output`` and ``ID.errors`` beside it are its
answers while it runs. All of them are their owner's alone (0600). Descriptions are replaced as a
whole, and answers appended a line at a time: a process that is killed leaves at most half a line.
"""

from __future__ import annotations

import errno
import json
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lmi_core.errors import CapacityError, UserError
from lmi_server.batches.lines import MESSAGES, is_unsent
from lmi_server.dialects.base import HttpError

_ID = re.compile(r"(?:file-|batch_)[0-9a-f]{32}")
_MAX_FILES = 10_000
"""Of a tenant; as many batches."""
ENDED = frozenset({"completed", "failed", "expired", "cancelled"})
"""States in which a batch stays."""

Record = dict[str, Any]


class BatchStore:
    """One tenant's files and batches. Its methods read and write files: they are for threads."""

    def __init__(
        self, root: Path, tenant: str, max_bytes: int, clock: Callable[[], float] = time.time
    ) -> None:
        """``max_bytes``: of all its files together."""
        self.tenant = tenant
        self._directory = root / (tenant or "all")
        self._max_bytes = max_bytes
        self._clock = clock
        self._lock = threading.RLock()
        self._records: dict[str, dict[str, Record]] = {}
        for kind in ("files", "batches"):
            folder = self._directory / kind
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = [_read(path) for path in sorted(folder.glob("*.json"))]
            records = sorted(filter(None, found), key=lambda record: record["created_at"])
            self._records[kind] = {record["id"]: record for record in records}
        self._remove_orphans()
        data = [path for path in self._directory.glob("*/*.*") if path.suffix != ".json"]
        self._num_bytes = sum(path.stat().st_size for path in data)

    def add_file(self, name: str, purpose: str, data: bytes) -> Record:
        """UserError for one that doesn't fit beside the others, CapacityError where the disk has no
        room."""
        with self._lock:
            self._check_number("files")
            self.take(len(data))
        file_id = f"file-{uuid.uuid4().hex}"
        try:
            _write(self.data_path(file_id), data)  # the lock is the loop's, too: it isn't held
            with self._lock:
                return self._describe(file_id, name, purpose, len(data))
        except OSError as error:
            self.take(-len(data))
            self.data_path(file_id).unlink(missing_ok=True)
            raise _no_room("file", error) from None

    def take(self, num_bytes: int) -> None:
        """Count bytes that will be written; UserError where they are too many."""
        with self._lock:
            if self._num_bytes + num_bytes > self._max_bytes:
                raise UserError(
                    f"files hold {self._num_bytes} bytes, and {num_bytes} more are over the "
                    f"{self._max_bytes} that there is room for (batch_dir_size); delete some",
                    field="file",
                )
            self._num_bytes += num_bytes

    def delete_file(self, file_id: str) -> None:
        """HttpError 404, or 409 for one that a batch still reads."""
        with self._lock:
            file = self.get("files", file_id)
            users = [
                batch["id"]
                for batch in self._records["batches"].values()
                if batch["input_file_id"] == file_id and batch["status"] not in ENDED
            ]
            if users:
                raise HttpError(409, "Conflict", f"{file_id} is being read by {users[0]}")
            self._path("files", file_id).unlink(missing_ok=True)
            self.data_path(file_id).unlink(missing_ok=True)
            del self._records["files"][file_id]
            self._num_bytes -= file["bytes"]

    def add_batch(self, fields: Mapping[str, Any]) -> Record:
        """Where there are as many as may be, the oldest one that has ended gives way. CapacityError
        where the disk has no room."""
        with self._lock:
            if len(self._records["batches"]) >= _MAX_FILES:
                ended = (one for one in self._records["batches"].values() if one["status"] in ENDED)
                if (oldest := next(ended, None)) is not None:
                    self._forget_batch(oldest["id"])
            self._check_number("batches")
            batch = {"id": f"batch_{uuid.uuid4().hex}", "object": "batch", **fields}
            batch["created_at"] = int(self._clock())
            try:
                self.save_batch(batch)
            except OSError as error:
                raise _no_room("batch", error) from None
            return batch

    def save_batch(self, batch: Record) -> None:
        """OSError where there is no room: then what was saved before is as it was."""
        with self._lock:
            _write(self._path("batches", batch["id"]), json.dumps(batch).encode())
            self._records["batches"][batch["id"]] = batch

    def delete_batch(self, batch_id: str) -> None:
        """Of one that has ended, with its requests and answers."""
        with self._lock:
            batch = self.get("batches", batch_id)
            self._forget_batch(batch_id)
            for name in ("input_file_id", "output_file_id", "error_file_id"):
                if batch[name] in self._records["files"]:
                    self.delete_file(batch[name])

    def keep_answers(self, batch_id: str, kind: str, file_id: str) -> bool:
        """Make a file of a batch's answers, if there are any; also where a former process had
        begun to."""
        with self._lock:
            partial, data = self.answers_path(batch_id, kind), self.data_path(file_id)
            if partial.exists() and partial.stat().st_size:
                partial.rename(data)
            partial.unlink(missing_ok=True)
            if not data.exists():
                return False
            name = f"{batch_id}_{kind}.jsonl"
            self._describe(file_id, name, "batch_output", data.stat().st_size)
            return True

    def get(self, kind: str, record_id: str) -> Record:
        """A file or batch; HttpError 404."""
        with self._lock:
            record = self._records[kind].get(record_id)
        if record is None:
            what = "file" if kind == "files" else "batch"
            raise HttpError(404, "NotFound", f"No such {what}: {record_id[:80]}")
        return record

    def batch(self, batch_id: str, *, of_messages: bool = False) -> Record:
        """One of OpenAI's or one of messages; HttpError 404, also for the other kind."""
        found = self.get("batches", batch_id)
        return found if (found["endpoint"] == MESSAGES) is of_messages else self.get("batches", "")

    def listed(self, kind: str) -> list[Record]:
        """All of them, the newest first."""
        with self._lock:
            return list(self._records[kind].values())[::-1]

    def unfinished(self) -> list[Record]:
        return [batch for batch in self.listed("batches")[::-1] if batch["status"] not in ENDED]

    def data_path(self, file_id: str) -> Path:
        return self._path("files", file_id, "data")

    def answers_path(self, batch_id: str, kind: str) -> Path:
        return self._path("batches", batch_id, kind)

    def _forget_batch(self, batch_id: str) -> None:
        self._path("batches", batch_id).unlink(missing_ok=True)
        del self._records["batches"][batch_id]

    def _remove_orphans(self) -> None:
        """What a process has left that was killed within a write, or before it described a file;
        but not the answers that an unfinished batch is to have."""
        known = {*self._records["files"], *self._records["batches"]}
        for batch in self.unfinished():
            known |= {str(batch.get("output_id")), str(batch.get("errors_id"))}
        for path in self._directory.glob("*/*.*"):
            if path.suffix == ".new" or (path.suffix != ".json" and path.stem not in known):
                path.unlink()

    def _describe(self, file_id: str, name: str, purpose: str, num_bytes: int) -> Record:
        file = {
            "id": file_id,
            "object": "file",
            "bytes": num_bytes,
            "created_at": int(self._clock()),
            "filename": name,
            "purpose": purpose,
            "status": "processed",
        }
        _write(self._path("files", file_id), json.dumps(file).encode())
        self._records["files"][file_id] = file
        return file

    def _check_number(self, kind: str) -> None:
        if len(self._records[kind]) >= _MAX_FILES:
            raise CapacityError(f"there are {_MAX_FILES} {kind}; delete some")

    def _path(self, kind: str, record_id: str, suffix: str = "json") -> Path:
        assert _ID.fullmatch(record_id), record_id
        return self._directory / kind / f"{record_id}.{suffix}"


class Answers:
    """The lines of one file of answers, of which each is there once."""

    def __init__(self, store: BatchStore, batch_id: str, kind: str) -> None:
        """Drops half a line that a killed process has left, and what isn't one."""
        self._store = store
        self._file = os.open(
            store.answers_path(batch_id, kind), os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600
        )
        self.custom_ids: set[str] = set()
        self.num_unsent = 0
        """Those that say that their request was never sent."""
        num_whole = 0
        with os.fdopen(os.dup(self._file), "rb") as lines, suppress(ValueError):
            for line in lines:
                if not line.endswith(b"\n"):
                    break
                custom_id = json.loads(line)["custom_id"]
                self._add(custom_id, line)
                num_whole += len(line)
        os.ftruncate(self._file, num_whole)

    def append(self, custom_id: str, line: bytes) -> None:
        """UserError or OSError where there is no room: then nothing of it is there, or counted."""
        self._store.take(len(line))
        size = os.fstat(self._file).st_size
        try:
            if os.write(self._file, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            self._store.take(-len(line))
            os.ftruncate(self._file, size)
            raise
        self._add(custom_id, line)

    def _add(self, custom_id: str, line: bytes) -> None:
        self.custom_ids.add(custom_id)
        self.num_unsent += is_unsent(line)

    def close(self) -> None:
        os.close(self._file)


def tenants_in(root: Path) -> Iterator[str]:
    """Those that have a directory there."""
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        if (path / "batches").is_dir():
            yield "" if path.name == "all" else path.name


def _write(path: Path, data: bytes) -> None:
    """All of it or nothing: half a file would hold what room there is on a full disk."""
    new = path.with_name(f"{path.name}.new")
    file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(file, "wb") as out:
            out.write(data)
        new.rename(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise


def _no_room(what: str, error: OSError) -> CapacityError:
    return CapacityError(f"the {what} can't be kept: {error.strerror}", retry_after_s=60.0)


def _read(path: Path) -> Record | None:
    try:
        record = json.loads(path.read_bytes())
        return record if record["id"] == path.stem and "created_at" in record else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
