"""What each dtype costs the embedded model: its held-out loss on the lmi engine.

    python -m bench.loss --windows 20

The windows are those of ``bench.demo.evaluate``. An error is the standard error, over the
windows, of the difference to fp32. Needs torch: for the windows, and for fp8 caches, which the CPU
engine doesn't have.
"""

from __future__ import annotations

import argparse
import asyncio
from itertools import pairwise
from typing import cast

import numpy as np
from numpy.typing import NDArray

from bench.demo.evaluate import held_out_windows
from bench.demo.packing import PAD_ID
from lmi_core.demo import MODEL_DIR
from lmi_core.engine.engine import Engine
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.settings.engine_config import EngineConfig, KvDType

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
PARAMS = SamplingParams(max_new_tokens=1, prompt_logprobs=0, ignore_eos=True)


async def mean_losses(dtype: str, windows: list[list[int]]) -> NDArray[np.float64]:
    """Of each window, in nats a token."""
    weights, _, cache = dtype.partition(", ")
    is_quantized = weights in ("int8", "int4")
    config = EngineConfig(
        model=MODEL_DIR,
        dtype="bf16" if is_quantized else weights,
        quantize=weights if is_quantized else None,
        kv_dtype=cast(KvDType, cache.removesuffix(" KV") or "auto"),
        device="torch-cpu" if cache.startswith("fp8") else "cpu",
        max_num_seqs=1,
    )
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
    arguments = parser.parse_args()
    windows = held_out_windows(MODEL_DIR, arguments.windows)[:, : arguments.tokens].tolist()
    best = asyncio.run(mean_losses("fp32", windows))
    print(f"fp32 {best.mean():.4f}")
    for dtype in DTYPES[1:]:
        more = asyncio.run(mean_losses(dtype, windows)) - best
        error = more.std(ddof=1) / np.sqrt(len(more))
        print(f"{dtype} {best.mean() + more.mean():.4f}  ({more.mean():+.4f} +- {error:.4f})")


if __name__ == "__main__":
    main()
