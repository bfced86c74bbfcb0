"""What options say of the batch, its steps and its queue, seen in a running engine."""

import asyncio

import pytest

from lmi_core.engine.loop import StepLoop
from lmi_core.engine.outputs import FinishReason
from lmi_core.engine.request import BACKGROUND
from lmi_core.engine.stats import NullObserver
from lmi_core.errors import CapacityError, UserError
from tests.config.test_honoured import PROMPT, TRTLLM, generate, params, run, running
from tests.engine.harness import collect, until

pytestmark = pytest.mark.timeout(120)


class StepWatch(NullObserver):
    """Remembers the largest steps."""

    def __init__(self):
        self.max_num_seqs = self.max_num_tokens = 0

    def on_step(self, step):
        self.max_num_seqs = max(self.max_num_seqs, step.num_seqs)
        self.max_num_tokens = max(self.max_num_tokens, step.num_tokens)


@pytest.mark.parametrize(
    ("properties", "argv", "environ"),
    [
        ("option.max_rolling_batch_size=2\n", (), {}),
        ("option.rolling_batch=vllm\noption.max_num_seqs=2\n", (), {}),
        (f"{TRTLLM}option.max_num_sequences=2\n", (), {}),
        ("", (), {"MAX_BATCH_SIZE": "2"}),
        ("", ("--model-id", "MODEL", "--max-batch-size", "2"), {}),
    ],
)
def test_sequences_of_the_batch(configured, properties, argv, environ):
    watch = StepWatch()

    async def main():
        async with running(configured(properties, argv, environ), watch) as engine:
            await asyncio.gather(*(generate(engine) for _ in range(5)))

    run(main())
    assert watch.max_num_seqs == 2


def test_new_requests_wait_for_steps(configured):
    """Steps of one sequence alone before the second, which came right after it, joins."""

    class Sizes(StepWatch):
        def __init__(self):
            super().__init__()
            self.num_seqs = []

        def on_step(self, step):
            self.num_seqs.append(step.num_seqs)

    async def num_alone(steps):
        watch = Sizes()
        config = configured(f"option.waiting_steps={steps}\n")
        async with running(config, watch) as engine:
            first = engine.generate(PROMPT, params(40))
            await anext(first)
            second = asyncio.create_task(generate(engine))
            assert len([event async for event in first]) == 39
            assert len(await second) == 4
        return watch.num_seqs.index(2)

    async def main():
        assert await num_alone(12) == 13
        assert await num_alone(0) < 13

    run(main())


@pytest.mark.parametrize(
    ("properties", "argv"),
    [
        ("option.max_rolling_batch_prefill_tokens=16\n", ()),
        ("option.rolling_batch=vllm\noption.max_num_batched_tokens=16\n", ()),
        ("option.enable_chunked_prefill=true\noption.max_num_batched_tokens=16\n", ()),
        (f"{TRTLLM}option.max_num_tokens=16\n", ()),
        ("", ("--model-id", "MODEL", "--max-batch-prefill-tokens", "16")),
    ],
)
def test_tokens_of_a_step(configured, properties, argv):
    watch = StepWatch()
    argv = (*argv, "--option", "max_rolling_batch_size=4")

    async def main():
        async with running(configured(properties, argv), watch) as engine:
            await asyncio.gather(*(generate(engine) for _ in range(3)))

    run(main())
    assert watch.max_num_tokens == 16


@pytest.mark.parametrize(
    ("properties", "argv"),
    [
        ("option.max_model_len=24\n", ()),
        ("engine=DeepSpeed\noption.max_tokens=24\n", ()),
        ("option.entryPoint=djl_python.transformers_neuronx\noption.n_positions=24\n", ()),
        (f"{TRTLLM}option.max_input_len=16\noption.max_output_len=8\n", ()),
        ("", ("--model-id", "MODEL", "--max-total-tokens", "24")),
        ("", ("--max-model-len", "0.024k")),
    ],
)
def test_length_of_a_sequence(configured, properties, argv):
    async def main():
        async with running(configured(properties, argv)) as engine:
            events = await generate(engine, PROMPT[:20], num_tokens=20)
            assert len(events) == 4
            assert events[-1].finish_reason is FinishReason.LENGTH
            with pytest.raises(UserError, match="23"):
                await generate(engine, PROMPT[:24])

    run(main())


@pytest.mark.parametrize("word", ["auto", "-1"])
def test_a_length_of_the_models_own(configured, word):
    written = configured("", ("--max-model-len", word))
    assert (written.max_model_len, configured().max_model_len) == (None, None)


def test_tokens_of_the_batch(configured):
    """As many sequences run as have room together, and the others wait."""
    watch = StepWatch()
    argv = ("--model-id", "MODEL", "--max-total-tokens", "64", "--max-batch-total-tokens", "128")

    async def main():
        async with running(configured("", (*argv, "--option", "block_size=16")), watch) as engine:
            assert engine.stats().num_blocks == 8
            results = [generate(engine, (i, *PROMPT[:40]), num_tokens=8) for i in range(6)]
            assert {len(events) for events in await asyncio.gather(*results)} == {8}
        assert watch.max_num_seqs == 2
        few = configured("", (*argv[:2], "--max-batch-total-tokens", "16"))
        with pytest.raises(UserError, match="max_batch_total_tokens=16 is less than one sequence"):
            async with running(few):
                pass

    run(main())


@pytest.mark.parametrize("written", ["kv_cache_bytes=64K", "kv_cache_memory_bytes=65.536k"])
def test_bytes_of_the_cache(configured, written):
    async def main():
        config = configured(f"option.{written}\noption.block_size=16\noption.max_model_len=128\n")
        async with running(config) as engine:
            info = engine.info
            assert 32 << 10 < info.runner.kv_cache_bytes <= 64 << 10
            capacity = info.runner.num_blocks * 16
            assert 128 <= capacity < 512
            results = await asyncio.gather(*(generate(engine, (i, *PROMPT)) for i in range(8)))
            assert {len(events) for events in results} == {4}
            assert engine.stats().num_blocks == info.runner.num_blocks

    run(main())


@pytest.mark.parametrize(
    ("properties", "num_preemptions"),
    [
        ("option.guaranteed_no_evict=true\n", False),
        (f"{TRTLLM}option.batch_scheduler_policy=guaranteed_no_evict\n", False),
        (f"{TRTLLM}option.batch_scheduler_policy=max_utilization\n", True),
    ],
)
def test_preemption_or_none(configured, properties, num_preemptions):
    sizes = ("kv_cache_bytes=64K", "block_size=16")
    small = [argument for size in sizes for argument in ("--option", size)]
    if "trtllm" in properties:
        properties += "option.max_input_len=64\noption.max_output_len=64\n"
    else:
        properties += "option.max_model_len=128\n"

    async def main():
        async with running(configured(properties, small)) as engine:
            results = [generate(engine, (i, *PROMPT[:15]), num_tokens=48) for i in range(4)]
            assert {len(events) for events in await asyncio.gather(*results)} == {48}
            assert bool(engine.stats().totals.num_preemptions) == num_preemptions

    run(main())


@pytest.mark.parametrize(
    ("properties", "argv"),
    [("job_queue_size=1\n", ()), ("", ("--model-id", "MODEL", "--max-concurrent-requests", "1"))],
)
def test_requests_that_may_wait(configured, properties, argv):
    argv = (*argv, "--option", "max_rolling_batch_size=1")

    async def main():
        async with running(configured(properties, argv)) as engine:
            tasks = [asyncio.create_task(generate(engine, num_tokens=64)) for _ in range(3)]
            results = await asyncio.gather(*tasks, return_exceptions=True)
            refused = [result for result in results if isinstance(result, CapacityError)]
            assert len(refused) == 1
            assert "at most 1 may" in str(refused[0])

    run(main())


@pytest.mark.parametrize("line", ["option.overlap=", f"{TRTLLM}option.enable_trt_overlap="])
def test_loops(configured, monkeypatch, line):
    """The plain loop where it is asked for, and the same tokens."""
    plain, steps = StepLoop._run_plain, []

    async def run_plain(loop):
        steps.append(loop)
        await plain(loop)

    async def tokens(value):
        async with running(configured(f"{line}{value}\n")) as engine:
            return [event.token_id for event in await generate(engine)]

    monkeypatch.setattr(StepLoop, "_run_plain", run_plain)
    ids = run(tokens("true"))
    assert not steps
    assert run(tokens("false")) == ids
    assert steps


def test_whether_requests_have_priorities(configured):
    """The urgent one, which came last, is there first; or it is refused for its priority."""

    async def main():
        batch = "option.max_rolling_batch_size=1\noption.scheduling_policy="
        async with running(configured(f"{batch}priority\n")) as engine:
            ends = []

            async def ask(priority):
                await collect(engine, PROMPT, params(24), priority=priority)
                ends.append(priority)

            tasks = [asyncio.create_task(ask(0)), asyncio.create_task(ask(3))]
            await asyncio.sleep(0)
            tasks.append(asyncio.create_task(ask(-1)))
            await asyncio.gather(*tasks)
            assert ends == [-1, 0, 3]
        async with running(configured(f"{batch}fcfs\n")) as engine:
            with pytest.raises(UserError, match="priority is -1, but requests run in") as raised:
                await collect(engine, PROMPT, params(2), priority=-1)
            assert raised.value.field == "priority"
            assert len(await collect(engine, PROMPT, params(2), priority=BACKGROUND)) == 2

    run(main())


def test_how_long_requests_may_wait(configured):
    """Behind one that runs, the second gives up; its own word beats the configuration's."""

    async def main():
        written = "option.max_rolling_batch_size=1\noption.max_queue_s=0.001\n"
        async with running(configured(written)) as engine:
            runs = asyncio.create_task(collect(engine, PROMPT, params(64), max_queue_s=60))
            await until(lambda: engine.stats().num_running == 1)
            patient = asyncio.create_task(collect(engine, PROMPT, params(2), max_queue_s=60))
            with pytest.raises(CapacityError, match=r"may wait 0.001 \(max_queue_s\)") as raised:
                await generate(engine, num_tokens=2)
            assert raised.value.retry_after_s == 1.0
            assert len(await runs) == 64
            assert len(await patient) == 2

    run(main())
