"""Embeddings of an encoder, beside the machine's roof of the same minute.

    python -m bench.embeddings --tokens 512 512          32 texts of 512 tokens at once
    python -m bench.embeddings --tokens 16 512           of 16 to 512, evenly
    python -m bench.embeddings --openvino build/peers/openvino/env

A round embeds all texts at once. The roof is the operations of all linears and of attention at the
bf16 rate. With OpenVINO's environment (``python -m bench.peers install openvino``) its model of the
same checkpoint, in fp16 that computes in bf16, takes turns with ours: texts of one length as one
batch, others each padded to the longest.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, cast

from bench.family_shapes import checkpoint, shape_of
from lmi_core.bench.rooflines import RoofShape
from lmi_core.bench.roofs import Roofs, measure_roofs
from lmi_core.engine.engine import Engine
from lmi_core.settings.engine_config import EngineConfig

SHAPE = "bert-base"
Texts = list[list[int]]


def make_texts(num_texts: int, low: int, high: int, seed: int) -> Texts:
    """Lengths evenly between ``low`` and ``high``, in random order."""
    rng = random.Random(seed)
    lengths = [low + round(i * (high - low) / max(1, num_texts - 1)) for i in range(num_texts)]
    rng.shuffle(lengths)
    return [[rng.randrange(1000, 30000) for _ in range(length)] for length in lengths]


def roof_s(shape: RoofShape, lengths: Sequence[int], roofs: Roofs) -> float:
    """Every token sees all of its text."""
    linear = 2 * (shape.linear_params - shape.vocab_size * shape.hidden_size) * sum(lengths)
    per_pair = 4 * shape.num_layers * shape.num_heads * shape.head_dim
    return (linear + per_pair * sum(n * n for n in lengths)) / (roofs.bf16_gflops * 1e9)


class OpenVino:
    """The model in OpenVINO's own environment, asked over pipes."""

    def __init__(self, environment: Path, model: Path, num_threads: int) -> None:
        binaries = environment.absolute() / "bin"
        target = Path("build/models") / f"{SHAPE}-openvino"
        if not (target / "openvino_model.xml").exists():
            export = "export openvino --task feature-extraction --weight-format fp16 --model"
            command = [str(binaries / "optimum-cli"), *export.split(), str(model), str(target)]
            subprocess.run(command, check=True)
        script = Path(__file__).with_name("openvino_encoder.py")
        command = [str(binaries / "python"), str(script), str(target), str(num_threads)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def seconds(self, texts: Texts) -> float:
        given, taken = cast(IO[str], self._process.stdin), cast(IO[str], self._process.stdout)
        given.write(json.dumps(texts) + "\n")
        given.flush()
        return float(taken.readline())

    def close(self) -> None:
        self._process.communicate()


async def our_seconds(engine: Engine, texts: Texts) -> float:
    start = time.perf_counter()
    await asyncio.gather(*(engine.embed(text) for text in texts))
    return time.perf_counter() - start


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    model, shape = checkpoint(SHAPE), shape_of(SHAPE)
    low, high = arguments.tokens
    config = EngineConfig(
        model=model,
        dtype="bf16",
        quantize=arguments.quantize,
        num_threads=arguments.threads,
        max_num_seqs=arguments.batch,
        repack_cache_dir="none",
        packs_behind=False,
    )
    ours: list[float] = []
    shares: list[float] = []
    ratios: list[float] = []
    async with Engine(config) as engine:
        num_threads = engine.info.runner.num_threads
        theirs = None
        if arguments.openvino is not None:
            theirs = OpenVino(arguments.openvino, model, num_threads)
        for i in range(arguments.rounds + 1):
            texts = make_texts(arguments.batch, low, high, seed=i)
            before = measure_roofs(num_threads)
            seconds = await our_seconds(engine, texts)
            roofs = [before, measure_roofs(num_threads)]
            peer_s = 0.0 if theirs is None else theirs.seconds(texts)
            if i == 0:
                continue
            lengths = [len(text) for text in texts]
            ours.append(sum(lengths) / seconds)
            shares.append(statistics.mean(roof_s(shape, lengths, each) for each in roofs) / seconds)
            ratios.append(peer_s / seconds)
        if theirs is not None:
            theirs.close()
    dtype = arguments.quantize or "bf16"
    return {
        "what": f"{arguments.batch} texts of {low} to {high} tokens, {dtype}",
        "tokens_per_s": statistics.median(ours),
        "lowest": min(ours),
        "highest": max(ours),
        "share_of_roof": statistics.median(shares),
        "times_openvino": statistics.median(ratios) if arguments.openvino else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, nargs=2, default=[512, 512])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--quantize", choices=["int8", "int4"])
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--openvino", type=Path, help="environment with OpenVINO and optimum-intel")
    print(json.dumps(asyncio.run(run(parser.parse_args()))))


if __name__ == "__main__":
    main()
