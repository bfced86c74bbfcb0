"""Attention of tokens that see later ones, in every implementation that has it."""

from __future__ import annotations

import asyncio
import importlib
from types import ModuleType

import numpy as np
import pytest

torch = pytest.importorskip("torch", exc_type=ImportError)

from tests.engine.harness import run  # noqa: E402
from tests.engine.test_pooling import RAW, engine_of, inputs  # noqa: E402
from tests.ops.device_ops import (  # noqa: E402
    DTYPES,
    assert_close,
    device,
    ops,
    random,
    triton_module,
    triton_ops,
)
from tests.ops.paged_case import PagedCase  # noqa: E402
from tests.pooled_checkpoints import encoder  # noqa: E402

__all__ = ["device", "ops", "triton_ops"]  # fixtures

WHOLE = PagedCase(((0, 1), (0, 41), (0, 2), (0, 19)), 2, 2, 24)


def settings_of(window: int, has_relative: bool) -> dict[str, object]:
    """The longest distance that ``relative`` is told of is that of the longest sequence."""
    relative = random(2, 2 * (40 + 16), seed=5) if has_relative else None
    mask = {"scale": 0.2, "window": window, "soft_cap": 0.0}
    return {**mask, "sees_later": True, "relative": relative}


def placed(settings: dict[str, object], device: torch.device) -> dict[str, object]:
    return {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in settings.items()
    }


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("window", "has_relative"), [(0, False), (0, True), (12, False)])
def test_attention_both_ways(
    ops: ModuleType, device: torch.device, dtype: str, window: int, has_relative: bool
) -> None:
    """The CUDA kernels leave it to others."""
    keys, values = WHOLE.cache(device, DTYPES[dtype])
    q = random(WHOLE.num_tokens, 48).to(device, DTYPES[dtype])
    settings = settings_of(window, has_relative)
    step = WHOLE.step(device)
    y = ops.attention(q, keys, values, step, num_q_heads=2, **placed(settings, device))
    assert_close(y, WHOLE.expected_attention(q, keys, values, **settings), dtype)


@pytest.mark.parametrize(("window", "has_relative"), [(0, True), (12, False)])
def test_triton_bits_of_a_sequence_are_its_own(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, window: int, has_relative: bool
) -> None:
    triton_module(device)
    module = importlib.import_module("lmi_core.ops.kernels.triton.invariant.attention")
    monkeypatch.setattr(module, "PARTITION_KEYS", 32)
    keys, values = WHOLE.cache(device, torch.bfloat16)
    q = random(WHOLE.num_tokens, 48).to(device, torch.bfloat16)
    settings = settings_of(window, has_relative)
    given = placed(settings, device)
    step = WHOLE.step(device)
    y = module.attention(q, keys, values, step, num_q_heads=2, **given)
    assert_close(y, WHOLE.expected_attention(q, keys, values, **settings), "bf16")
    for first, alone in zip((0, 1, 42, 44), step.sequences(), strict=True):
        rows = slice(first, first + len(alone.token_ids))
        part = module.attention(q[rows], keys, values, alone, num_q_heads=2, **given)
        assert torch.equal(part, y[rows])


def test_triton_takes_no_wide_heads_both_ways(triton_ops: ModuleType, device: torch.device) -> None:
    case = PagedCase(((0, 3),), 1, 1, 264)
    keys, values = case.cache(device, torch.float32)
    with pytest.raises(ValueError, match="heads of 264 with windows"):
        triton_ops.attention(
            random(3, 264).to(device),
            *(keys, values, case.step(device)),
            num_q_heads=1,
            **settings_of(0, False),
        )


@pytest.mark.parametrize(
    ("name", "deterministic"), [("bert", True), ("mpnet", False), ("modernbert", False)]
)
def test_triton_embeddings_are_those_of_the_cpu_engine(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, name: str, deterministic: bool
) -> None:
    triton_module(device)
    monkeypatch.setenv("LMI_OPS", "triton")

    async def embed(**changes: object) -> list[np.ndarray]:
        async with engine_of(encoder(name), **changes) as engine:
            if changes:
                groups = engine.info.runner.kernels.split("; ")
                (owner,) = (group.split(": ")[0] for group in groups if " attention" in group)
                assert owner == ("invariant" if deterministic else "triton")
            return await asyncio.gather(*(engine.embed(ids, RAW) for ids in inputs((1, 17))))

    kind = "cuda" if device.type == "cuda" else "torch-cpu"
    wanted = run(embed())
    for vector, other in zip(
        wanted, run(embed(device=kind, deterministic=deterministic)), strict=True
    ):
        assert np.abs(vector - other).max() <= 1e-4 * vector.std()
