"""LoRA adapters on models that Transformers computes, against PEFT's own models."""

import asyncio
import functools
import importlib.util
import tempfile
from pathlib import Path

import pytest

from lmi_core.config.explain import main as explain
from lmi_core.config.targets.host import Host
from lmi_core.engine.engine import Engine
from lmi_core.engine.request import GenerationRequest
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.errors import MissingExtraError, ModelError
from lmi_core.settings.lora_config import LoraConfig
from lmi_core.settings.transformers_config import TransformersConfig
from tests.backends.models import checkpoint, loader
from tests.engine.harness import run

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
"""PEFT has both about models of Transformers, and about GPT-2's matrices."""
needs_peft = pytest.mark.skipif(
    importlib.util.find_spec("peft") is None, reason="peft is not installed"
)
NAMES = ("", "a", "b", "a", "", "b")
FIRST = {"t5": 1, "bart": 2}
"""Tokens before an encoder-decoder's output: to Transformers, all but the first are new ones."""


@functools.cache
def adapter(family, seed):
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model

    torch.manual_seed(seed)
    model = loader(family).from_pretrained(checkpoint(family))
    settings = PeftConfig(r=4, lora_alpha=32, init_lora_weights=False, target_modules="all-linear")
    directory = Path(_root().name) / f"{family}{seed}"
    get_peft_model(model, settings).save_pretrained(directory)
    return directory


@functools.cache
def _root():
    return tempfile.TemporaryDirectory(prefix="lmi-peft-")


def config(family, **more):
    adapters = tuple((name, adapter(family, seed)) for seed, name in enumerate(("a", "b")))
    lora = LoraConfig(**{"max_rank": 8, "adapters": adapters, **more})
    return TransformersConfig(model=checkpoint(family), num_threads=1, lora=lora)


def prompt(i):
    return tuple(range(10, 15 + 2 * i))


async def ids_of(engine, i, name):
    request = GenerationRequest(
        request_id=f"r{i}{name}",
        prompt_token_ids=prompt(i),
        params=SamplingParams(max_new_tokens=8, ignore_eos=True),
        adapter=name,
    )
    return [event.token_id async for event in engine.generate(request)]


def expected(family, i, name):
    from peft import PeftModel

    model = loader(family).from_pretrained(checkpoint(family))
    if name:
        model = PeftModel.from_pretrained(model, adapter(family, "ab".index(name)))
    ids = torch.tensor([prompt(i)])
    most = 8 + FIRST.get(family, 1) - 1
    output = model.generate(input_ids=ids, max_new_tokens=most, min_new_tokens=most)[0].tolist()
    return output[FIRST.get(family, len(prompt(i))) :]


@needs_peft
@pytest.mark.parametrize("family", ["gpt2", "opt", "bloom", "t5", "bart"])
def test_each_sequence_has_its_own(family):
    async def main():
        async with Engine(config(family), check_integrity=True) as engine:
            return await asyncio.gather(*(ids_of(engine, *pair) for pair in enumerate(NAMES)))

    outputs = run(main(), 120)
    assert outputs == [expected(family, *pair) for pair in enumerate(NAMES)]


@needs_peft
def test_they_come_and_go_while_others_run():
    async def main():
        async with Engine(config("gpt2", adapters=())) as engine:
            running = asyncio.create_task(ids_of(engine, 3, ""))
            await engine.load_adapter("x", adapter("gpt2", 0))
            first = await ids_of(engine, 1, "x")
            await engine.unload_adapter("x")
            await engine.load_adapter("x", adapter("gpt2", 1))
            return await running, first, await ids_of(engine, 1, "x"), await ids_of(engine, 1, "")

    wanted = (expected("gpt2", *pair) for pair in ((3, ""), (1, "a"), (1, "b"), (1, "")))
    assert run(main(), 120) == tuple(wanted)


@needs_peft
def test_a_rank_over_the_limit_is_refused():
    async def main():
        async with Engine(config("gpt2", max_rank=3)):
            pass

    with pytest.raises(ModelError, match=r"has rank 4; allowed are up to 3"):
        run(main(), 60)


@pytest.mark.skipif(importlib.util.find_spec("peft") is not None, reason="peft is installed")
def test_the_extra_is_named(tmp_path, capsys):
    async def main():
        model = checkpoint("gpt2")
        async with Engine(TransformersConfig(model=model, lora=LoraConfig())):
            pass

    with pytest.raises(MissingExtraError, match=r"lmi-core\[peft\]"):
        run(main(), 60)
    asked = [str(checkpoint("mamba")), "-o", "enable_lora=true"]
    host = Host(packages=frozenset({"transformers"}))
    assert explain(asked, environ={}, host=host) == 2
    assert "lmi-core[peft]" in " ".join(capsys.readouterr().out.split())
