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
import tempfile
from itertools import product
from pathlib import Path

import numpy as np

from bench.demo.evaluate import held_out_windows
from bench.loss import mean_losses
from bench.outlier_channels import write_model
from lmi_core.demo import MODEL_DIR
from lmi_core.settings.engine_config import EngineConfig

SCALES = (1.0, 30.0, 100.0)


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
