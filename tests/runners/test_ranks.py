"""Models that several processes compute together: the same answers, and clear ends."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from lmi_core.demo import MODEL_DIR
from lmi_core.engine.engine import Engine
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.errors import EngineError, ModelError, UserError
from lmi_core.models.found_model import find_model
from lmi_core.models.slices import cut
from lmi_core.runners.cpu.cpu_runner import CpuRunner
from lmi_core.runners.cpu.ranks import RankProcess
from lmi_core.settings.engine_config import EngineConfig
from tests.checkpoints import cached_checkpoint, make_checkpoint
from tests.engine.test_invariance import Outcome, Request, make_requests, outcome, together
from tests.gguf_files import llama_metadata, llama_tensors, write_gguf
from tests.integer_checkpoints import FORMS, make_integer_checkpoint
from tests.models.test_expert_layouts import mxfp4_experts, write
from tests.tiny_tokenizer import write_tokenizer

GREEDY = SamplingParams(max_new_tokens=16, ignore_eos=True, temperature=0, logprobs=3)
SAMPLED = SamplingParams(max_new_tokens=16, ignore_eos=True, temperature=1.1, seed=3, logprobs=3)
REQUESTS = [
    Request(tuple(range(5, 45)), GREEDY),
    Request((7, 300, 12), SAMPLED),
    Request(tuple(range(3, 290)), GREEDY),
]


def config_of(model: Path, degree: int, **changes: object) -> EngineConfig:
    settings = {
        "model": model,
        "max_model_len": 480,
        "block_size": 16,
        "kv_cache_bytes": 16 << 20,
        "num_threads": 1,
        "tensor_parallel_degree": degree,
        "repack_cache_dir": "none",
        **changes,
    }
    return EngineConfig(**settings)  # type: ignore[arg-type]


async def _answers(config: EngineConfig, requests: list[Request]) -> list[Outcome]:
    async with Engine(config, check_integrity=True) as engine:
        return await asyncio.gather(*(outcome(engine, request) for request in requests))


def answers(config: EngineConfig, requests: list[Request] = REQUESTS) -> list[Outcome]:
    return asyncio.run(_answers(config, requests))


def assert_near(sliced: list[Outcome], whole: list[Outcome]) -> None:
    """The same tokens, whose log-probabilities are equal up to 1e-4."""
    for ours, theirs in zip(sliced, whole, strict=True):
        assert [token for token, *_ in ours] == [token for token, *_ in theirs]
        for (_, ours_p, ours_top), (_, theirs_p, theirs_top) in zip(ours, theirs, strict=True):
            assert ours_p == pytest.approx(theirs_p, abs=1e-4)
            assert dict(ours_top) == pytest.approx(dict(theirs_top), abs=1e-4)


@pytest.mark.parametrize(
    "family", ["llama3", "gemma2", "falcon_rw", "gpt_oss", "qwen2_moe", "deepseek_v3", "olmoe"]
)
def test_every_degree_gives_the_same_tokens(family: str) -> None:
    model = cached_checkpoint(family)
    whole = answers(config_of(model, 1, dtype="fp32"))
    for degree in (2, 4) if family == "llama3" else (2,):
        assert_near(answers(config_of(model, degree, dtype="fp32")), whole)


@pytest.mark.parametrize(
    ("family", "quantize"),
    [
        ("llama3", "smoothquant"),
        ("llama_bias", "int8"),
        ("llama_tied", "int4"),
        ("gpt_oss", "int8"),
        ("deepseek_v3", None),
        ("olmo2", None),
    ],
)
def test_invariant_sums_have_the_same_bits_at_every_degree(
    family: str, quantize: str | None
) -> None:
    model = cached_checkpoint(family)

    def at(degree: int, num_threads: int = 1) -> list[Outcome]:
        settings = {"dtype": "bf16", "quantize": quantize, "tp_invariant": True}
        return answers(config_of(model, degree, num_threads=num_threads, **settings))

    whole = at(1)
    assert at(4) == whole
    assert at(1, num_threads=16) == whole
    if family in ("llama3", "gpt_oss"):
        assert at(2) == whole


@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "gpt_oss", "qwen2_moe"])
def test_two_ranks_have_the_bits_of_one(family: str, quantize: str | None) -> None:
    """Of latent attention, sinks and experts that all rows share, too."""
    settings = {"dtype": "fp32", "quantize": quantize, "tp_invariant": True}
    model = cached_checkpoint(family)
    assert answers(config_of(model, 2, **settings)) == answers(config_of(model, 1, **settings))


def test_experts_in_mxfp4_are_cut_between_blocks(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", "gpt_oss", intermediate_size=128)
    blocks, _ = mxfp4_experts(source)
    settings = {"quantization_config": {"quant_method": "mxfp4"}}
    model = write(tmp_path / "mxfp4", source, blocks, **settings)
    write_tokenizer(model)
    whole = answers(config_of(model, 1, tp_invariant=True))
    for degree in (2, 4):
        assert answers(config_of(model, degree, tp_invariant=True)) == whole


@pytest.mark.parametrize(
    ("degree", "sizes"),
    [
        (8, {"num_attention_heads": 8, "vocab_size": 300 + 87}),
        (3, {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}),
        (2, {"intermediate_size": 97}),
    ],
    ids=["more ranks than key heads", "three ranks", "a prime MLP"],
)
def test_sizes_that_are_no_powers_of_two(
    degree: int, sizes: dict[str, int], tmp_path: Path
) -> None:
    model = make_checkpoint(tmp_path / "model", "llama3", **sizes)
    whole = answers(config_of(model, 1), REQUESTS[:2])
    assert_near(answers(config_of(model, degree), REQUESTS[:2]), whole)


@pytest.mark.parametrize("form", ["gptq", "awq"])
def test_stored_codes_are_cut_at_their_groups(tmp_path: Path, form: str) -> None:
    path, _ = make_integer_checkpoint(tmp_path / "even", FORMS[form], intermediate_size=256)
    whole = answers(config_of(path, 1, activations="bf16"))
    sliced = answers(config_of(path, 2, activations="bf16"))
    for ours, theirs in zip(sliced, whole, strict=True):
        assert ours[0][1] == pytest.approx(theirs[0][1], abs=0.1)
    odd, _ = make_integer_checkpoint(tmp_path / "odd", FORMS[form])
    with pytest.raises(ModelError, match=r"down_proj.* can't be cut .* whole groups of 32"):
        answers(config_of(odd, 2))


def test_blocks_of_gguf_are_cut_between_them(tmp_path: Path) -> None:
    metadata = llama_metadata(MODEL_DIR, pre="smollm")
    path = write_gguf(tmp_path / "demo.gguf", metadata, llama_tensors(MODEL_DIR, "Q8_0"))
    invariant = {"tp_invariant": True, "max_model_len": 256}
    requests = REQUESTS[:2]
    whole = answers(config_of(path, 1, **invariant), requests)
    assert answers(config_of(path, 2, **invariant), requests) == whole


def test_neighbours_change_no_bits() -> None:
    requests = make_requests(seed=5)[:12]
    config = config_of(
        cached_checkpoint("llama3"), 2, dtype="bf16", max_num_batched_tokens=96, max_num_seqs=32
    )

    async def alone() -> list[Outcome]:
        async with Engine(config) as engine:
            return [await outcome(engine, request) for request in requests]

    async def beside() -> list[Outcome]:
        results, _ = await together(config, requests, seed=1)
        return results

    assert asyncio.run(beside()) == asyncio.run(alone())


def test_a_lost_rank_ends_requests_and_nothing_hangs() -> None:
    params = SamplingParams(max_new_tokens=400, ignore_eos=True, temperature=0)

    async def main() -> None:
        async with Engine(config_of(cached_checkpoint("llama3"), 2)) as engine:
            assert engine._parts is not None
            runner = engine._parts.runner
            assert isinstance(runner, CpuRunner)
            assert runner._ranks is not None
            events = engine.generate((5, 6, 7), params)
            await anext(events)
            [pid] = runner._ranks.pids
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(EngineError, match=r"rank 1 of 2 ended \(signal 9\)"):
                async for _ in events:
                    pass
            assert not engine.healthy
            with pytest.raises(EngineError):
                await outcome(engine, REQUESTS[0])

    asyncio.run(asyncio.wait_for(main(), 100))


def test_a_rank_that_fails_to_load_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmi_core.runners.cpu.ranks._BOOT", "import sys; sys.exit(3)")
    with pytest.raises(EngineError, match=r"rank 1 ended while it loaded .*exit status 3"):
        answers(config_of(cached_checkpoint("llama3"), 2))


def test_a_rank_that_ends_while_it_serves_is_not_said_to_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lmi_core.runners.cpu.ranks._BOOT", "import sys; sys.exit(3)")
    process = RankProcess(1)
    with pytest.raises(EngineError, match=r"ended while it loaded .*exit status 3"):
        process.receive()
    process.is_loading = False
    with pytest.raises(EngineError, match=r"rank 1 ended \(exit status 3\)"):
        process.receive()
    process.end()


@pytest.mark.parametrize(
    ("family", "degree", "changes", "words"),
    [
        ("llama3", 3, {}, "4 attention heads, 2 of keys and values, .* 96; allowed are 1, 2, 4"),
        ("llama3", 8, {"tp_invariant": True}, "sums over 4 slices; allowed are 1, 2, 4"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(
    family: str, degree: int, changes: dict[str, object], words: str
) -> None:
    config = config_of(cached_checkpoint(family), degree, **changes)
    with pytest.raises(UserError, match=words):
        find_model(config)


def test_slices_are_whole_units_and_nearly_equal() -> None:
    assert cut(11008, 4, 128) == ((0, 2688), (2688, 5504), (5504, 8192), (8192, 11008))
    assert cut(100, 2, 64) == ((0, 64), (64, 100))
