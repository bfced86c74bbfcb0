"""Mutated GGUF files: read as they say, or refused by one error that names the file.

``python -m tests.weights.gguf_fuzz --files 10000`` for ``make fuzz``.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from lmi_core.errors import ModelError
from lmi_core.text.gguf_tokenizer import eos_token_ids, tokenizer_files
from lmi_core.weights.gguf.config import read_config
from lmi_core.weights.gguf.file import read_gguf
from tests.checkpoints import cached_checkpoint
from tests.gguf_files import llama_metadata, llama_tensors, write_gguf


def sound_file(directory: Path) -> Path:
    """A small Llama with its tokenizer."""
    source = cached_checkpoint("llama2")
    tensors = llama_tensors(source, "Q8_0")
    return write_gguf(directory / "model.gguf", llama_metadata(source), tensors)


def mutate_and_read(path: Path, count: int, seed: int) -> int:
    """Change ``count`` copies of a file's header and read them; how many were refused."""
    rng = np.random.default_rng(seed)
    original = path.read_bytes()
    num_header_bytes = min(tensor.offset for tensor in read_gguf(path).tensors.values())
    num_refused = 0
    for _ in range(count):
        path.write_bytes(_mutated(original, num_header_bytes, rng))
        message = ""
        try:
            _read(path)
        except ModelError as error:
            message = str(error)
        assert not message or str(path) in message, message
        num_refused += bool(message)
    path.write_bytes(original)
    return num_refused


def _mutated(original: bytes, num_header_bytes: int, rng: np.random.Generator) -> bytes:
    raw = bytearray(original)
    for _ in range(rng.integers(1, 4)):
        # Most of the header is the vocabulary: its ends are met as often as its middle.
        bounds = [(0, 600), (0, num_header_bytes), (num_header_bytes - 2000, num_header_bytes)]
        at = int(rng.integers(*bounds[rng.integers(0, 3)]))
        if rng.integers(0, 3):
            raw[at] = rng.integers(0, 256)
        else:
            raw[at : at + 8] = rng.bytes(8)
    if rng.integers(0, 8) == 0:
        del raw[int(rng.integers(0, len(raw))) :]
    return bytes(raw)


def _read(path: Path) -> None:
    file = read_gguf(path)
    num_bytes = path.stat().st_size
    for tensor in file.tensors.values():
        assert tensor.offset + tensor.num_bytes <= num_bytes
    json.dumps(read_config(file))
    content, settings = tokenizer_files(file)
    json.dumps([settings, eos_token_ids(file)])
    try:
        Tokenizer.from_str(json.dumps(content))
    except (
        Exception
    ) as error:  # the library raises nothing more specific; the loader names the file
        raise ModelError(f"{path}: {error}") from None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--files", type=int, default=10000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = sound_file(Path(directory))
        num_refused = mutate_and_read(path, arguments.files, arguments.seed)
    print(f"{arguments.files} mutated GGUF files: {num_refused} refused, the others read")


if __name__ == "__main__":
    main()
