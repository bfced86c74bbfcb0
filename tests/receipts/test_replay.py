"""Recorded requests are answered as they were, whatever else runs; what differs is named."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from lmi_core.chat.answer import RemoteSource
from lmi_core.engine.engine import Engine
from lmi_core.engine.request import GenerationRequest
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.errors import UserError
from lmi_core.http_url import HttpUrl
from lmi_core.receipts.command import replay_all
from lmi_core.receipts.receipt import Receipt, encode, read_receipts
from lmi_core.receipts.replay import LocalEngine, RemoteServer, Source, completion_body
from lmi_core.settings.engine_config import EngineConfig
from lmi_core.settings.lora_config import LoraConfig
from lmi_core.structured.grammar import Grammar
from lmi_server.http.metrics import Metrics
from lmi_server.models.recorded import RecordedEngine
from tests.checkpoints import cached_checkpoint
from tests.cli.test_native import lmi
from tests.lora_adapters import cached_adapter
from tests.server.harness import serving_backend
from tests.tiny_tokenizer import VOCAB_SIZE

NUM_RECEIPTS = 24
NUM_BLOCKS = 14
"""Of the small pool; the longest request fills ten."""


def config_of(model: Path, **changes: object) -> EngineConfig:
    settings = {"model": model, "max_model_len": 160, "block_size": 16, "num_threads": 1}
    return EngineConfig(**{**settings, **changes})  # type: ignore[arg-type]


def requests() -> list[GenerationRequest]:
    rng = random.Random(5)
    prefix = [rng.randrange(4, VOCAB_SIZE) for _ in range(40)]
    made = []
    for number in range(NUM_RECEIPTS):
        prompt = [rng.randrange(4, VOCAB_SIZE) for _ in range(rng.choice([1, 16, 33, 60]))]
        params = SamplingParams(
            max_new_tokens=rng.choice([1, 9, 30, 50]),
            temperature=rng.choice([0.0, 0.8]),
            top_p=rng.choice([1.0, 0.9]),
            repetition_penalty=rng.choice([1.0, 1.2]),
            logit_bias=((7, 2.5),) if number % 5 == 0 else (),
            stop_token_ids=tuple(range(number, VOCAB_SIZE, 30)) if number % 4 == 0 else (),
            n=2 if number % 6 == 0 else 1,
            logprobs=2 if number % 3 == 0 else None,
        )
        ids = tuple(prefix + prompt if number % 2 else prompt)
        made.append(GenerationRequest(request_id=f"r{number}", prompt_token_ids=ids, params=params))
    return made


async def record(engine: Engine, asked: Sequence[GenerationRequest]) -> list[Receipt]:
    kept: list[Receipt] = []
    recorded = RecordedEngine(engine, "m", kept.append)
    for request in asked:
        async for _ in recorded.generate_batches(request):
            pass
    # As they come back from a file.
    return [msgspec.json.decode(encode(receipt), type=Receipt) for receipt in kept]


async def differences(
    source: Source, receipts: Sequence[Receipt], parallel: int = 16
) -> list[str | None]:
    located = [(receipt.request_id, receipt) for receipt in receipts]
    return [what for _, what in await replay_all(source, located, parallel=parallel, seed=3)]


def test_equal_under_random_load_with_preemption_and_cache_hits() -> None:
    model = cached_checkpoint("llama2")

    async def run() -> None:
        async with Engine(config_of(model, max_num_seqs=1)) as engine:
            receipts = await record(engine, requests())
            block_bytes = engine.info.runner.kv_cache_bytes // engine.info.runner.num_blocks
        assert len(receipts) == NUM_RECEIPTS
        small = config_of(model, max_num_seqs=16, kv_cache_bytes=NUM_BLOCKS * block_bytes)
        async with Engine(small, check_integrity=True) as engine:
            assert await differences(LocalEngine(engine), receipts) == [None] * NUM_RECEIPTS
            totals = engine.stats().totals
            assert totals.num_preemptions > 0
            assert totals.num_cached_tokens > 0

    asyncio.run(run())


def test_equal_of_a_server() -> None:
    async def run() -> None:
        async with (
            Engine(config_of(cached_checkpoint("llama2"))) as engine,
            serving_backend(engine, Metrics(), model_name="m") as served,
        ):
            beams = SamplingParams(num_beams=3, n=2, length_penalty=0.5, max_new_tokens=9)
            bans = SamplingParams(no_repeat_ngram_size=1, bad_words=("a", "in"), max_new_tokens=20)
            more = [
                replace(requests()[1], request_id=name, params=params)
                for name, params in (("beams", beams), ("bans", bans))
            ]
            receipts = await record(engine, [*requests(), *more])
            url = HttpUrl.parse(f"http://127.0.0.1:{served.port}")
            server = RemoteServer(RemoteSource(url, "m"))
            assert await differences(server, receipts) == [None] * (NUM_RECEIPTS + 2)
            answer = await served.post({"prompt": "a", "max_tokens": 1}, "/v1/completions")
            assert json.loads(answer.body)["system_fingerprint"] == engine.fingerprint
            receipts[3].choices[0].token_ids[0] += 1
            (what,) = await differences(server, receipts[3:4])
            assert what is not None
            assert what.startswith("token 0: ")
            assert "so this is a fault" in what

    asyncio.run(run())


def test_what_was_cut_off_is_compared_as_far_as_it_came() -> None:
    async def run() -> None:
        async with (
            Engine(config_of(cached_checkpoint("llama2"))) as engine,
            serving_backend(engine, Metrics(), model_name="m") as served,
        ):
            kept: list[Receipt] = []
            recorded = RecordedEngine(engine, "m", kept.append)
            params = SamplingParams(max_new_tokens=100, ignore_eos=True, temperature=0.8, n=2)
            stream = recorded.generate_batches(
                GenerationRequest(request_id="r", prompt_token_ids=(5, 6), params=params)
            )
            async for _ in stream:
                break
            await stream.aclose()
            assert [choice.finish_reason for choice in kept[0].choices] == ["abort"] * 2
            assert 0 < kept[0].num_tokens < 100
            server = RemoteServer(
                RemoteSource(HttpUrl.parse(f"http://127.0.0.1:{served.port}"), "m")
            )
            for source in (LocalEngine(engine), server):
                assert await differences(source, kept) == [None]
            kept[0].choices[0].logprobs[0] = -9.0
            (what,) = await differences(LocalEngine(engine), kept)
            assert what is not None
            assert what.startswith("choice 0, token 0: log-probability -9.0 was recorded")

    asyncio.run(run())


def test_the_first_difference_is_named_with_its_cause() -> None:
    model = cached_checkpoint("llama2")
    asked = [r for r in requests() if r.params.n == 1 and (r.params.max_new_tokens or 0) > 5][:4]

    async def run() -> None:
        async with Engine(config_of(model)) as engine:
            receipts = await record(engine, asked)
            choice = receipts[1].choices[0]
            recorded, choice.logprobs[2] = choice.logprobs[2], -1.0
            equal, wrong, *_ = await differences(LocalEngine(engine), receipts)
            assert equal is None
            text = f"token 2: log-probability -1.0 was recorded, {recorded} came"
            assert wrong is not None
            assert text in wrong
        async with Engine(config_of(model, quantize="int8")) as engine:
            whats = await differences(LocalEngine(engine), receipts)
            assert all(what and "; other formats than then" in what for what in whats)
        async with Engine(config_of(cached_checkpoint("qwen2"))) as engine:
            (what,) = await differences(LocalEngine(engine), receipts[:1])
            assert what is not None
            assert what.endswith("; other weights than then")

    asyncio.run(run())


def test_another_adapter_of_the_name_is_told() -> None:
    model = cached_checkpoint("llama2")

    async def run() -> None:
        lora = LoraConfig(adapters=(("a", cached_adapter("llama2", 0)),))
        asked = [
            GenerationRequest(
                request_id="r",
                prompt_token_ids=(5, 6, 7),
                params=SamplingParams(max_new_tokens=8),
                adapter="a",
            )
        ]
        async with Engine(config_of(model, lora=lora)) as engine:
            receipts = await record(engine, asked)
            assert receipts[0].adapter_digest == engine.adapter_digest("a") != ""
            assert await differences(LocalEngine(engine), receipts) == [None]
            await engine.unload_adapter("a")
            await engine.load_adapter("a", cached_adapter("llama2", 1))
            (what,) = await differences(LocalEngine(engine), receipts)
            assert what is not None
            assert what.endswith("; adapter a has other files than then")
            await engine.unload_adapter("a")
            (what,) = await differences(LocalEngine(engine), receipts)
            assert what is not None
            assert "can't be asked again: Adapter a is not registered" in what

    asyncio.run(run())


def test_what_http_has_no_words_for_is_said() -> None:
    plain = Receipt(request_id="r", time_s=0, model="m", num_prompt_tokens=1, choices=[])
    lark = msgspec.to_builtins(Grammar.lark("start: /a+/"))
    for params, word in (
        ({"banned_token_ids": [3]}, "suppress_tokens"),
        ({"bad_words_ids": [[3]], "penalty_alpha": 0.6, "top_k": 4}, "bad_words_ids, penalty_alp"),
        ({"watermark_delta": 2.0}, "for watermark"),
        ({"processors": {"epsilon_cutoff": 0.1}}, "processors"),
        ({"stop": ["a"], "kept_special_tokens": ["</s>"]}, "kept_special_tokens"),
        ({"grammar": lark}, "tool call"),
    ):
        receipt = msgspec.structs.replace(plain, params=params)
        with pytest.raises(UserError, match=word):
            completion_body(receipt, "m")


def test_the_command_says_how_many_are_equal(tmp_path: Path) -> None:
    model = cached_checkpoint("llama2")

    async def run() -> list[Receipt]:
        async with Engine(config_of(model)) as engine:
            return await record(engine, requests()[:6])

    receipts = asyncio.run(run())
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"".join(map(encode, receipts)) + encode(receipts[0].redacted()))
    flags = ("--max-model-len", "160", "--option", "block_size=16", "--option", "num_threads=1")
    result = lmi("replay", str(path), str(model), *flags)
    assert result.stdout.endswith("6 equal, 0 not, 1 can't be replayed\n"), result.stderr
    assert f"{path}:7: redacted\n" in result.stdout
    assert result.returncode == 0
    receipts[2].choices[0].token_ids[0] ^= 1
    receipts[4] = msgspec.structs.replace(receipts[4], adapter="gone", adapter_digest="0")
    path.write_bytes(b"".join(map(encode, receipts)))
    result = lmi("replay", str(path), str(model), *flags)
    assert result.returncode == 1
    assert f"{path}:3: token 0: " in result.stdout
    assert result.stdout.endswith("4 equal, 1 not, 1 can't be replayed\n")
    assert len(list(read_receipts(path))) == 6
