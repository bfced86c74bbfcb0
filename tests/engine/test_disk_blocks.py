"""The blocks of a disk cache: what is written, by whom, and what goes first."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest

from lmi_core._native import BlockPool, KvCache
from lmi_core.engine import disk_blocks
from lmi_core.engine.disk_blocks import DiskBlocks
from lmi_core.engine.restore import PrefixRestore
from tests.engine.numbered_blocks import NumberedBlocks, blocks_in, numbers_in, opened, put

KILLED = """
import itertools, sys
from pathlib import Path
from tests.engine.numbered_blocks import opened, put

disk = opened(Path(sys.argv[1]), max_blocks=2, num_bytes=int(sys.argv[2]))
for number in itertools.count():
    put(disk, number)
    while disk._pending:
        disk._settle()
"""
KILLED_BYTES = 30_000_000


def kill_in_mid_write(directory: Path) -> bool:
    """Whether a file was left half done by a process that did nothing but write."""
    with subprocess.Popen([sys.executable, "-c", KILLED, directory, str(KILLED_BYTES)]) as process:
        while not any(0 < size < KILLED_BYTES for size in sizes_in(directory)):
            assert process.poll() is None
        process.send_signal(signal.SIGKILL)
    return any(size < KILLED_BYTES for size in sizes_in(directory))


def sizes_in(directory: Path) -> list[int]:
    sizes = []
    for path in blocks_in(directory):
        with suppress(FileNotFoundError):  # removed for the next one
            sizes.append(path.stat().st_size)
    return sizes


def test_a_kill_in_mid_write_leaves_whole_blocks_only() -> None:
    """In memory, where a file grows while it is written."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        directory = Path(name)
        assert any(kill_in_mid_write(directory) for _ in range(20))
        disk = opened(directory, 2, num_bytes=KILLED_BYTES)
        assert disk.is_writer
        assert all(size > KILLED_BYTES for size in sizes_in(directory))
        memory = NumberedBlocks(KILLED_BYTES)
        for path in blocks_in(directory):
            block_hash = bytes.fromhex(path.stem)
            number = int.from_bytes(block_hash, "little")
            assert disk.read([block_hash]) == [memory.content(number)]
        disk.close()


def test_what_a_writer_left_half_done_is_removed_by_the_next(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    put(disk, 1, 2)
    disk.close()
    os.truncate(blocks_in(tmp_path)[0], 512)
    disk = opened(tmp_path)
    assert numbers_in(disk) == [2]
    disk.close()
    assert len(blocks_in(tmp_path)) == 1


@pytest.mark.parametrize("num_bytes", [512, 4096])
def test_a_file_that_another_process_is_writing_is_not_read_and_stays(
    tmp_path: Path, num_bytes: int
) -> None:
    writer = opened(tmp_path)
    put(writer, 1)
    while numbers_in(writer) != [1]:
        time.sleep(0.001)
    [path] = blocks_in(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[:512] + bytes(num_bytes - 512))
    reader = opened(tmp_path)
    assert numbers_in(reader) == ([1] if num_bytes == len(whole) else [])
    assert reader.read([(1).to_bytes(16, "little")]) == []
    path.write_bytes(whole)
    assert reader.read([(1).to_bytes(16, "little")]) == [b"\1" * 1000]
    reader.close()
    writer.close()


@pytest.mark.parametrize("is_whole", [True, False])
def test_what_other_models_left_gives_way(tmp_path: Path, is_whole: bool) -> None:
    """Also the halves of files that nobody who knows their size looks at again."""
    old = opened(tmp_path)
    put(old, *range(10))
    old.close()
    for path in blocks_in(tmp_path):
        os.truncate(path, 4096 if is_whole else 4000)
    disk = opened(tmp_path, model="new")
    put(disk, *range(100, 104))
    disk.close()
    assert numbers_in(disk) == [100, 101, 102, 103]
    assert len(blocks_in(tmp_path)) == 10
    disk = opened(tmp_path, model="new")
    put(disk, *range(104, 114))
    disk.close()
    assert numbers_in(disk) == list(range(104, 114))
    assert len(blocks_in(tmp_path)) == 10


def test_where_files_cannot_be_written_past_the_page_cache_they_are_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A file system in memory, which refused O_DIRECT before Linux 6.6."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        disk = opened(Path(directory))
        put(disk, 1)
        disk.close()
        assert disk.read([(1).to_bytes(16, "little")]) == [b"\1" * 1000]


def test_the_least_recently_used_go_first_also_of_other_models(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    put(disk, *range(5))
    disk.close()
    other = opened(tmp_path, model="other")
    put(other, *range(100, 105))
    other.close()
    disk = opened(tmp_path)
    assert len(disk.read([bytes(16)])) == 1
    put(disk, 5, 6)
    disk.close()
    assert numbers_in(disk) == [0, 3, 4, 5, 6]
    used_s = {**dict.fromkeys(range(100, 105), 2.0), 3: 1.0, 4: 1.0, 0: 3.0, 5: 3.0, 6: 3.0}
    for path in blocks_in(tmp_path):
        os.utime(path, (1.0, used_s[bytes.fromhex(path.stem)[0]]))
    small = opened(tmp_path, max_blocks=4)
    assert numbers_in(small) == [0, 5, 6]
    small.close()
    assert len(blocks_in(tmp_path)) == 4


def test_one_process_writes_and_others_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = opened(tmp_path)
    put(first, 1)
    second = opened(tmp_path)
    assert not second.is_writer
    assert "another process writes" in caplog.text
    put(second, 2)
    second.close()
    first.close()
    third = opened(tmp_path)
    assert third.is_writer
    assert numbers_in(third) == [1]
    third.close()


@pytest.mark.parametrize("whole", [True, False])
def test_a_directory_that_is_removed_under_its_writer_is_made_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, whole: bool
) -> None:
    disk = opened(tmp_path / "kept")
    put(disk, 1)
    while numbers_in(disk) != [1]:
        time.sleep(0.001)
    shutil.rmtree(tmp_path / "kept" if whole else next((tmp_path / "kept").glob("*/")))
    put(disk, 2)  # which is lost
    while "was removed; it is made again, empty" not in caplog.text or disk._maker:
        assert numbers_in(disk) in ([1], [])
        time.sleep(0.001)
    put(disk, 3)
    disk.close()
    assert caplog.text.count("was removed; it is made again, empty") == 1
    again = opened(tmp_path / "kept")
    assert numbers_in(again) == [3]
    again.close()


def test_a_directory_that_another_process_made_anew_is_left_to_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = opened(tmp_path / "kept")
    shutil.rmtree(tmp_path / "kept")
    other = opened(tmp_path / "kept")
    put(disk, 1, 2)
    while "made anew by another process" not in caplog.text:
        assert numbers_in(disk) == []
        time.sleep(0.001)
    put(disk, 3)
    disk.close()
    assert caplog.text.count("made anew by another process") == 1
    put(other, 3)
    other.close()
    assert numbers_in(other) == [3]


def test_a_full_disk_costs_the_cache_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = opened(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, hard))  # no file has room for a block
    try:
        put(disk, 1, 2)
        while disk._pending:
            disk._settle()
            time.sleep(0.001)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert blocks_in(tmp_path) == []
    assert caplog.text.count("No space left on device") == 1
    put(disk, 3)
    disk.close()
    assert numbers_in(disk) == [3]


def test_what_the_disk_is_too_slow_for_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_blocks, "_MAX_PENDING_BYTES", 3000)
    disk = opened(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(disk, "_settle", lambda: None)  # nothing is known to be written
        put(disk, *range(8))
    disk.close()
    disk = opened(tmp_path)
    assert numbers_in(disk) == [0, 1, 2]
    disk.close()


def test_what_was_evicted_before_its_turn_is_not_kept(tmp_path: Path) -> None:
    cache = KvCache(
        num_layers=2, num_blocks=3, block_size=16, num_kv_heads=1, head_dim=2, dtype="fp32"
    )
    num_bytes = cache.bytes_per_block
    pool = BlockPool(3, 16, bytes(16))
    disk = DiskBlocks(tmp_path, "m", pool, cache, max_bytes=1 << 20)
    restore = PrefixRestore(pool, cache, disk)
    hashes = pool.hash_blocks(range(48))
    block_ids = pool.allocate(3)
    assert block_ids is not None
    for block_id, block_hash in zip(block_ids, hashes, strict=True):
        cache.copy_in(block_id, bytes([block_id]) * num_bytes)
        pool.publish(block_id, block_hash)
        restore.published.append(block_hash)
    pool.free(block_ids)
    assert pool.allocate(1) == [2]  # of one prefix the end goes first
    cache.copy_in(2, bytes(num_bytes))
    restore.keep_published()
    disk.close()
    assert disk.read(hashes) == [bytes([block_id]) * num_bytes for block_id in (0, 1)]
    assert restore.published == []
