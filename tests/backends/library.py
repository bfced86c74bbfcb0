"""A scripted library in the place of a real one, and requests to the engine in front of it."""

import importlib
import sys
from pathlib import Path

from lmi_core.backends.open_backend import open_backend
from lmi_core.engine.request import GenerationRequest
from lmi_core.engine.sampling_params import SamplingParams
from tests.checkpoints import cached_checkpoint
from tests.engine.harness import run

HERE = Path(__file__).parent


def imported(monkeypatch, directory, package, module):
    """Put a scripted ``package`` on the path, and yield one of its modules."""
    forget(package)
    monkeypatch.syspath_prepend(str(HERE / directory))
    yield importlib.import_module(module)
    forget(package)


def forget(package):
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        del sys.modules[name]


def model_with(directory, properties):
    """A model's directory in ``directory``, with these lines in its serving.properties."""
    model = directory / "model"
    model.mkdir()
    for path in cached_checkpoint("llama2").iterdir():
        (model / path.name).symlink_to(path)
    (model / "serving.properties").write_text(properties)
    return model


def request(prompt=(20, 30), *, request_id="r", echo=False, salt="", priority=0, **params):
    params.setdefault("max_new_tokens", 5)
    return GenerationRequest(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(**params),
        echo=echo,
        cache_salt=salt,
        priority=priority,
    )


async def events_of(engine, asked):
    return [event async for batch in engine.generate_batches(asked) for event in batch]


def served(asked, config):
    """The events of one request, by an engine that serves nothing else."""

    async def main():
        async with open_backend(config) as engine:
            return await events_of(engine, asked)

    return run(main())
