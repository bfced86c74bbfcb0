"""Copies as processes: the bits of one engine, also when a copy is killed while it runs them."""

from __future__ import annotations

import asyncio
import math
import os
import signal
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lmi_core.copies import machines
from lmi_core.copies.copies import Copies
from lmi_core.copies.process import CopyProcess
from lmi_core.demo import MODEL_DIR
from lmi_core.engine.engine import Engine
from lmi_core.engine.outputs import TokenEvent
from lmi_core.engine.pooling_params import PoolingParams
from lmi_core.engine.request import GenerationRequest
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.errors import (
    CapacityError,
    EngineError,
    LmiError,
    ModelError,
    TooManyCopiesError,
    UserError,
)
from lmi_core.settings.engine_config import EngineConfig
from lmi_core.structured.grammar import Grammar
from tests.engine.harness import until
from tests.pooled_checkpoints import encoder

pytestmark = pytest.mark.timeout(120)

CONFIG = EngineConfig(
    model=MODEL_DIR, num_threads=1, max_num_seqs=6, kv_cache_bytes=8 << 20, max_model_len=512
)
LENGTH = 32


def requests() -> list[GenerationRequest]:
    """Every way to choose tokens, more of them than copies have rows."""
    plain = SamplingParams(max_new_tokens=LENGTH, ignore_eos=True)
    sampled = replace(plain, temperature=1.0)
    kinds = [
        plain,
        sampled,
        replace(sampled, top_k=20, top_p=0.9, seed=7),
        replace(sampled, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2),
        replace(plain, logprobs=2),
        replace(sampled, n=3, logprobs=0),
        replace(plain, stop=("e", " of the"), min_new_tokens=20),
        replace(sampled, grammar=Grammar.regex("[a-z ]{20,60}"), ignore_eos=False),
        replace(plain, prompt_logprobs=1),
        replace(sampled, logit_bias=((5, 4.0),), banned_token_ids=(9,)),
    ]
    return [
        GenerationRequest(
            request_id=str(number),
            prompt=f"Once upon a time, {number} people",
            params=kinds[number % len(kinds)],
        )
        for number in range(16)
    ]


async def read(source: Engine | Copies, request: GenerationRequest) -> list[TokenEvent]:
    return [event async for events in source.generate_batches(request) for event in events]


def comparable(events: list[TokenEvent]) -> list[TokenEvent]:
    """What doesn't depend on what else runs, choice by choice."""
    alike = [replace(event, num_cached_tokens=0, queue_seconds=0.0) for event in events]
    return sorted(alike, key=lambda event: (event.choice, event.num_generated_tokens))


async def expected() -> list[list[TokenEvent]]:
    async with Engine(CONFIG) as engine:
        return [comparable(await read(engine, request)) for request in requests()]


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 100))


def test_a_killed_copy_costs_no_bit_and_is_replaced() -> None:
    async def main() -> None:
        seeded = [
            replace(one, params=replace(one.params, seed=number))
            for number, one in enumerate(requests())
        ]
        async with Engine(CONFIG) as engine:
            reference = [comparable(await read(engine, request)) for request in seeded]
            weight_bytes = engine.info.runner.weight_bytes
        async with Copies(CONFIG, 2) as copies:
            # On a busy machine a copy can be through before it is seen to have begun.
            for _ in range(5):
                streams = [asyncio.create_task(read(copies, request)) for request in seeded]
                target = copies.num_tokens + 50
                await until(lambda: copies.num_tokens >= target, 60)  # noqa: B023
                first, second = copies.copies
                os.kill(first.pid, signal.SIGKILL)
                answers = await asyncio.gather(*streams)
                assert [comparable(events) for events in answers] == reference
                await until(lambda: first not in copies.copies and not copies.lacks_workers, 60)  # noqa: B023
                assert second in copies.copies
                if copies.num_resumed:
                    break
            assert copies.num_resumed > 0
            # A checkpoint as small as this one isn't kept packed, so that each copy has its own.
            assert copies.info.runner.weight_bytes == 2 * weight_bytes
            assert copies.healthy
            await until(lambda: copies.stats().num_running == 0, 60)

    run(main())


def test_errors_are_those_of_an_engine(tmp_path: Path) -> None:
    async def main() -> None:
        async with Engine(CONFIG) as engine, Copies(CONFIG, 1) as copies:
            for params in (
                SamplingParams(top_p=2.0),
                SamplingParams(grammar=Grammar.regex("(")),
                SamplingParams(n=500),
            ):
                request = GenerationRequest(request_id="x", prompt="Hello", params=params)
                errors = []
                for source in (engine, copies):
                    with pytest.raises(UserError) as caught:
                        await read(source, request)
                    errors.append((str(caught.value), caught.value.field))
                assert errors[0] == errors[1]
            assert not len(copies._dispatch)

    run(main())


def test_a_copy_that_cannot_start_ends_the_start_with_its_error(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((MODEL_DIR / name).read_bytes())

    async def main() -> None:
        with pytest.raises(ModelError, match="tokenizer"):
            async with Copies(replace(CONFIG, model=tmp_path), 2):
                pass

    run(main())


def test_a_copy_that_is_killed_while_it_loads_says_by_what() -> None:
    async def main() -> None:
        copies = Copies(CONFIG, 2)
        starting = asyncio.create_task(copies.__aenter__())

        def processes() -> list[CopyProcess]:
            found = [place._process for place in copies._supervisor._places]
            return [one for one in found if one is not None and one.link._process is not None]

        await until(lambda: bool(processes()), 60)
        processes()[0].kill()
        with pytest.raises(
            EngineError, match=r"while it loaded the model \(signal 9\).*fewer copies"
        ):
            await starting

    run(main())


@pytest.mark.parametrize(("device", "number"), [("torch-cpu", 2), ("cpu", 0)])
def test_what_has_no_copies_is_refused_by_name(device: Any, number: int) -> None:
    async def main() -> None:
        async with Copies(replace(CONFIG, device=device), number):
            pass

    with pytest.raises(LmiError, match="num_copies"):
        asyncio.run(main())


def test_copies_of_ranks_have_a_core_for_each_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "num_own_cores", lambda degree: 5 // degree)
    config, machine = replace(CONFIG, tensor_parallel_degree=2), machines.ThisMachine()
    machine.claim(config, 2)
    machine.release()
    with pytest.raises(
        TooManyCopiesError, match=r"3 copies .* need 6 cores.* there are 5: at most 2"
    ):
        machine.claim(config, 3)


def test_another_number_of_copies_loses_no_request() -> None:
    async def main() -> None:
        config = replace(CONFIG, num_threads=None)
        reference = await expected()
        async with Copies(config, 1) as copies:
            streams = [asyncio.create_task(read(copies, one)) for one in requests()[:6]]
            await copies.scale(2, 2)
            assert copies.lacks_workers
            await until(lambda: len(copies.copies) == 2 and not copies._supervisor.is_scaling, 60)
            answers = await asyncio.gather(*streams)
            assert [comparable(events) for events in answers] == reference[:6]
            await copies.scale(0, 2)
            await until(lambda: len(copies.copies) == 1 and not copies._supervisor.is_scaling, 60)

    run(main())


def test_what_may_wait_as_long_as_it_takes_does_in_a_copy_too() -> None:
    """Though the engine's own limit is over before anything begins."""

    async def main() -> None:
        config = replace(CONFIG, max_num_seqs=1, max_queue_s=1e-9)
        *asked, last = [one for one in requests() if one.params.n == 1][:7]
        async with Copies(config, 2) as copies:
            # Copies that stand still take in two each, so that the others wait for them.
            for copy in copies.copies:
                os.kill(copy.pid, signal.SIGSTOP)
            patient = [read(copies, replace(one, max_queue_s=math.inf)) for one in asked]
            answers = asyncio.gather(*patient)
            await until(lambda: copies._dispatch.num_waiting == 2, 60)
            with pytest.raises(CapacityError, match="max_queue_s"):
                await read(copies, last)
            for copy in copies.copies:
                os.kill(copy.pid, signal.SIGCONT)
            finished = [events[-1].finish_reason for events in await answers]
        assert len(finished) == len(asked)
        assert None not in finished

    run(main())


def test_embeddings_and_scores_by_copies() -> None:
    """As one engine's, also of pairs whose second text has another type."""
    model = encoder("bert", "AutoModelForSequenceClassification")
    config = EngineConfig(model=model, num_threads=1, max_num_seqs=4, kv_cache_bytes=8 << 20)
    asked = [
        GenerationRequest(
            request_id=str(number),
            prompt="Once upon a time " * number,
            pooling=PoolingParams(text_pair="there was " + "a king " * number),
        )
        for number in range(1, 5)
    ]

    async def pooled(backend: Engine | Copies) -> list[bytes]:
        async def one(request: GenerationRequest) -> bytes:
            [[event]] = [events async for events in backend.generate_batches(request)]
            assert event.pooled is not None
            return event.pooled.tobytes()

        async with backend:
            return await asyncio.gather(*map(one, asked))

    alone = asyncio.run(pooled(Engine(config)))
    assert len(set(alone)) == len(asked)
    assert asyncio.run(pooled(Copies(config, 2))) == alone
