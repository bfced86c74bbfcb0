"""Limits of an answer's silence and of loading, for models on an engine."""

import asyncio
from dataclasses import replace

import pytest

from lmi_core.config.resolve import resolve
from lmi_core.config.targets.launch import prepare
from lmi_core.errors import EngineError
from lmi_server.http.answer_deadline import AnswerLimits
from lmi_server.http.metrics import Metrics
from lmi_server.models.loaded_model import Shared
from lmi_server.models.loading import build_options, recipe_of
from lmi_server.models.model import ServedModel
from tests.checkpoints import cached_checkpoint
from tests.config.cases import CPU, NO_CACHE
from tests.server.configured import configured, deployment_of
from tests.server.fake_engine import FakeEngine
from tests.server.harness import serving


class StallingEngine(FakeEngine):
    """Says a word, and then nothing for a minute."""

    async def generate_batches(self, request):
        async for batch in FakeEngine.generate_batches(self, request):
            yield batch
            await asyncio.sleep(60)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_silence_ends_an_answer(first, streams):
    engine = FakeEngine(delay_s=60) if first else StallingEngine()
    key = "chunked_read_timeout" if first else "option.predict_timeout"
    body = {"inputs": "a", "parameters": {"max_new_tokens": 3}, "stream": streams}

    async def run():
        async with serving(engine, **configured(f"{key}=1")) as served:
            return await served.post(body)

    answer = asyncio.run(asyncio.wait_for(run(), 20))
    assert b"no token came within 1 s" in answer.body
    assert answer.status == (200 if streams and not first else 424)
    assert not engine.running


@pytest.mark.parametrize(
    ("argv", "limits", "loading_s"),
    [
        ((), AnswerLimits(), None),
        (("-o", "chunked_read_timeout=5"), AnswerLimits(5.0, 5.0), None),
        (("-o", "predict_timeout=3", "-o", "chunked_read_timeout=5"), AnswerLimits(5.0, 3.0), None),
        (
            ("-o", "predict_timeout=3", "-o", "model_loading_timeout=7"),
            AnswerLimits(None, 3.0),
            7.0,
        ),
    ],
)
def test_limits_are_the_configurations(argv, limits, loading_s):
    deployment = resolve((str(cached_checkpoint("llama2")), *argv), NO_CACHE, CPU)
    (launch,) = prepare(deployment, NO_CACHE)
    assert build_options(launch).limits == limits
    recipe = recipe_of(deployment.models[0], deployment.server, NO_CACHE)
    assert recipe.loading_timeout_s == loading_s


def test_loading_has_a_limit():
    async def never(observer):
        await asyncio.sleep(60)

    async def run():
        deployment = deployment_of("model_loading_timeout=1", "modelName=m")
        recipe = recipe_of(deployment.models[0], deployment.server, NO_CACHE)
        recipe = replace(recipe, open=never)
        shared = Shared(Metrics(), None, None)
        model = ServedModel(recipe, shared, loaded_at_startup=True)
        with pytest.raises(EngineError, match=r"model m was not loaded within 1 s \(option"):
            await model.load()
        assert model.status == "FAILED"

    asyncio.run(run())
