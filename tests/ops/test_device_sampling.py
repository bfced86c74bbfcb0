"""The samplers of torch devices against the native one, and distributions by sorting."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.kernels.sampling_case import chi_square, filtered_probabilities, mask_of, random_logits

torch = pytest.importorskip("torch", exc_type=ImportError)

from tests.ops.cuda_kernels import use_cuda_kernels  # noqa: E402
from tests.ops.device_sampler import MAX_LOGPROBS, Sampler, native_rows, sample_rows  # noqa: E402

ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU"),
]


@pytest.fixture(
    autouse=True,
    params=[
        pytest.param(("torch", "cpu"), id="torch-cpu"),
        pytest.param(("torch", "cuda"), id="torch-cuda", marks=ON_GPU),
        pytest.param(("native", "cpu"), id="native-cpu"),
        pytest.param(("native", "cuda"), id="native-cuda", marks=ON_GPU),
    ],
)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the test with each sampler."""
    name, device = request.param
    if name == "native":
        use_cuda_kernels(torch.device(device), monkeypatch)
    monkeypatch.setattr(Sampler, "implementation", (name, device))
    monkeypatch.setattr(Sampler, "is_emulated", name == "native" and device == "cpu")


@pytest.mark.parametrize("vocab", [1, 2, 17, 300, 1003])
def test_as_the_native_sampler(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    rows: list[dict[str, Any]] = [
        {
            "temperature": float(rng.choice([0.0, 0.5, 1.0, 1.7])),
            "seed": int(rng.integers(1 << 62)),
            "choice": int(rng.integers(3)),
            "num_logprobs": int(rng.integers(6)),
            "logit_bias": [(int(rng.integers(vocab)), 2.5)] * int(rng.integers(3)),
            "banned_ids": [int(rng.integers(vocab))] if vocab > 1 and i % 4 == 0 else [],
        }
        for i in range(40)
    ]
    logits = random_logits(len(rows), vocab, seed=vocab)
    logits[5] = np.round(logits[5])  # many equals
    result, native = sample_rows(logits, rows), native_rows(logits, rows)
    np.testing.assert_array_equal(result.token_ids, native["ids"])
    np.testing.assert_allclose(result.logprobs, native["logprobs"], atol=1e-5)
    np.testing.assert_array_equal(result.num_top, native["num_top"])
    for row, num_top in enumerate(result.num_top):
        for name in ("top_ids", "top_logprobs"):
            ours = getattr(result, name)[row, :num_top]
            np.testing.assert_allclose(ours, native[name][row, :num_top], atol=1e-5)


def test_a_large_vocabulary() -> None:
    vocab = 131_075
    rows: list[dict[str, Any]] = [
        {"num_logprobs": 8},
        {"temperature": 0.7, "seed": 5, "num_logprobs": 1},
        {"temperature": 1.5, "seed": 6, "logit_bias": [(vocab - 1, 40.0)]},
    ]
    logits = random_logits(len(rows), vocab, seed=1)
    result, native = sample_rows(logits, rows), native_rows(logits, rows)
    np.testing.assert_array_equal(result.token_ids, native["ids"])
    np.testing.assert_allclose(result.logprobs, native["logprobs"], atol=1e-5)
    np.testing.assert_array_equal(result.top_ids[0], native["top_ids"][0, :8])


def test_penalties_and_bans() -> None:
    logits = np.array([[2.0, 1.9, -1.0, 0.5]], np.float32)
    settings = {
        "repetition_penalty": 2.0,
        "frequency_penalty": 0.25,
        "presence_penalty": 0.5,
        "min_tokens": 3,
        "min_tokens_banned_ids": [1],
        "temperature": 1.0,
    }
    counts = np.zeros(4)
    num_draws = 1000 if Sampler.is_emulated else 4000
    for start in range(0, num_draws, 500):
        sampler = Sampler(500, 4)
        for row in range(500):
            sampler.set(row, **settings, seed=start + row)
            sampler.table.observe_prompt(row, [3])
            sampler.table.observe_many(row, [0, 0])
            sampler.add(row, row)
        ids = sampler.run(np.repeat(logits, 500, axis=0)).token_ids
        counts += np.bincount(ids, minlength=4)
    # 0: generated twice; 1: banned; 2: unseen; 3: only in the prompt.
    changed = np.array([2.0 / 2 - 0.5 - 0.5, -np.inf, -1.0, 0.5 / 2])
    p = np.exp(changed) / np.exp(changed).sum()
    ids = np.repeat(np.arange(4), counts.astype(int)).astype(np.int32)
    assert chi_square(ids, p) < 4


def test_scales_of_the_prompts_and_the_last_tokens() -> None:
    """Behind penalties, of logits of both signs; a token that both scale is scaled by both."""
    rng = np.random.default_rng(3)
    logits = random_logits(24, 60, seed=4)
    sampler = Sampler(24, 60)
    wanted = []
    for row in range(24):
        prompt, ends = rng.choice(60, 8, replace=False).tolist(), {5, int(rng.integers(60))}
        reward, factor = float(rng.choice([0.5, 1.0, 3.0])), float(rng.choice([0.8, 1.4]))
        num_output = int(rng.integers(1, 7))
        sampler.set(
            row,
            repetition_penalty=1.2,
            banned_ids=[3],
            prompt_reward=reward,
            prompt_ids=prompt,
            length_start=2,
            length_factor=factor,
            length_ids=sorted(ends),
        )
        sampler.table.observe_prompt(row, prompt)
        sampler.table.observe_many(row, [7] * num_output)
        sampler.add(row, row)
        changed = logits[row].astype(np.float64)
        for token in {*prompt, 7}:
            changed[token] *= 1 / 1.2 if changed[token] > 0 else 1.2
        for token in prompt:
            changed[token] *= reward if changed[token] > 0 else 1 / reward
        for token in ends if num_output > 2 else ():
            changed[token] += abs(changed[token]) * (factor ** (num_output - 2) - 1)
        changed[3] = -np.inf
        wanted.append(int(changed.argmax()))
    assert sampler.run(logits).token_ids.tolist() == wanted
    assert wanted != logits.argmax(-1).tolist()


@pytest.mark.parametrize("factor", [2.0, 3.0])
def test_what_is_scaled_stays_out_where_it_was(factor: float) -> None:
    """An infinity times 0 is no number, and times less than 0 the greatest there is."""
    logits = np.array([[0.5, -np.inf, 1.25, -1.0]], np.float32)
    scales = {"length_start": 0, "length_factor": factor, "length_ids": [0, 1]}
    sampler = Sampler(1, 4)
    sampler.set(0, **scales)
    sampler.table.observe_many(0, [3])
    sampler.add(0, 0)
    wanted = 0 if factor > 2.5 else 2
    assert sampler.run(logits).token_ids.tolist() == [wanted]
    assert native_rows(logits, [{**scales, "num_output": 1}])["ids"].tolist() == [wanted]


@pytest.mark.parametrize(
    "filters",
    [
        {"top_k": 5},
        {"top_k": 1000},
        {"top_p": 0.7},
        {"min_p": 0.1},
        {"top_k": 20, "top_p": 0.8},
        {"top_k": 30, "top_p": 0.95, "min_p": 0.02},
        {"typical_p": 0.5},
        {"typical_p": 0.95},
        {"top_k": 30, "top_p": 0.95, "min_p": 0.02, "typical_p": 0.7},
        {"top_k": 30, "epsilon_cutoff": 0.03, "eta_cutoff": 0.1},
    ],
)
def test_filtered_distribution(filters: dict[str, Any]) -> None:
    num_draws, vocab = 600 if Sampler.is_emulated else 3000, 100
    logits = random_logits(1, vocab, seed=9, spread=1.5)
    logits[0, 10:20] = logits[0, 10]  # equals where a filter may cut
    rows = [{"temperature": 0.9, "seed": seed, **filters} for seed in range(num_draws)]
    ids = sample_rows(np.repeat(logits, num_draws, axis=0), rows).token_ids
    p = filtered_probabilities(logits[0], temperature=0.9, **filters)
    assert chi_square(ids, p) < 4


def test_filtered_draws_are_those_of_the_cuda_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Token by token, whichever the sampler: torch's are compared with those of all others."""
    rng = np.random.default_rng(5)
    rows = [
        {
            "temperature": float(rng.choice([0.4, 1.0, 2.0])),
            "top_k": int(rng.choice([0, 1, 7, 150])),
            "top_p": float(rng.choice([1.0, 0.9, 0.5, 0.01])),
            "min_p": float(rng.choice([0.0, 0.05])),
            "typical_p": float(rng.choice([1.0, 0.8])),
            "seed": int(rng.integers(1 << 62)),
        }
        for _ in range(64)
    ]
    logits = random_logits(len(rows), 1003, seed=2)
    logits[::3] = np.round(logits[::3])
    ids = sample_rows(logits, rows).token_ids
    monkeypatch.setattr(Sampler, "implementation", ("torch", "cpu"))
    np.testing.assert_array_equal(sample_rows(logits, rows).token_ids, ids)


@pytest.mark.parametrize("filters", [{}, {"top_k": 60}])
def test_typical_tokens_need_not_be_the_likeliest(filters: dict[str, Any]) -> None:
    num_draws, vocab = 600, 64
    logits = random_logits(1, vocab, seed=8, spread=0.3)
    logits[0, 40] = 3.0
    settings = {"temperature": 1.0, "typical_p": 0.5, **filters}
    p = filtered_probabilities(logits[0], **settings)
    assert p[40] == 0
    rows = [{"seed": seed, **settings} for seed in range(num_draws)]
    ids = sample_rows(np.repeat(logits, num_draws, axis=0), rows).token_ids
    np.testing.assert_array_equal(np.unique(ids), np.flatnonzero(p))


def test_typical_among_equals_keeps_the_lowest_ids() -> None:
    logits = np.full((80, 100), -np.inf, np.float32)
    logits[:, [3, *range(20, 99)]] = 0.5
    rows = [{"temperature": 1.0, "typical_p": 0.04, "seed": seed} for seed in range(80)]
    assert set(sample_rows(logits, rows).token_ids.tolist()) == {3, 20, 21, 22}


def test_masks_are_as_the_native_sampler_has_them() -> None:
    vocab = 333
    rng = np.random.default_rng(4)
    rows = [{"temperature": [0.0, 1.2][i % 2], "seed": i} for i in range(24)]
    logits = random_logits(len(rows), vocab, seed=6)
    masks = {i: mask_of(np.flatnonzero(rng.random(vocab) < 0.1), vocab) for i in range(0, 24, 3)}
    masks[0] = mask_of([], vocab)
    result, native = sample_rows(logits, rows, masks), native_rows(logits, rows, masks)
    np.testing.assert_array_equal(result.token_ids, native["ids"])
    np.testing.assert_allclose(result.logprobs[1:], native["logprobs"][1:], atol=1e-5)
    free = sample_rows(logits, rows)
    unmasked = [i for i in range(24) if i % 3]
    np.testing.assert_array_equal(result.token_ids[unmasked], free.token_ids[unmasked])


def test_watermarks_are_as_the_native_sampler_has_them() -> None:
    watermark = {"watermark_gamma": 0.3, "watermark_delta": 2.5}
    rows: list[dict[str, Any]] = [
        {**(watermark if i % 3 else {}), "temperature": [0.0, 1.2][i % 2], "seed": i}
        for i in range(24)
    ]
    logits = random_logits(len(rows), 333, seed=8)
    result, native = sample_rows(logits, rows), native_rows(logits, rows)
    np.testing.assert_array_equal(result.token_ids, native["ids"])
    unmarked = sample_rows(logits, [{**row, "watermark_delta": 0.0} for row in rows])
    assert (result.token_ids != unmarked.token_ids).any()


def test_rows_do_not_touch_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Different rules side by side give what they give alone, in whichever sampler has them."""
    monkeypatch.setattr("lmi_core.ops.kernels.cuda.sampling.MAX_TOP", 6)
    vocab = 64
    rows = [
        {},
        {"temperature": 1.0, "top_k": 3, "seed": 1},
        {"temperature": 1.0, "seed": 2},
        {"temperature": 0.7, "top_p": 0.5, "seed": 3, "num_logprobs": 4},
        {"temperature": 1.5, "typical_p": 0.6, "seed": 4},
        {"banned_ids": [1, 2, 3], "logit_bias": [(5, 10.0)], "num_logprobs": 1},
        {"temperature": 1.0, "epsilon_cutoff": 0.05, "seed": 5, "num_logprobs": 2},
        {"temperature": 1.0, "eta_cutoff": 0.05, "seed": 6, "banned_ids": [7]},
        {"temperature": 0.8, "prompt_reward": 2.0, "prompt_ids": [4, 9], "seed": 7},
        {"temperature": 0.9, "num_logprobs": 8, "seed": 8},
    ]
    logits = random_logits(len(rows), vocab, seed=3)
    together = sample_rows(logits, rows)
    for row, settings in enumerate(rows):
        sampler = Sampler(len(rows), vocab)
        sampler.set(row, **settings)
        sampler.add(row, row)
        alone = sampler.run(logits[row : row + 1])
        assert alone.token_ids[0] == together.token_ids[row]
        assert alone.logprobs[0] == together.logprobs[row]
        num_top = alone.num_top[0]
        assert num_top == together.num_top[row]
        for name in ("top_ids", "top_logprobs"):
            wanted = getattr(alone, name)[0, :num_top].tolist()
            assert getattr(together, name)[row, :num_top].tolist() == wanted


def test_ranks_of_targets() -> None:
    """As on the CPU, equals by their ids."""
    logits = np.zeros((6, 1003), np.float32)
    logits[:, 5] = 1.0
    logits[3] = random_logits(1, 1003, seed=3)
    logits[4, 7] = np.nan
    sampler = Sampler(6, 1003)
    targets = [0, 5, 1002, 77, 3]
    for row, target in enumerate(targets):
        sampler.add(row, -1, target_id=target)
    sampler.add(5, 5)
    result = sampler.run(logits)
    rank = 1 + int(np.count_nonzero(logits[3] > logits[3, 77]))
    assert result.target_ranks.tolist() == [2, 1, 1003, rank, 0, 0]


def test_targets_and_rows_that_sample_nothing() -> None:
    sampler = Sampler(4, 50)
    sampler.set(2, num_logprobs=2, temperature=1.0)
    sampler.add(0, -1, target_id=7)  # all of max_logprobs
    sampler.add(1, -1)
    sampler.add(2, 2, target_id=9)
    sampler.add(3, 3)
    logits = random_logits(4, 50)
    result = sampler.run(logits)
    logprobs = torch.from_numpy(logits).double().log_softmax(-1).numpy()
    assert result.token_ids.tolist() == [-1, -1, -1, logits[3].argmax()]
    expected = [logprobs[0, 7], 0.0, logprobs[2, 9], logprobs[3].max()]
    np.testing.assert_allclose(result.logprobs, expected, atol=1e-5)
    assert result.num_top.tolist() == [MAX_LOGPROBS, 0, 2, 0]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_logits_give_no_token(bad: float, temperature: float) -> None:
    logits = random_logits(2, 30)
    logits[0, 4] = bad
    rows = [{"temperature": temperature, "num_logprobs": 3}] * 2
    result = sample_rows(logits, rows)
    assert result.token_ids[0] == -1
    assert result.token_ids[1] >= 0
    assert result.num_top.tolist() == [0, 3]


def test_everything_banned_gives_no_token() -> None:
    rows = [
        {"banned_ids": list(range(9)), "temperature": t, "top_k": k}
        for t, k in [(0.0, 0), (1.0, 0), (1.0, 3)]
    ]
    assert sample_rows(random_logits(3, 9), rows).token_ids.tolist() == [-1, -1, -1]
