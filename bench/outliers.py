"""What outlier channels cost quantised weights: the embedded model's held-out loss above fp32.

    python -m bench.outliers --windows 4

Real models have channels whose activations are many times the others'. Here six channels after
every norm are made ``s`` times larger, and the next matrices' columns as much smaller, which leaves
the function of the fp32 model as it is; with ``down``, six of the inputs of every down projection,
too. An error is the standard error, over the windows, of the difference to fp32. Needs torch, for
the windows.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench.demo.evaluate import held_out_windows
from bench.loss import mean_loss
from lmi_core.demo import MODEL_DIR
from lmi_core.engine.engine import Engine
from lmi_core.settings.engine_config import EngineConfig

NUM_CHANNELS = 6
SCALES = (1.0, 30.0, 100.0)
READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}


def rescale(tensors: dict[str, Tensor], scale: float, *, is_down: bool) -> dict[str, Tensor]:
    """The same function with larger channels, in fp32, the head beside the embedding."""
    tensors = {name: tensor.float() for name, tensor in tensors.items()}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    random = np.random.default_rng(6)
    for name, readers in _scaled_by_norms(tensors):
        channels = random.choice(len(tensors[name]), NUM_CHANNELS, replace=False)
        tensors[name][channels] *= scale
        for reader in readers:
            tensors[reader][:, channels] /= scale
    if is_down:
        for up in [name for name in tensors if name.endswith("up_proj.weight")]:
            channels = random.choice(len(tensors[up]), NUM_CHANNELS, replace=False)
            tensors[up][channels] *= scale
            tensors[up.replace("up_proj", "down_proj")][:, channels] /= scale
    return tensors


def _scaled_by_norms(tensors: dict[str, Tensor]) -> Iterator[tuple[str, tuple[str, ...]]]:
    for name in sorted(tensors):
        layer, _, kind = name.removesuffix(".weight").rpartition(".")
        if kind in READERS:
            yield name, tuple(f"{layer}.{reader}.weight" for reader in READERS[kind])
    yield "model.norm.weight", ("lm_head.weight",)


def write_model(directory: Path, scale: float, *, is_down: bool) -> Path:
    """A checkpoint of ``rescale``."""
    path = directory / f"{scale:g}{'-down' * is_down}"
    shutil.copytree(MODEL_DIR, path)
    tensors = load_file(path / "model.safetensors")
    save_file(rescale(tensors, scale, is_down=is_down), path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    config |= {"tie_word_embeddings": False, "torch_dtype": "float32"}
    (path / "config.json").write_text(json.dumps(config))
    return path


async def mean_losses(config: EngineConfig, windows: list[list[int]]) -> NDArray[np.float64]:
    """Of each window, in nats a token."""
    async with Engine(config) as engine:
        return np.array([await mean_loss(engine, window) for window in windows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=2000, help="of each window")
    parser.add_argument("--device", choices=("cpu", "torch-cpu", "cuda"), default="cpu")
    parser.add_argument("--scales", type=float, nargs="+", default=SCALES)
    parser.add_argument("--formats", nargs="+", default=("int8", "int4"))
    parser.add_argument("--alpha", type=float, default=0.8, help="of smoothquant")
    parser.add_argument("--activations", nargs="+", default=("int8", "auto", "bf16"))
    arguments = parser.parse_args()
    windows = held_out_windows(MODEL_DIR, arguments.windows)[:, : arguments.tokens].tolist()
    with tempfile.TemporaryDirectory() as directory:
        for is_down, scale in product((False, True), arguments.scales):
            if is_down and scale == 1:
                continue
            model = write_model(Path(directory), scale, is_down=is_down)
            exact = asyncio.run(mean_losses(EngineConfig(model=model, dtype="fp32"), windows))
            print(f"s = {scale:g}{', down too' * is_down}: fp32 {exact.mean():.4f}", flush=True)
            for quantize, activations in product(arguments.formats, arguments.activations):
                config = EngineConfig(
                    model=model,
                    dtype="bf16",
                    quantize=quantize,
                    activations=activations,
                    smoothquant_alpha=arguments.alpha,
                    device=arguments.device,
                    max_num_seqs=1,
                )
                more = asyncio.run(mean_losses(config, windows)) - exact
                error = more.std(ddof=1) / np.sqrt(len(more))
                print(f"  {quantize}, {activations} {more.mean():+.4f} +- {error:.4f}", flush=True)


if __name__ == "__main__":
    main()
