"""Model files for the tests of artefacts."""

import json

import pytest


def safetensors_bytes(num_bytes=8):
    header = json.dumps(
        {"w": {"dtype": "U8", "shape": [num_bytes], "data_offsets": [0, num_bytes]}}
    )
    return len(header).to_bytes(8, "little") + header.encode() + bytes(range(num_bytes))


@pytest.fixture
def write_model():
    """Return a function that writes a small whole model into a directory."""

    def write(directory, num_bytes=8):
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
        (directory / "tokenizer.json").write_text("{}")
        (directory / "model.safetensors").write_bytes(safetensors_bytes(num_bytes))
        return directory

    return write
