"""One model's packed matrices: found in the repack cache, or packed anew and put there.

Matrices in bf16 that stay so are packed behind: the engine starts on the rows of the checkpoint,
whose pages the machine has, and multiplies with these until the memory of packed ones is written.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from lmi_core import _native
from lmi_core.files import repack_directory
from lmi_core.weights.content_digest import FileState, Interrupted
from lmi_core.weights.packed_file import MatrixLayout, PackedFile
from lmi_core.weights.quantized.methods import fp4_format, is_in_fp8
from lmi_core.weights.repack_cache import RepackCache

if TYPE_CHECKING:
    from lmi_core.settings.engine_config import EngineConfig
    from lmi_core.weights.checkpoint import Checkpoint
    from lmi_core.weights.hf_config import QuantizationSettings

log = logging.getLogger(__name__)


class PackedModel:
    """Asked for each matrix while a model is loaded; keeps them until they are packed and written.

    ``cache``: None: they aren't kept. ``sources`` are the checkpoint's files as they
    were before anything was read, ``formats`` says which matrices become what, ``node`` in which
    NUMA node they are read.
    """

    def __init__(
        self,
        cache: RepackCache | None,
        sources: Sequence[FileState],
        *,
        formats: str,
        instruction_set: str,
        num_threads: int,
        node: int = 0,
    ) -> None:
        self._cache, self._node = cache, node
        self._sources = sources
        self._num_threads = num_threads
        self._layout = _layout_name(sources, formats, instruction_set)
        self._matrices: dict[str, _native.LinearWeight] = {}
        self._num_packed = 0
        self._thread: threading.Thread | None = None
        self._is_stopping = threading.Event()
        self._file = self._find_file()
        self.is_stored = self._file is not None
        """Whether there is a file of these weights, which processes share."""

    def find(self, label: str, layout: MatrixLayout) -> _native.LinearWeight | None:
        """A matrix as it was packed before; None if it must be packed (and then ``add``-ed)."""
        if self._file is None:
            return None
        try:
            weight = self._file.read(label, layout, self._num_threads)
        except _native.NativeError as error:
            log.warning("a matrix is packed again, and its file written anew: %s", error)
            return None
        if weight is not None:
            self._matrices[label] = weight
        return weight

    def add(self, label: str, weight: _native.LinearWeight) -> None:
        """Keep a matrix that was packed anew."""
        self._matrices[label] = weight
        self._num_packed += 1

    def save(self) -> None:
        """Pack what is left of what had to be, and write it all, in a thread."""
        if self._num_packed == 0:
            self._matrices.clear()
            return
        self._thread = threading.Thread(target=self._finish, name="repack-cache", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop packing and writing; a file that isn't complete is removed."""
        self._is_stopping.set()
        if self._thread is not None:
            self._thread.join()

    def wait(self) -> None:
        """Wait until everything is packed and written."""
        if self._thread is not None:
            self._thread.join()

    def _find_file(self) -> PackedFile | None:
        cache = self._cache
        if cache is None or not cache.may_hold(self._layout):
            return None
        try:
            return cache.find(self._name(cache, self._num_threads), self._node)
        except OSError as error:
            log.debug("no packed weights are looked for: %s", error)
            return None

    def _name(self, cache: RepackCache, num_threads: int) -> str:
        digests = [
            cache.digests.of(source, num_threads, self._is_stopping.is_set)
            for source in self._sources
        ]
        content = hashlib.sha256("".join(digests).encode()).hexdigest()[:32]
        return f"{self._layout}-{content}"

    def _finish(self) -> None:
        try:
            self._pack_rest()
            if self._cache is not None and not self._is_stopping.is_set():
                self._write(self._cache)
        except Interrupted:
            pass
        except OSError as error:
            log.debug("packed weights aren't kept: %s", error)
        finally:
            self._matrices.clear()

    def _pack_rest(self) -> None:
        """On half of the threads: steps that are under way have the others to themselves."""
        start, rest = time.monotonic(), [w for w in self._matrices.values() if not w.is_packed]
        for weight in rest:
            is_done = False
            while not is_done:
                if self._is_stopping.is_set():
                    return
                is_done = weight.pack_piece(max(1, self._num_threads // 2))
        if not rest:
            return
        log.info("%d matrices were packed behind in %.1f s", len(rest), time.monotonic() - start)
        if not all(source.is_current() for source in self._sources):
            log.warning("the checkpoint changed before its weights were packed: load it again")

    def _write(self, cache: RepackCache) -> None:
        """With the lowest priority."""
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)  # no other thread has it
        name = self._name(cache, 1)
        if all(source.is_current() for source in self._sources):
            cache.write(name, self._matrices, self._is_stopping.is_set)


def _layout_name(sources: Iterable[FileState], formats: str, instruction_set: str) -> str:
    """What can be said of a model's packed weights without reading the checkpoint."""
    text = repr(
        (
            [source.num_bytes for source in sources],
            formats,
            instruction_set,
            _native.LinearWeight.layout_version,
            "finite",  # matrices were seen to be when they were packed; older files aren't believed
        )
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _formats(config: EngineConfig, settings: QuantizationSettings | None) -> str:
    """What matrices become, and of a checkpoint in integers how its tensors are to be read."""
    if settings is None or is_in_fp8(settings) or fp4_format(settings):
        text = f"{config.dtype} {config.quantize}"
        if config.quantize == "smoothquant":
            text += smoothing_settings(config)
        # Files of before took as many scales of blocks as there are outputs for theirs.
        return text if settings is None or not is_in_fp8(settings) else f"{text} scales by shape"
    # Rows that aren't rounded meet no int4 with inputs in another order.
    orders = " activations bf16" if config.activations == "bf16" else ""
    return f"{config.dtype} {json.dumps(settings.values, sort_keys=True)}{orders}"


def smoothing_settings(config: EngineConfig) -> str:
    """What SmoothQuant's calibration depends on besides the checkpoint. Raises OSError."""
    path = config.calibration_file
    text = "" if path is None else hashlib.sha256(path.read_bytes()).hexdigest()
    return f" {config.smoothquant_alpha} {text}"


def _slices(config: EngineConfig, rank: int) -> str:
    degree = config.tensor_parallel_degree
    if degree == 1 and not config.tp_invariant:
        return ""
    return f" rank {rank} of {degree}{' invariant' if config.tp_invariant else ''}"


def open_packed_model(
    config: EngineConfig, checkpoint: Checkpoint, num_threads: int, *, rank: int = 0
) -> PackedModel:
    """The place of a model, or of one of its ranks, in the repack cache, if there is one: of models
    that aren't smaller than ``MIN_CHECKPOINT_BYTES``."""
    directory = repack_directory(config.repack_cache_dir)
    return PackedModel(
        None if directory is None else RepackCache(directory, config.repack_cache_bytes),
        checkpoint.files,
        formats=_formats(config, checkpoint.quantization) + _slices(config, rank),
        instruction_set=config.instruction_set or _native.default_instruction_set(),
        num_threads=num_threads,
        node=config.weight_nodes[rank] if config.weight_nodes else 0,
    )
