"""Prefills by the flash-attn package: a GPU runs the package itself, others a stand-in."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

torch = pytest.importorskip("torch", exc_type=ImportError)

from lmi_core.errors import MissingExtraError  # noqa: E402
from lmi_core.ops.device.paged_cache import CacheScales  # noqa: E402
from lmi_core.ops.kernels import (  # noqa: E402
    flash,
    flash_choice,
    select,
)
from tests.ops.device_ops import assert_close, device, random  # noqa: E402
from tests.ops.paged_case import ATTENTION_CASES, PagedCase  # noqa: E402

__all__ = ["device"]  # a fixture


def varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
) -> torch.Tensor:
    """As ``flash_attn.flash_attn_varlen_func`` documents: masks are aligned to the last key."""
    assert causal
    assert q.dtype == k.dtype == v.dtype == torch.bfloat16
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert cu_seqlens_q.diff().max() == max_seqlen_q
    assert cu_seqlens_k.diff().max() == max_seqlen_k
    group = q.shape[1] // k.shape[1]
    y = torch.empty_like(q)
    spans = zip(cu_seqlens_q.unfold(0, 2, 1), cu_seqlens_k.unfold(0, 2, 1), strict=True)
    for (q_start, q_end), (k_start, k_end) in spans:
        keys, values = (
            store[k_start:k_end].float().repeat_interleave(group, 1) for store in (k, v)
        )
        scores = torch.einsum("qhd,khd->hqk", q[q_start:q_end].float(), keys) * softmax_scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        distance = torch.arange(q_end - q_start).unsqueeze(1) + (k_end - k_start)
        distance = distance - (q_end - q_start) - torch.arange(k_end - k_start)
        is_seen = distance >= 0
        if window_size[0] >= 0:
            is_seen &= distance <= window_size[0]
        weights = scores.masked_fill(~is_seen, -torch.inf).softmax(-1)
        y[q_start:q_end] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
    return y


@pytest.fixture
def package(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.type == "cuda":
        pytest.importorskip("flash_attn")
        return
    module = ModuleType("flash_attn")
    module.flash_attn_varlen_func = varlen  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", module)


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(("window", "soft_cap"), [(0, 0.0), (7, 0.0), (20, 5.0)])
@pytest.mark.parametrize("name", ATTENTION_CASES)
def test_attention(
    device: torch.device,
    window: int,
    soft_cap: float,
    name: str,
) -> None:
    case = ATTENTION_CASES[name]
    keys, values = case.cache(device, torch.bfloat16)
    q = random(case.num_tokens, case.num_q_heads * case.head_dim).to(device, torch.bfloat16)
    settings = {"scale": case.head_dim**-0.5, "window": window, "soft_cap": soft_cap}
    step = case.step(device)
    for _ in range(2):  # as two layers
        y = flash.attention(q, keys, values, step, num_q_heads=case.num_q_heads, **settings)
        assert_close(y, case.expected_attention(q, keys, values, **settings), "bf16")


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.int8])
def test_what_the_package_has_not_runs_elsewhere(
    device: torch.device,
    cache_dtype: torch.dtype,
) -> None:
    case = PagedCase(((3, 20), (5, 1)), 2, 1, 16)
    keys, values = case.cache(device, cache_dtype)
    q = random(case.num_tokens, 32).to(device)
    scales = None
    if cache_dtype == torch.int8:
        scales = CacheScales(*(torch.full((len(keys), 1), 0.1, device=device) for _ in range(2)))
        expected_cache = keys.double() * 0.1, values.double() * 0.1
    else:
        expected_cache = keys, values
    settings = {"scale": 0.25, "window": 0, "soft_cap": 0.0}
    y = flash.attention(
        q, keys, values, case.step(device), num_q_heads=2, scales=scales, **settings
    )
    assert_close(y, case.expected_attention(q, *expected_cache, **settings), "fp32")


def shape(**changes: object) -> flash_choice.AttentionShape:
    fields = {
        "num_q_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 16,
        "block_size": 16,
        "dtype": torch.bfloat16,
        "cache_dtype": torch.bfloat16,
    }
    return flash_choice.AttentionShape(**(fields | changes))  # type: ignore[arg-type]


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """What each implementation takes; an installed package and a GPU are pretended."""
    times = {"triton": 2.0, "flash": 1.0}
    monkeypatch.delenv(select.VARIABLE, raising=False)
    monkeypatch.setattr(select, "has_flash", lambda: True)
    monkeypatch.setattr(flash_choice, "_prefill_s", lambda name, *_: times[name])
    return times


@pytest.mark.parametrize(("flash_s", "winner"), [(1.0, "flash"), (3.0, "triton")])
def test_the_faster_one_is_chosen(
    seconds: dict[str, float], flash_s: float, winner: str, caplog: pytest.LogCaptureFixture
) -> None:
    seconds["flash"] = flash_s
    chosen = {"attention": "triton"}
    with caplog.at_level("INFO"):
        flash_choice.prefer_flash(chosen, torch.device("cuda"), shape())
    assert chosen["attention"] == winner
    assert f"{winner} does prefills" in caplog.text


@pytest.mark.usefixtures("seconds")
def test_nothing_is_chosen_against_a_force_or_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = {"attention": "triton"}
    flash_choice.prefer_flash(chosen, torch.device("cpu"), shape())
    flash_choice.prefer_flash(chosen, torch.device("cuda"), shape(cache_dtype=torch.int8))
    assert "bfloat16 queries over a cache of int8" in caplog.text
    flash_choice.prefer_flash(chosen, torch.device("cuda"), shape(head_dim=20))
    assert "heads of 20" in caplog.text
    monkeypatch.setenv(select.VARIABLE, "triton")
    flash_choice.prefer_flash(chosen, torch.device("cuda"), shape())
    assert chosen["attention"] == "triton"


@pytest.mark.usefixtures("package")
def test_time_of_a_prefill(
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flash_choice, "NUM_TOKENS", 50)
    runs = []

    def time(run: object) -> float:
        runs.append(run)
        run()  # type: ignore[operator]
        return float(len(runs))

    for name in ("torch", "flash"):
        runs.clear()
        assert flash_choice._prefill_s(name, device, shape(), time) == 3.0


def test_forced_but_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "has_flash", lambda: False)
    with pytest.raises(MissingExtraError, match=r"flash-attn.*lmi-core\[flash-attn\]"):
        select.select("cuda", "attention:flash")
