"""Mutated checkpoints of quantised formats: read, or refused by one error that names the place.

``python -m tests.weights.checkpoint_fuzz --files 10000`` for ``make fuzz``: so many of each format,
of which every tenth is loaded if headers and settings don't refuse it. A process for each
processor, formats in turn, their files in memory where the system has such a directory.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from lmi_core.errors import ModelError
from lmi_core.models.found_model import find_model
from lmi_core.models.loader import load_weights
from lmi_core.ops.cpu import NativeWeights
from lmi_core.settings.engine_config import EngineConfig
from lmi_core.weights.gguf.directory import model_directory
from lmi_core.weights.gguf.file import read_gguf
from tests import integer_checkpoints
from tests.bitsandbytes_checkpoints import FORMS as BITSANDBYTES
from tests.bitsandbytes_checkpoints import make_bitsandbytes_checkpoint
from tests.checkpoints import cached_checkpoint, make_checkpoint
from tests.exl2_checkpoints import make_exl2_checkpoint
from tests.fp8_checkpoints import CONFIGS as FP8
from tests.fp8_checkpoints import make_fp8_checkpoint
from tests.gguf_files import BLOCKS, llama_metadata, llama_tensors, random_blocks, write_gguf
from tests.integer_checkpoints import make_integer_checkpoint
from tests.models.test_gguf_mixtures import converted, metadata
from tests.tiny_tokenizer import write_tokenizer
from tests.weights.test_fp4_checkpoints import FORMS as FP4
from tests.weights.test_fp4_checkpoints import make as make_fp4_checkpoint
from tests.weights.test_kernel_layouts import FORMS as KERNELS
from tests.weights.test_kernel_layouts import SHAPE

Make = Callable[[Path], object]
MEMORY = Path("/dev/shm")
"""On a disk most of the time goes into emptying and filling the same file."""
_OTHERS = {name: form for name, (form, _) in integer_checkpoints.OTHER_FORMS.items()}


def _made_beside(make: Callable[[Path], Path], path: Path) -> None:
    make(path.parent / "made").rename(path)


def _gpt_oss(path: Path) -> None:
    """Its experts in MXFP4."""
    source = cached_checkpoint("gpt_oss")
    tensors = load_file(source / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, num_inputs, num_outputs = tensors.pop(name).shape
        shape = num_experts, num_outputs, num_inputs // 32
        tensors[f"{name}_blocks"] = torch.zeros((*shape, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.full(shape, 122, dtype=torch.uint8)
    _write(path, source, tensors, {"quant_method": "mxfp4"})


def _fp8_experts(path: Path) -> None:
    """In common tensors, with a scale for each."""
    source = cached_checkpoint("granite_moe")
    tensors = load_file(source / "model.safetensors")
    for name in [name for name in tensors if name.endswith("put_linear.weight")]:
        tensors[f"{name}_scale"] = torch.ones(len(tensors[name]), 1, 1)
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    _write(path, source, tensors, {"quant_method": "fp8"})


def _fp8_transposed(path: Path) -> None:
    """GPT-2's matrices [inputs, outputs], with a scale for each output."""
    source = make_checkpoint(path.parent / "source", "gpt2", n_embd=128, n_inner=256)
    tensors = load_file(source / "model.safetensors")
    for name in [name for name in tensors if ".h." in name and tensors[name].ndim == 2]:
        tensors[f"{name}_scale"] = torch.ones(tensors[name].shape[1])
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    _write(path, source, tensors, {"quant_method": "fp8"})


def _write(path: Path, source: Path, tensors: dict[str, torch.Tensor], settings: object) -> None:
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    write_tokenizer(path)


def _gguf(path: Path, kind: str) -> None:
    """A Llama whose layers' matrices are in blocks of one type."""
    source = cached_checkpoint("llama2")
    if BLOCKS[kind][0] == 256:
        shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
        source = make_checkpoint(path.parent / "source", "llama2", **shape)
    tensors, rng = llama_tensors(source, "F32"), np.random.default_rng(0)
    for name, (_, shape, _) in tensors.items():
        if len(shape) == 2 and name.startswith("blk."):
            tensors[name] = kind, shape, random_blocks(kind, *shape, rng)
    path.mkdir()
    write_gguf(path / "model.gguf", llama_metadata(source), tensors)


def _gguf_mixture(path: Path, variant: str) -> None:
    tensors = {name: ("F32", values.shape, values) for name, values in converted(variant).items()}
    path.mkdir()
    write_gguf(path / "model.gguf", metadata(variant), tensors)


SOUND: dict[str, Make] = {
    **{
        name: partial(make_integer_checkpoint, form=form)
        for name, form in (integer_checkpoints.FORMS | _OTHERS).items()
    },
    **{
        f"kernels-{name}": partial(make_integer_checkpoint, form=form, **SHAPE)
        for name, form in KERNELS.items()
    },
    **{
        f"bitsandbytes-{form}": partial(make_bitsandbytes_checkpoint, form=form)
        for form in BITSANDBYTES
    },
    **{f"fp8-{form}": partial(make_fp8_checkpoint, form=form) for form in FP8},
    **{form: partial(_made_beside, partial(make_fp4_checkpoint, form=form)) for form in FP4},
    "exl2": partial(_made_beside, make_exl2_checkpoint),
    "gpt-oss": _gpt_oss,
    "fp8-experts": _fp8_experts,
    "fp8-transposed": _fp8_transposed,
    **{f"gguf-{kind}": partial(_gguf, kind=kind) for kind in BLOCKS},
    **{f"gguf-{name}": partial(_gguf_mixture, variant=name) for name in ("mixtral", "qwen2_moe")},
}
"""What makes a sound checkpoint of each format."""


def mutate_and_read(path: Path, count: int, seed: int, *, loads_every: int) -> int:
    """Change ``count`` copies of a checkpoint and read them; how many were refused.
    ``loads_every``: one of so many also loads its weights, none if 0."""
    rng = np.random.default_rng(seed)
    gguf = path / "model.gguf"
    weights, settings = path / "model.safetensors", path / "config.json"
    if gguf.exists():
        return _mutate_gguf(gguf, count, rng, loads_every)
    files = {file: file.read_bytes() for file in (weights, settings)}
    num_header_bytes = 8 + int.from_bytes(files[weights][:8], "little")
    num_refused = 0
    for trial in range(count):
        if trial % 5 == 0:
            changed, raw = settings, _other_settings(files[settings], rng)
        else:
            changed, raw = weights, _mutated(files[weights], num_header_bytes, rng)
        changed.write_bytes(raw)
        num_refused += _is_refused(path, loads=_is_turn(trial, loads_every))
        if changed == settings or trial % 5 == 4 or trial + 1 == count:
            changed.write_bytes(files[changed])
    return num_refused


def _mutate_gguf(path: Path, count: int, rng: np.random.Generator, loads_every: int) -> int:
    original = path.read_bytes()
    start = min(tensor.offset for tensor in read_gguf(path).tensors.values())
    num_refused = 0
    for trial in range(count):
        path.write_bytes(_mutated(original, start, rng, num_ends=3000))
        # Within a tick of the clock it would be the file of before, which is unfolded.
        os.utime(path, ns=(trial, trial))
        num_refused += _is_refused(path, loads=_is_turn(trial, loads_every))
    path.write_bytes(original)
    return num_refused


def _is_turn(trial: int, every: int) -> bool:
    # Spread, so that no kind of change is always left out.
    return every > 0 and (trial + trial // every) % every == 0


def _is_refused(path: Path, *, loads: bool) -> bool:
    message = ""
    try:
        _read(path, loads=loads)
    except ModelError as error:
        message = str(error)
    named = (str(path), "/lmi/gguf/model-", "model.layers", "blk.")
    assert not message or any(name in message for name in named), message
    return bool(message)


def _mutated(
    original: bytes, num_header_bytes: int, rng: np.random.Generator, num_ends: int = 0
) -> bytes:
    """Its header, of which ``num_ends`` bytes of either end are met more often, or anything; or cut
    off."""
    raw = bytearray(original)
    if rng.integers(0, 8) == 0:
        return bytes(raw[: int(rng.integers(0, len(raw)))])
    ranges = [(0, num_header_bytes)] * 3 + [(0, len(raw))]
    if num_ends:
        ranges[:2] = [(0, num_ends), (max(0, num_header_bytes - num_ends), num_header_bytes)]
    for _ in range(rng.integers(1, 4)):
        raw[int(rng.integers(*ranges[rng.integers(len(ranges))]))] = rng.integers(256)
    return bytes(raw)


def _other_settings(original: bytes, rng: np.random.Generator) -> bytes:
    """One of the quantisation's settings is another."""
    config = json.loads(original)
    values = config["quantization_config"]
    if isinstance(groups := values.get("config_groups"), dict) and rng.integers(0, 2):
        values = groups["group_0"].get("weights", values)
    others = (None, -1, 0, 1, 3, 64, 10**12, 0.5, "", "group", "4", [], {}, True, False)
    values[str(rng.choice([*values]))] = others[rng.integers(0, len(others))]
    return json.dumps(config).encode()


def _read(path: Path, *, loads: bool) -> None:
    found = find_model(EngineConfig(model=model_directory(path)))
    found.quantized.check()
    if loads:
        load_weights(found, NativeWeights())


def in_memory() -> tempfile.TemporaryDirectory[str]:
    """A directory there, where the system has one."""
    return tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None)


def _fuzz(name: str, count: int, seed: int, loads_every: int) -> str:
    logging.disable(logging.WARNING)
    with in_memory() as directory:
        os.environ["XDG_CACHE_HOME"] = directory
        path = Path(directory) / "model"
        SOUND[name](path)
        refused = mutate_and_read(path, count, seed, loads_every=loads_every)
    return f"{count} mutated checkpoints in {name}: {refused} refused, others read"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--files", type=int, default=10000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--loads-every", type=int, default=10)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--formats", nargs="*", choices=[*SOUND], default=[*SOUND])
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    work = arguments.files, arguments.seed, arguments.loads_every
    with ProcessPoolExecutor(arguments.processes, mp_context=context) as pool:
        try:
            for done in [pool.submit(_fuzz, name, *work) for name in arguments.formats]:
                print(done.result(), flush=True)
        except BaseException:
            # A fault is told now, not when all other formats are through.
            pool.shutdown(cancel_futures=True)
            raise


if __name__ == "__main__":
    main()
