"""Adapters against transformers on models with the adapter merged into the weights, in batches that
mix two adapters and the base model."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from lmi_core.adapters.store import LoraStore
from lmi_core.models.lora_linears import linear_shapes
from tests.checkpoints import cached_checkpoint
from tests.loading import load_model
from tests.lora_adapters import Tensors, adapter_tensors, merge, write_adapter
from tests.models.forward import Forward, NativeForward, TorchForward, all_logits

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

MAX_MODEL_LEN = 256
BASE, FIRST, SECOND = -1, 0, 1
SLOTS = (BASE, FIRST, SECOND) * 3
BACKENDS = ("torch", "native")
FAMILIES = ("llama3", "llama_bias", "llama_tied", "mistral", "qwen2", "qwen3")


def make_forward(backend: str, model: Path, adapters: list[Path], dtype: str) -> Forward:
    """The model with these adapters in slots 0, 1, ..."""
    if backend == "native":
        return native_forward(model, adapters, dtype)
    from lmi_core.ops.device.adapter_table import AdapterTable
    from tests.ops.torch_store import TorchWeights

    backend_weights, table = TorchWeights(), AdapterTable()
    loaded = load_model(model, dtype, packer=backend_weights, takes_adapters=True)  # type: ignore[arg-type]
    store = LoraStore(loaded, backend_weights, table, max_rank=16)
    fill(store, adapters)
    return TorchForward(loaded, MAX_MODEL_LEN, dtype, adapters=table)


def native_forward(model: Path, adapters: list[Path], dtype: str) -> Forward:
    from lmi_core import _native
    from lmi_core.ops.cpu import NativeWeights

    loaded = load_model(model, dtype, takes_adapters=True)  # type: ignore[arg-type]
    table: Any = _native.LoraTable(linear_shapes(loaded.spec), dtype=loaded.dtype)
    fill(LoraStore(loaded, NativeWeights(), table, max_rank=16), adapters)
    return NativeForward(loaded, MAX_MODEL_LEN, dtype, adapters=table)


def fill(store: LoraStore, adapters: list[Path]) -> None:
    for slot, path in enumerate(adapters):
        store.set(slot, store.pack(path))


def merged_logits(
    model: Path, adapter: Tensors, scale: float, sequences: list[list[int]], target: Path
) -> list[npt.NDArray[np.float64]]:
    """Of transformers, in float64; the sums are rounded to fp32 as a merged checkpoint's are."""
    merged = merge(model, adapter, scale, target)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(
        merged, dtype=torch.float64, experts_implementation="eager"
    )
    with torch.no_grad():
        return [oracle(torch.tensor([ids]), use_cache=False).logits[0].numpy() for ids in sequences]


def make_sequences(seed: int = 3) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(4, 384, length).tolist() for length in random.integers(2, 90, 9)]


def make_adapters(model: Path) -> tuple[Tensors, Tensors]:
    """Of ranks 8 and 5."""
    targets = ("q_proj", "v_proj", "down_proj")
    first = adapter_tensors(model, rank=8, seed=1)
    return first, adapter_tensors(model, rank=5, seed=2, targets=targets)


@functools.cache
def exact_logits(variant: str) -> dict[int, list[npt.NDArray[np.float64]]]:
    """By slot."""
    transformers.logging.disable_progress_bar()
    model, sequences = cached_checkpoint(variant), make_sequences()
    first, second = make_adapters(model)
    with tempfile.TemporaryDirectory() as target:
        return {
            BASE: merged_logits(model, {}, 1.0, sequences, Path(target, "base")),
            FIRST: merged_logits(model, first, 1.0, sequences, Path(target, "a")),
            SECOND: merged_logits(model, second, 3.0, sequences, Path(target, "b")),
        }


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("variant", FAMILIES)
def test_fp32_logits(variant: str, backend: str, tmp_path: Path) -> None:
    model = cached_checkpoint(variant)
    tensors = make_adapters(model)
    paths = [
        write_adapter(tmp_path / "first", tensors[0], rank=8, alpha=8),
        write_adapter(tmp_path / "second", tensors[1], rank=5, alpha=15),
    ]
    forward = make_forward(backend, model, paths, "fp32")
    logits = all_logits(forward, make_sequences(), max_chunk=30, adapters=SLOTS)
    exact = exact_logits(variant)
    for seq_id, slot in enumerate(SLOTS):
        wanted = exact[slot][seq_id]
        assert np.abs(logits[seq_id] - wanted).max() <= 1e-4 * wanted.std()
        others = [other for other in exact if other != slot]
        assert all(np.abs(exact[o][seq_id] - wanted).max() > 0.1 * wanted.std() for o in others)


def test_bf16_errors_are_those_of_the_base_model(tmp_path: Path) -> None:
    """Adapters cost no more accuracy than 16 bits do anyway."""
    model = cached_checkpoint("llama3")
    tensors = adapter_tensors(model, seed=1)
    path = write_adapter(tmp_path / "adapter", tensors)
    sequences = make_sequences()
    errors = {}
    for slot, adapter in ((BASE, {}), (FIRST, tensors)):
        forward = make_forward("native", model, [path], "bf16")
        slots = (slot,) * len(sequences)
        logits = np.concatenate(all_logits(forward, sequences, max_chunk=30, adapters=slots))
        exact = np.concatenate(
            merged_logits(model, adapter, 1.0, sequences, tmp_path / f"merged{slot}")
        )
        errors[slot] = float(np.sqrt(np.mean(np.square(logits - exact))) / exact.std())
    assert errors[FIRST] <= 1.5 * errors[BASE]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_base_model_is_bit_for_bit_what_it_is_without_adapters(
    dtype: str, tmp_path: Path
) -> None:
    model = cached_checkpoint("qwen3")
    path = write_adapter(tmp_path / "adapter", adapter_tensors(model))
    sequences = make_sequences()
    plain = NativeForward(load_model(model, dtype), MAX_MODEL_LEN, dtype)  # type: ignore[arg-type]
    expected = all_logits(plain, sequences, max_chunk=30)
    forward = make_forward("native", model, [path, path], dtype)
    logits = all_logits(forward, sequences, max_chunk=30, seed=1, adapters=SLOTS)
    for seq_id, slot in enumerate(SLOTS):
        if slot == BASE:
            assert np.array_equal(logits[seq_id], expected[seq_id])
