"""Rows of one peer, shape and dtype, over sides that stay up between rows."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from bench.peers.driver import Load
from bench.peers.install import InstallError
from bench.peers.pairs import Pace, measure_pairs
from bench.peers.peer import GGUF_DTYPES, GGUF_FILE, Peer
from bench.peers.process import SideError
from bench.peers.row import Row, resume
from bench.peers.side import Side
from bench.peers.work import WORKS, Work
from lmi_core.bench.roofs import Roofs

MIN_NUM_SEQS = 32


class Ours(Protocol):
    """Makes our sides."""

    def engine_side(self, load: Load) -> Side: ...
    def server_side(self, load: Load, *, asks_completions: bool) -> Side: ...


@dataclass(frozen=True, slots=True)
class Session:
    """What all rows of a run share."""

    ours: Ours
    checkpoint: Callable[[str], Path]
    """A shape's checkpoint, made if needed."""
    probe: Callable[[], Roofs]
    results: Path
    commit: str
    machine: dict[str, Any]
    num_threads: int
    pace: Pace
    say: Callable[[str], None] = print

    def run(self, peer: Peer, shape: str, dtype: str, whats: Sequence[str]) -> list[Row]:
        """The rows, as far as time allowed; those that are on file and done aren't run again."""
        rows = [resume(self._row(peer, shape, dtype, what), self.results) for what in whats]
        open_rows = [row for row in rows if not row.is_done]
        for key in dict.fromkeys(_sides_of(WORKS[row.what]) for row in open_rows):
            group = [row for row in open_rows if _sides_of(WORKS[row.what]) == key]
            if group and time.monotonic() < self.pace.deadline:
                self._run_group(peer, group)
        return rows

    def _row(self, peer: Peer, shape: str, dtype: str, what: str) -> Row:
        return Row(
            peer=peer.name,
            peer_version=peer.version,
            peer_format=peer.formats[dtype],
            shape=shape,
            dtype=dtype,
            what=what,
            commit=self.commit,
            machine=self.machine,
        )

    def _run_group(self, peer: Peer, rows: list[Row]) -> None:
        """Rows that the same sides measure."""
        try:
            with self._sides(peer, rows) as (ours, theirs):
                for row in rows:
                    row.ours_about, row.theirs_about = ours.about, theirs.about
                    measure_pairs(row, ours, theirs, self.probe, self._save, self.pace)
        except (SideError, InstallError) as error:
            for row in rows:
                row.error = str(error)
                self._save(row)
        for row in rows:
            self.say(progress_line(row))

    def _save(self, row: Row) -> None:
        row.save(self.results)

    @contextlib.contextmanager
    def _sides(self, peer: Peer, rows: list[Row]) -> Iterator[tuple[Side, Side]]:
        shape, dtype = rows[0].shape, rows[0].dtype
        serves, num_seqs, asks_completions, caches = _sides_of(WORKS[rows[0].what])
        checkpoint = self.checkpoint(shape)
        model = peer.model(checkpoint, shape, dtype)
        our_model = model / GGUF_FILE if dtype in GGUF_DTYPES else checkpoint.absolute()
        our_load = Load(our_model, dtype, self.num_threads, num_seqs, caches)
        their_load = Load(model, dtype, self.num_threads, num_seqs, caches)
        if serves:
            ours = self.ours.server_side(our_load, asks_completions=asks_completions)
        else:
            ours = self.ours.engine_side(our_load)
        theirs = peer.server_side(their_load) if serves else None
        if caches and theirs is None:
            raise SideError(f"{peer.name} has no server whose prefix cache could be measured")
        theirs = theirs or peer.engine_side(their_load)
        with contextlib.ExitStack() as stack:
            for side in (ours, theirs):
                stack.callback(side.stop)
                side.start()
            yield ours, theirs


def _sides_of(work: Work) -> tuple[bool, int, bool, bool]:
    """What distinguishes the sides that can do the work: whether they are servers, how many
    sequences they take at once, how ours is asked, and whether they cache prefixes."""
    caches_prefixes = work.num_shared > 0
    num_seqs = work.num_requests if caches_prefixes else max(MIN_NUM_SEQS, work.num_requests)
    return work.kind == "serve", num_seqs, work.asks_completions, caches_prefixes


def progress_line(row: Row) -> str:
    if row.error:
        return f"{row.name}: {len(row.pairs)} pairs, then: {row.error}"
    ratio = f", ratio {row.ratio.median:.2f}" if row.pairs else ""
    return f"{row.name}: {len(row.pairs)} pairs{ratio}"
