"""Blocks of a disk cache whose bytes are known from their numbers, without a model."""

from __future__ import annotations

from pathlib import Path

from lmi_core._native import BlockPool, BlockWriter
from lmi_core.engine.disk_blocks import DiskBlocks


class NumberedBlocks:
    """Implements ``BlockMemory``: each byte of a block is its id."""

    def __init__(self, num_bytes: int) -> None:
        self.bytes_per_block = num_bytes

    def content(self, block_id: int) -> bytes:
        return bytes([block_id % 256]) * self.bytes_per_block

    def write_out(self, writer: BlockWriter, name: str, block_id: int) -> None:
        writer.write(name, self.content(block_id))

    def copy_in(self, block_id: int, content: bytearray) -> None:
        raise NotImplementedError


def opened(
    directory: Path, max_blocks: int = 10, model: str = "m", num_bytes: int = 1000
) -> DiskBlocks:
    memory, pool = NumberedBlocks(num_bytes), BlockPool(1, 16, bytes(16))
    max_bytes = max_blocks * (num_bytes // 4096 + 1) * 4096
    return DiskBlocks(directory, model, pool, memory, max_bytes=max_bytes)


def put(disk: DiskBlocks, *numbers: int) -> None:
    for number in numbers:
        disk.keep(number.to_bytes(16, "little"), number)


def numbers_in(disk: DiskBlocks) -> list[int]:
    return [number for number in range(256) if disk.has(number.to_bytes(16, "little"))]


def blocks_in(directory: Path) -> list[Path]:
    return sorted(directory.glob("*/*.kv"))
