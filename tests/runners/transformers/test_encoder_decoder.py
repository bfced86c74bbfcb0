"""Encoder-decoders in our engine, against ``generate`` of the same models."""

import asyncio
import random

import pytest

from lmi_core.engine.engine import Engine
from lmi_core.engine.logits_processors import LogitsProcessors
from lmi_core.engine.outputs import FinishReason
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.errors import UserError
from lmi_core.settings.transformers_config import TransformersConfig
from tests.backends.models import ENCODER_DECODERS, checkpoint, oracle
from tests.engine.harness import run
from tests.tiny_tokenizer import EOS_ID, VOCAB_SIZE

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")


def config(family, **more):
    return TransformersConfig(model=checkpoint(family), num_threads=1, **more)


def prompts(count):
    draw = random.Random(0)
    return [
        tuple(draw.randrange(4, VOCAB_SIZE) for _ in range(draw.randrange(1, 60)))
        for _ in range(count)
    ]


def greedy(family, prompt, num_tokens):
    """What ``generate`` gives, without the start and what is forced to follow it."""
    ids = oracle(family).generate(
        torch.tensor([prompt]), max_new_tokens=num_tokens + 1, min_new_tokens=num_tokens + 1
    )[0]
    num_first = 2 if family == "bart" else 1
    return ids[num_first : num_first + num_tokens].tolist()


async def ids_of(engine, prompt, num_tokens, **more):
    params = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True, **more)
    return [event.token_id async for event in engine.generate(prompt, params)]


@pytest.mark.parametrize("family", ENCODER_DECODERS)
def test_greedy_tokens_are_those_of_generate(family):
    """Prompts and outputs of all lengths side by side, more than run at once."""
    asked = [(prompt, 6 + i) for i, prompt in enumerate(prompts(9))]

    async def main():
        async with Engine(config(family, max_num_seqs=5), check_integrity=True) as engine:
            return await asyncio.gather(*(ids_of(engine, *pair) for pair in asked))

    assert run(main(), 90) == [greedy(family, *pair) for pair in asked]


def test_the_longest_output_ends_as_the_model_forces_it_to():
    """Also where fewer tokens than it were to have no end."""

    async def main():
        async with Engine(config("bart")) as engine:
            params = SamplingParams(max_new_tokens=6, min_new_tokens=6)
            return [event async for event in engine.generate((9, 8, 7), params)]

    events = run(main())
    assert [event.token_id for event in events] == greedy("bart", (9, 8, 7), 6)
    assert events[-1].token_id == EOS_ID
    assert events[-1].finish_reason is FinishReason.EOS


def test_a_prompt_in_chunks_is_read_as_one():
    """Chunks of 8 tokens, and a cache that holds two of four sequences: nobody is preempted, since
    an output can't be computed again as part of its prompt."""
    settings = {"max_num_batched_tokens": 8, "block_size": 16, "max_num_seqs": 4}

    async def main():
        async with Engine(config("t5", max_model_len=96, **settings)) as engine:
            info = engine.info.runner
        num_bytes = 12 * info.kv_cache_bytes // info.num_blocks
        small = config("t5", max_model_len=96, kv_cache_bytes=num_bytes, **settings)
        async with Engine(small, check_integrity=True) as engine:
            outputs = await asyncio.gather(*(ids_of(engine, p, 30) for p in prompts(5)))
            return outputs, engine.stats()

    outputs, stats = run(main(), 90)
    assert outputs == [greedy("t5", prompt, 30) for prompt in prompts(5)]
    assert stats.totals.num_preemptions == 0


def test_a_prompts_tokens_have_no_log_probabilities():
    async def main():
        async with Engine(config("t5")) as engine:
            await ids_of(engine, (5, 6), 2, prompt_logprobs=1)

    with pytest.raises(UserError, match="encoder reads the prompt") as raised:
        run(main())
    assert raised.value.field == "prompt_logprobs"


def test_learned_positions_bound_a_sequence_and_relative_ones_do_not():
    async def main():
        async with Engine(config("bart")) as bart, Engine(config("t5", max_model_len=700)) as t5:
            return bart.max_model_len, t5.max_model_len

    assert run(main()) == (128, 700)


EVEN = tuple(range(0, VOCAB_SIZE, 2))
OWN = ("repetition_penalty", "no_repeat_ngram_size")
CHANGES = (
    {"repetition_penalty": 3.0},
    {"no_repeat_ngram_size": 2},
    {"encoder_no_repeat_ngram_size": 1},
    {"encoder_repetition_penalty": 0.1},
    {"begin_suppress_tokens": EVEN},
    {"forced_bos_token_id": 33, "begin_suppress_tokens": EVEN},
    {"exponential_decay_length_penalty": (3, 1.7)},
)


def changed(family, prompt, asked):
    """Ten tokens of what ``generate`` gives, as above, or up to the end."""
    ends = asked.get("exponential_decay_length_penalty") and EOS_ID
    plain = {name: list(v) if isinstance(v, tuple) else v for name, v in asked.items()}
    if biases := plain.pop("sequence_bias", ()):
        plain["sequence_bias"] = [[list(ids), bias] for ids, bias in biases]
    model = oracle(family)
    ids = model.generate(
        torch.tensor([prompt]), max_new_tokens=30, **{"eos_token_id": ends, **plain}
    )
    num_first = 2 if family == "bart" else 1
    return ids[0, num_first : num_first + 10].tolist()


@pytest.mark.parametrize(("family", "numbers"), [("t5", (6, 14)), ("bart", (7, 16))])
def test_penalties_and_processors_are_those_of_generate(family, numbers):
    """Which see what an output began with, and of the prompt what is said to be the encoder's. A
    token that a request forces comes in the place of the model's."""
    asked = [prompts(20)[number] for number in numbers]
    plain = [changed(family, prompt, {}) for prompt in asked]
    first = plain[0][0]
    biases = (tuple(plain[0][:2]), -9.0), ((asked[0][-1], first), -9.0)
    cases = [*CHANGES, {"sequence_bias": biases}]

    async def one(engine, prompt, case):
        own = {name: case[name] for name in OWN if name in case}
        rest = LogitsProcessors(**{n: v for n, v in case.items() if n not in own})
        has_ends = "exponential_decay_length_penalty" in case
        params = SamplingParams(max_new_tokens=20, ignore_eos=not has_ends, processors=rest, **own)
        return [event.token_id async for event in engine.generate(prompt, params)][:10]

    async def main():
        async with Engine(config(family)) as engine:
            pairs = [(prompt, case) for case in cases for prompt in asked]
            texts = await asyncio.gather(*(one(engine, *pair) for pair in pairs))
            if family == "bart":
                forced = {"forced_bos_token_id": 5}
                assert await one(engine, asked[0], forced) == await one(engine, asked[0], {})
            return [texts[i : i + len(asked)] for i in range(0, len(texts), len(asked))]

    for case, texts in zip(cases, run(main(), 60), strict=True):
        assert texts == [changed(family, prompt, case) for prompt in asked] != plain, case
