"""OpenVINO's side of ``bench.embeddings``, run by OpenVINO's own environment: reads lists of texts,
each a list of token ids, writes the seconds that their embeddings took."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np


def main() -> None:
    import openvino

    settings = {"INFERENCE_NUM_THREADS": int(sys.argv[2]), "INFERENCE_PRECISION_HINT": "bf16"}
    model = openvino.Core().compile_model(
        str(Path(sys.argv[1]) / "openvino_model.xml"), "CPU", settings
    )
    names = {name for port in model.inputs for name in port.names}
    for line in sys.stdin:
        texts = json.loads(line)
        width = max(map(len, texts))
        ids = np.zeros((len(texts), width), np.int64)
        mask = np.zeros_like(ids)
        for row, text in enumerate(texts):
            ids[row, : len(text)] = text
            mask[row, : len(text)] = 1
        inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        start = time.perf_counter()
        states = model({name: value for name, value in inputs.items() if name in names})[0]
        weights = mask[..., None] / mask.sum(1)[:, None, None]
        vectors = (states * weights).sum(1)
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        print(time.perf_counter() - start, flush=True)


if __name__ == "__main__":
    main()
