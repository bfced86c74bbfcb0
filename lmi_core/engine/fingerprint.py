"""What decides the tokens of a request besides the request, as a short text."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from lmi_core import _native
from lmi_core.files import repack_directory
from lmi_core.runners.runner import RunnerInfo
from lmi_core.settings.engine_config import EngineConfig
from lmi_core.version import __version__
from lmi_core.weights.checkpoint import weight_files
from lmi_core.weights.content_digest import ContentDigests, Interrupted
from lmi_core.weights.packed_model import smoothing_settings
from lmi_core.weights.repack_cache import MIN_CHECKPOINT_BYTES

log = logging.getLogger(__name__)

PARTS = ("weights", "build", "instruction set", "formats")
"""What a fingerprint has a digest of each, in this order."""
_PART_CHARS = 10
_ROOMS = ("adapters", "calibration", "models", "ops", "runners", "weights")
"""Of the package: what they do decides numbers, too."""
_SETTINGS = (
    "config.json",
    "quantize_config.json",
    "quantization_config.json",
    "hf_quant_config.json",
)


def differing_parts(one: str, other: str) -> list[str]:
    """Names of what two fingerprints tell apart."""
    pairs = zip(PARTS, _parts(one), _parts(other), strict=True)
    return [name for name, a, b in pairs if a != b]


def _parts(fingerprint: str) -> list[str]:
    parts = fingerprint.removeprefix("fp_").split("_")
    return (parts + [""] * len(PARTS))[: len(PARTS)]


class FingerprintOf:
    """Reads a model's files for its fingerprint: at once where they are small, else beside the
    requests in a thread of the lowest priority, unless their digests are remembered."""

    def __init__(self, config: EngineConfig, info: RunnerInfo) -> None:
        self.text: str | None = None
        """None: it isn't known yet, or the files can't be read."""
        self._config = config
        self._info = info
        self._is_stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, *, waits: bool = False) -> None:
        """``waits``: until it is known, however large the files are."""
        with suppress(OSError):
            files = weight_files(self._config.model)
            if waits or sum(path.stat().st_size for path in files) < MIN_CHECKPOINT_BYTES:
                self._compute(files)
                return
            self._thread = threading.Thread(
                target=self._run, args=(files,), name="fingerprint", daemon=True
            )
            self._thread.start()

    def close(self) -> None:
        self._is_stopping.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, files: Sequence[Path]) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)  # no other thread has it
        with suppress(Interrupted):
            self._compute(files)

    def _compute(self, files: Sequence[Path]) -> None:
        config, info = self._config, self._info
        rest = (_build(), info.instruction_set, _formats(config, info))
        cache = repack_directory(config.repack_cache_dir)
        digests = ContentDigests(None if cache is None else cache / "sources")
        settings = [path for name in _SETTINGS if (path := config.model / name).is_file()]
        try:
            weights = digests.of_files([*files, *settings], self._is_stopping.is_set)
        except OSError as error:
            log.info("the model has no fingerprint: %s", error)
            return
        parts = [hashlib.sha256(part.encode()).hexdigest() for part in (weights, *rest)]
        self.text = "_".join(["fp", *(part[:_PART_CHARS] for part in parts)])


@cache
def _build() -> str:
    return f"{__version__} {build_digest(Path(_native.__file__), Path(__file__).parents[1])}"


def build_digest(extension: Path, package: Path) -> str:
    """Of the native code, and of the sources beside it that decide what it computes: between two
    versions either changes without the other. Raises OSError."""
    total = hashlib.sha256(extension.read_bytes())
    for room in _ROOMS:
        for path in sorted((package / room).rglob("*.py")):
            total.update(f"{path.relative_to(package)} ".encode() + path.read_bytes())
    return total.hexdigest()


def _formats(config: EngineConfig, info: RunnerInfo) -> str:
    """What the same weights can be computed in, and which of the settings change numbers."""
    return repr(
        (
            (info.dtype, info.quantize, config.activations, info.kv_dtype, info.block_size),
            (config.rope_scaling, config.rope_factor, config.rope_theta, info.max_model_len),
            (info.device, info.kernels, config.deterministic, config.task),
            smoothing_settings(config) if config.quantize == "smoothquant" else "",
            (config.tensor_parallel_degree, config.tp_invariant),
        )
    )
