"""What each dtype costs the embedded model: its held-out loss on the lmi engine.

    python -m bench.loss --windows 20
    python -m bench.loss --windows 20 --at-load eetq bitsandbytes-nf4
    python -m bench.loss --windows 20 --written gptq gguf-q4_k
    python -m bench.loss --windows 20 --written gptq --outliers 30

The last two: of the files that ``lmi quantize`` writes of it, with a text that isn't held out. Of
these and of what is quantised at load, the reference is what the same weights give in fp32 where
nothing that they are multiplied with is rounded. ``--outliers``: of the model of
``bench.outliers``, whose channels are so many times larger, down too.
The windows are those of ``bench.demo.evaluate``. An error is the standard error, over the
windows, of the difference to fp32. Needs torch, for the windows.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from bench.demo.corpus import LONG_SOURCES, documents
from bench.demo.evaluate import SEED, held_out_windows
from bench.demo.packing import PAD_ID
from lmi_core.cli import main as main_of_lmi
from lmi_core.demo import MODEL_DIR
from lmi_core.engine.engine import Engine
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.settings.engine_config import EngineConfig, KvDType, Quantization
from lmi_core.weights.gguf.directory import model_directory

DTYPES = (
    "fp32",
    "bf16",
    "int8",
    "int4",
    "bf16, int8 KV",
    "int8, int8 KV",
    "bf16, fp8_e4m3fn KV",
    "bf16, fp8_e5m2 KV",
)
_NUM_DOCUMENTS = 400
PARAMS = SamplingParams(max_new_tokens=1, prompt_logprobs=0, ignore_eos=True)


def config_of(dtype: str, model: Path = MODEL_DIR) -> EngineConfig:
    """``dtype``: of the weights, and maybe of the cache."""
    weights, _, cache = dtype.partition(", ")
    is_quantized = weights not in ("fp32", "bf16")
    return EngineConfig(
        model=model,
        dtype="bf16" if is_quantized else weights,
        quantize=cast(Quantization, weights) if is_quantized else None,
        kv_dtype=cast(KvDType, cache.removesuffix(" KV") or "auto"),
        max_num_seqs=1,
    )


def write_model(format: str, directory: Path, model: Path = MODEL_DIR) -> EngineConfig:
    """``model`` in ``format``, by ``lmi quantize``, in ``directory``."""
    text, out = directory / "text.txt", directory / f"{format}.gguf"
    if not text.exists():
        pieces = documents(SEED, sources=LONG_SOURCES, held_out=False)
        text.write_text("\n\n".join(islice(pieces, _NUM_DOCUMENTS)))
    arguments = ["quantize", str(model), str(out), "--format", format, "--text", str(text)]
    if main_of_lmi(arguments):
        raise SystemExit(f"lmi {' '.join(arguments)} failed")
    return EngineConfig(model=model_directory(out), max_num_seqs=1)


async def mean_losses(config: EngineConfig, windows: list[list[int]]) -> NDArray[np.float64]:
    """Of each window, in nats a token."""
    losses = []
    async with Engine(config) as engine:
        for window in windows:
            losses.append(await mean_loss(engine, window))
    return np.array(losses)


async def mean_loss(engine: Engine, window: list[int]) -> float:
    """Of all tokens but the first and padding."""
    scores: list[float] = []
    async for event in engine.generate(window, PARAMS):
        for before, token in pairwise(event.prompt or ()):
            if token.logprob is not None and {before.token_id, token.token_id} != {PAD_ID}:
                scores.append(token.logprob)
    return -float(np.mean(scores))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--windows", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=2000, help="of each window")
    parser.add_argument("--at-load", nargs="*", default=[], help="names of option.quantize")
    parser.add_argument("--written", nargs="*", default=[], help="formats of lmi quantize")
    parser.add_argument("--outliers", type=float, help="how many times larger channels are")
    arguments = parser.parse_args()
    windows = held_out_windows(MODEL_DIR, arguments.windows)[:, : arguments.tokens].tolist()
    with tempfile.TemporaryDirectory() as directory:
        model = MODEL_DIR
        if arguments.outliers is not None:
            from bench.outlier_channels import write_model as with_outliers

            model = with_outliers(Path(directory), arguments.outliers, is_down=True)
        if arguments.written:
            names = arguments.written
            configs = (write_model(name, Path(directory), model) for name in names)
        else:
            names = arguments.at_load or DTYPES[1:]
            configs = (config_of(name, model) for name in names)
        best = asyncio.run(mean_losses(config_of("fp32", model), windows))
        print(f"fp32 {best.mean():.4f}")
        for name, config in zip(names, configs, strict=True):
            more = asyncio.run(mean_losses(config, windows)) - best
            error = more.std(ddof=1) / np.sqrt(len(more))
            line = f"{name} {best.mean() + more.mean():.4f}  ({more.mean():+.4f} +- {error:.4f})"
            if arguments.written or arguments.at_load:
                exact = replace(config, dtype="fp32", activations="bf16")
                reference = asyncio.run(mean_losses(exact, windows)) - best
                rounding = more - reference
                error = rounding.std(ddof=1) / np.sqrt(len(more))
                line += f"  reference {reference.mean():+.4f}, beside it "
                line += f"{rounding.mean():+.4f} +- {error:.4f}"
            print(line, flush=True)


if __name__ == "__main__":
    main()
