"""Files and batches in their directory: what a process leaves that ends, and no room."""

from __future__ import annotations

import errno
import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest

from lmi_core.errors import CapacityError, UserError
from lmi_server.batches.lines import check
from lmi_server.batches.store import Answers, BatchStore
from tests.server.batches.test_batches import CHAT, line, whole_lines

WRITE = os.write


def test_a_killed_process_may_have_begun_to_keep_the_answers(tmp_path: Path) -> None:
    store = BatchStore(tmp_path, "", 1000)
    file_id = f"file-{'2' * 32}"
    fields = {"status": "finalizing", "output_id": file_id, "errors_id": f"file-{'3' * 32}"}
    batch_id = store.add_batch({**fields, "endpoint": CHAT})["id"]
    given = Answers(store, batch_id, "output")
    given.append("a", b'{"custom_id": "a"}\n')
    given.close()
    store.answers_path(batch_id, "output").rename(store.data_path(file_id))
    again = BatchStore(tmp_path, "", 1000)
    for _ in range(2):
        assert again.keep_answers(batch_id, "output", file_id)
    assert not again.keep_answers(batch_id, "errors", f"file-{'3' * 32}")
    assert [file["id"] for file in again.listed("files")] == [file_id]
    again.save_batch({**again.get("batches", batch_id), "status": "completed"})
    orphan = store.data_path(f"file-{'4' * 32}")
    orphan.write_bytes(b"x" * 2000)
    again = BatchStore(tmp_path, "", 1000)
    assert not orphan.exists()
    assert again.data_path(file_id).exists()
    with pytest.raises(UserError, match="there is room for"):
        again.take(1000)


def test_what_fails_isnt_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = BatchStore(tmp_path, "", 100)
    with monkeypatch.context() as full:
        full.setattr(store, "_describe", _no_room)
        with pytest.raises(CapacityError, match="the file can't be kept: No space"):
            store.add_file("a", "batch", b"x" * 100)
    assert not [*(tmp_path / "all" / "files").iterdir()]
    given = Answers(store, f"batch_{'1' * 32}", "output")
    given.append("a", b'{"custom_id": "a"}\n')
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda file, data: WRITE(file, data[:5]))
        with pytest.raises(OSError, match="No space"):
            given.append("b", b'{"custom_id": "b"}\n')
    given.append("c", b'{"custom_id": "c"}\n')
    given.close()
    [path] = tmp_path.rglob("*.output")
    assert [json.loads(each)["custom_id"] for each in whole_lines(path)] == ["a", "c"]
    store.take(100 - path.stat().st_size)


def _no_room(*arguments: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_half_a_file_doesnt_stay(tmp_path: Path) -> None:
    """What was written of it would keep a full disk full."""
    store = BatchStore(tmp_path, "", 1000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, hard))  # a write beyond it fails in the middle
    try:
        with pytest.raises(CapacityError, match="the file can't be kept"):
            store.add_file("a", "batch", b"x" * 100)
        with pytest.raises(CapacityError, match="the batch can't be kept"):
            store.add_batch({"status": "validating", "endpoint": CHAT})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not store.listed("batches")
    store.take(1000)


def test_the_oldest_batch_gives_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmi_server.batches.store._MAX_FILES", 2)
    store = BatchStore(tmp_path, "", 1000)
    first = store.add_batch({"status": "in_progress", "endpoint": CHAT})
    store.add_batch({"status": "completed", "endpoint": CHAT})
    third = store.add_batch({"status": "in_progress", "endpoint": CHAT})
    assert store.listed("batches") == [third, first]
    with pytest.raises(CapacityError, match="there are 2 batches"):
        store.add_batch({"status": "in_progress", "endpoint": CHAT})


def test_long_and_many_lines(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_text("x" * (5 << 20))
    assert [each["code"] for each in check(path, CHAT)[1]] == ["line_too_long"]
    path.write_text("\n".join(line(i) for i in range(50_001)))
    assert [each["code"] for each in check(path, CHAT)[1]] == ["too_many_tasks"]
