"""Models of other families in our engine, against the same models on their own."""

import asyncio
import random
from itertools import pairwise

import pytest

from lmi_core.engine.engine import Engine
from lmi_core.engine.outputs import FinishReason
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.errors import ModelError, UserError
from lmi_core.settings.transformers_config import TransformersConfig
from lmi_core.text.watermark import watermark_score
from tests.backends.models import FAMILIES, checkpoint, is_greedy, oracle
from tests.checkpoints import cached_checkpoint
from tests.engine.harness import run
from tests.tiny_tokenizer import VOCAB_SIZE

pytest.importorskip("transformers")


def config(family, **more):
    return TransformersConfig(model=checkpoint(family), num_threads=1, **more)


def prompts(count, longest=60):
    draw = random.Random(0)
    return [
        tuple(draw.randrange(4, VOCAB_SIZE) for _ in range(draw.randrange(1, longest)))
        for _ in range(count)
    ]


async def ids_of(engine, prompt, num_tokens=12, **more):
    params = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True, **more)
    return [event.token_id async for event in engine.generate(prompt, params)]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_the_models_own(family):
    """Many at once, of all lengths: padding and company change nothing."""

    async def main():
        async with Engine(config(family, max_num_seqs=5), check_integrity=True) as engine:
            return await asyncio.gather(*(ids_of(engine, prompt, 8) for prompt in prompts(9)))

    outputs = run(main(), 90)
    assert [len(ids) for ids in outputs] == [8] * 9
    assert all(is_greedy(family, *pair) for pair in zip(prompts(9), outputs, strict=True))


@pytest.mark.parametrize("family", ["gpt2", "opt", "mamba"])
def test_chunks_and_preemption_give_the_same_tokens(family):
    """Prompts in chunks of 8 tokens, and a cache of 6 blocks for 4 sequences of up to 3."""
    settings = {"max_num_batched_tokens": 8, "block_size": 16, "max_num_seqs": 4}
    short = prompts(5, longest=14)

    async def main():
        async with Engine(config(family, max_model_len=96, **settings)) as engine:
            info = engine.info.runner
        kv_cache_bytes = 6 * info.kv_cache_bytes // info.num_blocks
        small = config(family, max_model_len=96, kv_cache_bytes=kv_cache_bytes, **settings)
        async with Engine(small, check_integrity=True) as engine:
            outputs = await asyncio.gather(*(ids_of(engine, prompt, 30) for prompt in short))
            return outputs, engine.stats()

    outputs, stats = run(main(), 90)
    assert all(is_greedy(family, *pair) for pair in zip(short, outputs, strict=True))
    assert stats.totals.num_preemptions > 0
    assert stats.num_used_blocks == 0


def test_padding_is_bounded_by_splits():
    """One long and three short sequences: two padded batches, or as many as there may be."""

    async def groups(**settings):
        async with Engine(config("gpt2", **settings)) as engine:
            lengths = (60, 6, 5, 4)
            streams = [
                engine.generate((9,) * n, SamplingParams(max_new_tokens=20, ignore_eos=True))
                for n in lengths
            ]
            for stream in streams:
                await anext(stream)
            await asyncio.gather(*(_read(stream, 3) for stream in streams))
            found = sorted(len(group) for group in engine._parts.runner.groups)
            for stream in streams:
                await stream.aclose()
            return found

    assert run(groups(max_sparsity=0.33)) == [1, 3]
    assert run(groups(max_sparsity=0.33, max_splits=1)) == [4]
    assert run(groups(max_sparsity=1.0)) == [4]
    assert run(groups(max_sparsity=0.0, max_splits=9)) == [1, 1, 1, 1]


async def _read(stream, count):
    for _ in range(count):
        await anext(stream)


def test_bans_and_watermarks_hold_and_beams_are_refused():
    prompt = prompts(1)[0]

    async def main():
        async with Engine(config("gpt2")) as engine:
            with pytest.raises(UserError, match="but sequences of this model share no blocks"):
                await ids_of(engine, prompt, num_beams=2)
            banned = await ids_of(engine, prompt, 30, no_repeat_ngram_size=2)
            marked = await ids_of(engine, prompt, 60, temperature=1.0, seed=1, watermark_delta=8.0)
            return banned, marked

    banned, marked = run(main())
    pairs = list(pairwise([*prompt, *banned]))
    assert len(set(pairs[len(prompt) - 1 :])) == 30
    assert watermark_score([prompt[-1], *marked], VOCAB_SIZE) > 5


@pytest.mark.parametrize("family", ["gpt2", "mamba"])
def test_seeds_decide_what_is_sampled(family):
    sampling = {"temperature": 1.0, "seed": 5, "top_p": 0.9}

    async def main():
        async with Engine(config(family)) as engine:
            alone = await ids_of(engine, (9, 8, 7), **sampling)
            others = [ids_of(engine, prompt, temperature=1.0) for prompt in prompts(3)]
            again, *_ = await asyncio.gather(ids_of(engine, (9, 8, 7), **sampling), *others)
            other = await ids_of(engine, (9, 8, 7), **{**sampling, "seed": 6})
            return alone, again, other

    alone, again, other = run(main())
    assert alone == again != other


def test_the_native_engines_seeds_give_the_same_tokens():
    """A family that both know: same logits but for rounding, same random numbers."""
    model = cached_checkpoint("llama2")
    sampling = {"temperature": 0.8, "seed": 11}

    async def main():
        async with Engine(model) as native, Engine(TransformersConfig(model=model)) as other:
            return [await ids_of(engine, (9, 8, 7), **sampling) for engine in (native, other)]

    native, other = run(main())
    assert native == other


@pytest.mark.parametrize("family", ["gpt2", "bloom"])
def test_log_probabilities_of_prompt_and_output(family):
    import torch

    prompt = prompts(1)[0][:20]

    async def main():
        async with Engine(config(family, max_num_batched_tokens=32, max_num_seqs=2)) as engine:
            params = SamplingParams(max_new_tokens=3, logprobs=2, prompt_logprobs=1)
            return [event async for event in engine.generate(prompt, params, echo=True)]

    first, *tokens = run(main())
    ids = [*prompt, *(event.token_id for event in tokens)]
    with torch.inference_mode():
        expected = oracle(family)(torch.tensor([ids])).logits[0].log_softmax(-1)
    scored = [token.logprob for token in first.prompt]
    assert scored[0] is None
    own = [float(expected[i, ids[i + 1]]) for i in range(len(ids) - 1)]
    assert scored[1:] == pytest.approx(own[: len(prompt) - 1], abs=1e-3)
    assert [e.logprob for e in tokens] == pytest.approx(own[len(prompt) - 1 :], abs=1e-3)
    assert all(len(event.top) == 2 for event in tokens)


def test_choices_stops_and_abort():
    async def main():
        async with Engine(config("gpt2"), check_integrity=True) as engine:
            params = SamplingParams(max_new_tokens=6, n=3, temperature=1.0, seed=3)
            choices = {}
            async for event in engine.generate("A fox", params):
                choices.setdefault(event.choice, []).append(event.token_id)
            endless = SamplingParams(max_new_tokens=100, ignore_eos=True)
            stream = engine.generate("A fox", endless)
            text = ""
            for _ in range(20):
                text += (await anext(stream)).text
            await stream.aclose()
            stop = text.strip()[3:6]
            events = [
                event
                async for event in engine.generate(
                    "A fox", SamplingParams(max_new_tokens=100, ignore_eos=True, stop=(stop,))
                )
            ]
            return choices, text, stop, events

    choices, text, stop, events = run(main())
    assert sorted(choices) == [0, 1, 2]
    assert len({tuple(ids) for ids in choices.values()}) == 3
    assert events[-1].finish_reason is FinishReason.STOP
    assert "".join(event.text for event in events) == text[: text.index(stop)]


def test_a_failed_call_fails_its_requests_only(monkeypatch):
    async def main():
        async with Engine(config("gpt2")) as engine:
            model = engine._parts.runner._model._model
            monkeypatch.setattr(model, "forward", _broken, raising=True)
            with pytest.raises(Exception, match="out of something"):
                await ids_of(engine, (9, 8))
            monkeypatch.undo()
            return await ids_of(engine, (9, 8))

    assert is_greedy("gpt2", (9, 8), run(main()))


def _broken(*args, **kwargs):
    raise RuntimeError("out of something")


def test_what_cannot_be_served(tmp_path):
    async def start(settings):
        async with Engine(settings):
            pass

    with pytest.raises(UserError, match="longer than the model's 256 positions"):
        run(start(config("gpt2", max_model_len=257)))
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.json").write_text('{"model_type": "t5", "architectures": ["T5Model"]}')
    with pytest.raises(ModelError, match="Transformers can't load the model"):
        run(start(TransformersConfig(model=empty)))


def test_data_types():
    async def dtype_of(**settings):
        async with Engine(config("gpt2", **settings)) as engine:
            assert len(await ids_of(engine, (9, 8), 2)) == 2
            return engine.info.runner.dtype

    assert run(dtype_of()) == "float32"
    assert run(dtype_of(torch_dtype="bfloat16")) == "bfloat16"
