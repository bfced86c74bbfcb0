"""The blocks of a disk cache: what is written, by whom, and what goes first."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from lmi_core._native import BlockPool, KvCache
from lmi_core.engine import disk_blocks
from lmi_core.engine.disk_blocks import DiskBlocks
from lmi_core.engine.restore import PrefixRestore
from tests.engine.test_disk_cache import blocks_in

KILLED = """
import os, sys
from pathlib import Path
from lmi_core.engine import disk_blocks

write, count = os.writev, 0
def slow(descriptor, parts):
    global count
    count += 1
    if count == 15:  # half of a block is there
        write(descriptor, [parts[0], parts[1][:5000]])
        print("now", flush=True)
        sys.stdin.read()
    return write(descriptor, parts)

def filled(number, target):
    target[:] = bytes([number]) * len(target)

disk = disk_blocks.DiskBlocks(Path(sys.argv[1]), "m", block_bytes=10_000, max_bytes=1 << 20)
disk_blocks.os.writev = slow
for number in range(40):
    disk.keep(bytes([number]) * 16, lambda target: filled(number, target))
disk.close()
"""


def test_a_kill_in_mid_write_leaves_whole_blocks_only(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "now\n"
        process.send_signal(signal.SIGKILL)
    assert list(tmp_path.glob("*/*.partial"))
    disk = DiskBlocks(tmp_path, "m", block_bytes=10_000, max_bytes=1 << 20)
    hashes = [bytes([number]) * 16 for number in range(40)]
    contents = disk.read(hashes)
    assert contents == [bytes([number]) * 10_000 for number in range(14)]
    assert disk.is_writer
    disk.close()
    assert not list(tmp_path.glob("*/*.partial"))


def put(disk: DiskBlocks, *numbers: int) -> None:
    def fill(target: bytearray, number: int) -> None:
        target[:] = bytes([number]) * len(target)

    for number in numbers:
        disk.keep(bytes([number]) * 16, partial(fill, number=number))


def numbers_in(disk: DiskBlocks) -> list[int]:
    return [number for number in range(256) if disk.has(bytes([number]) * 16)]


def opened(directory: Path, max_bytes: int = 10_500, model: str = "m") -> DiskBlocks:
    return DiskBlocks(directory, model, block_bytes=1000, max_bytes=max_bytes)


def test_the_least_recently_used_go_first_also_of_other_models(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    put(disk, *range(5))
    disk.close()
    other = opened(tmp_path, model="other")
    put(other, *range(100, 105))
    other.close()
    disk = opened(tmp_path)
    assert len(disk.read([bytes([0]) * 16])) == 1
    put(disk, 5, 6)
    disk.close()
    assert numbers_in(disk) == [0, 3, 4, 5, 6]
    used_s = {**dict.fromkeys(range(100, 105), 2.0), 3: 1.0, 4: 1.0, 0: 3.0, 5: 3.0, 6: 3.0}
    for path in blocks_in(tmp_path):
        os.utime(path, (1.0, used_s[bytes.fromhex(path.stem)[0]]))
    small = opened(tmp_path, max_bytes=4 * 1032)
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
    put(disk, 2, 3)
    disk.close()
    assert caplog.text.count("was removed; it is made again, empty") == 1
    again = opened(tmp_path / "kept")
    assert numbers_in(again) == [2, 3]
    again.close()


def test_a_directory_that_another_process_made_anew_is_left_to_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = opened(tmp_path / "kept")
    shutil.rmtree(tmp_path / "kept")
    other = opened(tmp_path / "kept")
    put(disk, 1, 2)
    disk.close()
    assert caplog.text.count("made anew by another process") == 1
    put(other, 3)
    other.close()
    assert numbers_in(other) == [3]


def test_what_the_disk_is_too_slow_for_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_blocks, "_MAX_PENDING_BYTES", 3000)
    goes_on = threading.Event()
    monkeypatch.setattr(DiskBlocks, "_make_room", lambda self: goes_on.wait())
    disk = opened(tmp_path)
    put(disk, *range(8))
    goes_on.set()
    disk.close()
    assert numbers_in(disk) == [0, 1, 2]


def test_a_copy_without_memory_costs_only_its_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_memory(self: DiskBlocks) -> bytearray:
        raise MemoryError

    disk = opened(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(DiskBlocks, "_memory", no_memory)
        put(disk, 0, 1)
    put(disk, 2)
    disk.close()
    assert numbers_in(disk) == [2]
    assert caplog.text.count("no memory is left to copy blocks for the disk") == 1


def test_what_was_evicted_before_its_turn_is_not_kept(tmp_path: Path) -> None:
    cache = KvCache(
        num_layers=2, num_blocks=3, block_size=16, num_kv_heads=1, head_dim=2, dtype="fp32"
    )
    num_bytes = cache.bytes_per_block
    pool = BlockPool(3, 16, bytes(16))
    disk = DiskBlocks(tmp_path, "m", block_bytes=num_bytes, max_bytes=1 << 20)
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
