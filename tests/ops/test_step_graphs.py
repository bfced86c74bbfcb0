"""What is recorded for a model: nodes, their order and fusions, shapes and offsets in the arena.

Golden files are rewritten with ``LMI_UPDATE_GOLDEN=1`` where a graph changed on purpose.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", exc_type=ImportError)

from lmi_core.engine.parts import load_runner  # noqa: E402
from lmi_core.ops.device.step_list import StepList  # noqa: E402
from lmi_core.settings.engine_config import EngineConfig  # noqa: E402
from lmi_core.settings.lora_config import LoraConfig  # noqa: E402
from tests.checkpoints import make_checkpoint  # noqa: E402
from tests.ops.cuda_kernels import use_cuda_kernels  # noqa: E402

DIRECTORY = Path(__file__).with_name("graphs")
UPDATE = os.environ.get("LMI_UPDATE_GOLDEN") == "1"
VARIANTS = ("llama2", "qwen3_window", "gemma2", "gpt2")
CPU: dict[str, dict[str, Any]] = {
    "fp32": {"dtype": "fp32"},
    "bf16": {"dtype": "bf16"},
    "int8": {"dtype": "bf16", "quantize": "int8"},
    "int4": {"dtype": "fp32", "quantize": "int4"},
    "int8 lora": {"dtype": "bf16", "quantize": "int8", "lora": LoraConfig()},
}
CUDA: dict[str, dict[str, Any]] = {
    "bf16": {},
    "int8": {"quantize": "int8"},
    "int4": {"quantize": "int4"},
    "fp8": {"quantize": "fp8"},
    "int8 cache": {"quantize": "int8", "kv_dtype": "int8"},
}


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model(variant: str, tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / variant, variant, dtype="bfloat16", num_hidden_layers=2)


def test_graphs_of_the_cpu(variant: str, model: Path) -> None:
    lines = []
    for name, changes in CPU.items():
        runner: Any = load_runner(config_of(model, device="cpu", **changes))[0]
        lines += [f"== {name}: {runner.graph.arena_bytes} bytes", *runner.graph.describe()]
        runner.close()
    compare(f"{variant}-cpu.txt", lines)


def test_step_lists_of_cuda(variant: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_cuda_kernels(torch.device("cpu"), monkeypatch)
    monkeypatch.setenv("LMI_OPS", "native")
    added: list[tuple[str, str, ctypes.Structure]] = []
    add = StepList.add

    def note_and_add(self: StepList, node: str, rows: Any, arguments: ctypes.Structure) -> None:
        added.append((node, rows, arguments))
        add(self, node, rows, arguments)

    monkeypatch.setattr(StepList, "add", note_and_add)
    lines = []
    for name, changes in CUDA.items():
        added.clear()
        settings = {"dtype": "bf16", "enforce_eager": True, **changes}
        runner: Any = load_runner(config_of(model, device="torch-cpu", **settings))[0]
        arena = runner._steps._arena
        lines.append(f"== {name}: {arena.numel()} bytes")
        lines += described(added, arena.data_ptr(), arena.numel())
        runner.close()
    compare(f"{variant}-cuda.txt", lines)


def config_of(model: Path, **changes: Any) -> EngineConfig:
    settings = {
        "max_model_len": 160,
        "block_size": 16,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 48,
        "kv_cache_bytes": 4 << 20,
        "num_threads": 1,
        **changes,
    }
    return EngineConfig(model=model, **settings)


def described(
    added: list[tuple[str, str, ctypes.Structure]], arena: int, arena_bytes: int
) -> list[str]:
    """A line per node: pointers into the arena as offsets, others numbered as they come up, what
    is zero left out."""
    others: dict[int, int] = {}

    def told(kind: object, value: Any) -> str:
        if kind is not ctypes.c_void_p:
            return f"{value:g}" if isinstance(value, float) else str(value)
        inside = arena <= value < arena + arena_bytes
        return f"@{value - arena}" if inside else f"#{others.setdefault(value, len(others))}"

    lines = []
    for node, rows, arguments in added:
        fields = [(name, kind, getattr(arguments, name)) for name, kind in arguments._fields_]
        words = [
            f"{name}={told(kind, value)}"
            for name, kind, value in fields
            if isinstance(value, (int, float)) and value
        ]
        lines.append(" ".join([node, rows, *words]))
    return lines


def compare(name: str, lines: list[str]) -> None:
    text = "".join(f"{line}\n" for line in lines)
    path = DIRECTORY / name
    if UPDATE:
        path.write_text(text)
    assert text == path.read_text()
