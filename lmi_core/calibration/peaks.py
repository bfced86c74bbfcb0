"""What SmoothQuant needs to know of a model: the largest magnitudes that its linears read.

They are kept beside the packed weights, in a file named by the digests of checkpoint and text.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np

from lmi_core import _native
from lmi_core.calibration.layer_runs import LayerRuns
from lmi_core.files import repack_directory
from lmi_core.models.found_model import FoundModel
from lmi_core.models.smoothing import LinearPeaks, Smoothing
from lmi_core.models.spec import DecoderSpec, LayerLinear, layer_linears
from lmi_core.models.tensor_reader import Progress, TensorReader
from lmi_core.settings.engine_config import EngineConfig
from lmi_core.text.calibration_text import read_text, sequences_of
from lmi_core.text.tokenizer import Tokenizer
from lmi_core.weights.content_digest import ContentDigests
from lmi_core.weights.formats import FloatArray
from lmi_core.weights.matrix import as_floats

_log = logging.getLogger(__name__)
_MAX_SEQUENCES = 16
"""Of 512 tokens: peaks of channels hardly change beyond."""
_MOST_FILES = 64
_VERSION = 1
"""Counted up when the same checkpoint and text give other peaks."""
_DIGEST_BYTES = hashlib.sha256().digest_size


def smoothing_for(
    found: FoundModel, progress: Callable[[str, int, int], None] | None = None
) -> Smoothing | None:
    """What SmoothQuant does to the model that was found, by a calibration that is made now or was
    made before; None: it isn't asked for.

    Raises ModelError and UserError as reading the model and the text does.
    """
    if found.quantize != "smoothquant":
        return None
    text = read_text(found.asked.calibration_file)
    path = _path(found.asked, found, text)
    layers = None if path is None else _read(path, found.spec)
    if layers is None:
        on_bytes = None if progress is None else partial(progress, "calibration")
        layers = tuple(measured_peaks(found.asked, found, text, on_bytes))
        if path is not None:
            _write(path, layers)
    return Smoothing(layers, found.asked.smoothquant_alpha)


def measured_peaks(
    config: EngineConfig, found: FoundModel, text: str, progress: Progress | None = None
) -> Iterator[LinearPeaks]:
    """Of each layer, in fp32 on the CPU, whatever device the model is served on."""
    tokenizer = Tokenizer.load(config.model, vocab_size=found.spec.vocab_size)
    runs = LayerRuns(
        found,
        instruction_set=config.instruction_set,
        num_threads=config.num_threads or 0,
        progress=progress,
    )
    try:
        pieces = sequences_of(
            text, tokenizer, num_tokens=runs.max_tokens, max_sequences=_MAX_SEQUENCES
        )
        streams = runs.embedded(pieces)
        for layer_id in range(found.spec.num_layers):
            inputs: dict[LayerLinear, FloatArray] = {}

            def observe(
                linear: LayerLinear,
                rows: FloatArray,
                inputs: dict[LayerLinear, FloatArray] = inputs,
            ) -> None:
                most = np.abs(rows).max(axis=0)
                inputs[linear] = np.maximum(inputs.get(linear, most), most)

            weights = runs.load(layer_id)
            streams = runs.run(layer_id, weights, streams, observe)
            columns = column_peaks(runs.reader, found.spec, layer_id)
            yield {
                linear: np.stack([inputs[linear], peaks])
                for linear, peaks in columns.items()
                if linear in inputs
            }
    finally:
        runs.close()
        tokenizer.close()


def column_peaks(
    reader: TensorReader, spec: DecoderSpec, layer_id: int
) -> dict[LayerLinear, FloatArray]:
    """The largest magnitude of the weights that each input of a linear meets: [inputs]."""
    prefix = spec.names.layer.format(layer=layer_id)
    peaks: dict[LayerLinear, FloatArray] = {}
    for linear, source in layer_linears(spec, layer_id).items():
        names = (f"{prefix}{name}.weight" for name, _ in source.modules)
        parts = as_floats([reader.matrix(name) for name in names])
        axis = 1 if spec.names.transposed else 0
        peaks[linear] = np.maximum.reduce([np.abs(part).max(axis=axis) for part in parts])
    return peaks


def _path(config: EngineConfig, found: FoundModel, text: str) -> Path | None:
    """Where the peaks are kept; None: nowhere."""
    directory = repack_directory(config.repack_cache_dir)
    if directory is None:
        return None
    digests = ContentDigests(directory / "sources")
    try:
        content = [
            digests.of(file, _native.num_physical_cores()) for file in found.checkpoint.files
        ]
    except OSError as error:
        _log.debug("no calibration is looked for: %s", error)
        return None
    level = config.instruction_set or _native.default_instruction_set()
    made_of = repr((_VERSION, content, text, level, found.spec))
    name = hashlib.sha256(made_of.encode()).hexdigest()[:32]
    return directory / "calibrated" / f"{name}.npz"


def _read(path: Path, spec: DecoderSpec) -> tuple[LinearPeaks, ...] | None:
    """None where there is no such file, or a damaged one, which is measured again."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, packed = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    if hashlib.sha256(packed).digest() != digest:
        _log.warning("%s is damaged: the model is calibrated again", path)
        return None
    with suppress(OSError):
        os.utime(path)
    layers: list[dict[LayerLinear, FloatArray]] = [{} for _ in range(spec.num_layers)]
    with np.load(io.BytesIO(packed), allow_pickle=False) as arrays:
        for name in arrays.files:
            layer_id, linear = name.split(".")
            layers[int(layer_id)][LayerLinear(int(linear))] = arrays[name]
    return tuple(layers)


def _write(path: Path, layers: Iterable[LinearPeaks]) -> None:
    packed = io.BytesIO()
    arrays = {
        f"{layer_id}.{int(linear)}": peaks
        for layer_id, layer in enumerate(layers)
        for linear, peaks in layer.items()
    }
    np.savez(packed, **arrays)  # type: ignore[arg-type]
    content = packed.getvalue()
    partial_path = path.with_suffix(f".{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        partial_path.write_bytes(hashlib.sha256(content).digest() + content)
        partial_path.rename(path)
        files = sorted(path.parent.glob("*.npz"), key=lambda file: file.stat().st_mtime_ns)
        for old in files[:-_MOST_FILES]:
            old.unlink(missing_ok=True)
    except OSError as error:
        _log.debug("the calibration isn't kept: %s", error)
