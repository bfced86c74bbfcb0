"""What a configuration says, done by Transformers models: from written keys to behaviour."""

import asyncio
import importlib.util
import itertools
import json
import shutil
from dataclasses import replace

import pytest

from lmi_core.config.explain import main as explain
from lmi_core.config.resolve import examine, resolve
from lmi_core.config.table.option import Outcome
from lmi_core.config.targets.host import Host
from lmi_core.config.targets.launch import prepare_model
from lmi_core.config.targets.server_config import ServerConfig
from lmi_core.engine.engine import Engine
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.engine.stats import NullObserver
from lmi_core.errors import ConfigError, MissingExtraError, ModelError
from lmi_core.settings.transformers_config import TransformersConfig
from tests.backends.models import checkpoint
from tests.checkpoints import cached_checkpoint
from tests.engine.harness import run

pytest.importorskip("transformers")

HOST = Host(packages=frozenset({"transformers"}))


@pytest.fixture
def written(tmp_path):
    """Return a function that writes a model directory with a properties file."""
    numbers = itertools.count()

    def write(properties="", family="gpt2"):
        directory = tmp_path / f"model{next(numbers)}"
        shutil.copytree(checkpoint(family), directory)
        (directory / "serving.properties").write_text(properties)
        return directory

    return write


@pytest.fixture(autouse=True)
def _has_no_families(monkeypatch):
    """Whatever the CPU engine has by now is served by Transformers here."""
    monkeypatch.setattr("lmi_core.config.targets.dispatch.supported_architectures", frozenset)


@pytest.fixture
def configured(written):
    """Return a function from a properties file to the engine's configuration."""

    def configure(properties="", *argv):
        directory = written(f"{properties}\noption.num_threads=1\n")
        model = resolve((str(directory), *argv), {}, HOST).models[0]
        assert model.backend == "transformers"
        config = model.engine_config()
        assert isinstance(config, TransformersConfig)
        return config

    return configure


async def ids_of(engine, prompt=(9, 8, 7), num_tokens=6, **more):
    params = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True, **more)
    return [event.token_id async for event in engine.generate(prompt, params)]


class Sizes(NullObserver):
    def __init__(self):
        self.num_seqs = self.num_tokens = 0

    def on_step(self, step):
        self.num_seqs = max(self.num_seqs, step.num_seqs)
        self.num_tokens = max(self.num_tokens, step.num_tokens)


@pytest.mark.parametrize(
    "properties",
    [
        "option.max_rolling_batch_size=2\noption.max_rolling_batch_prefill_tokens=16",
        "option.rolling_batch=scheduler\noption.max_num_sequences=2\noption.max_num_tokens=16",
    ],
)
def test_sizes_of_steps(configured, properties):
    sizes = Sizes()

    async def main():
        async with Engine(configured(properties), observer=sizes) as engine:
            prompt = tuple(range(10, 40))
            outputs = await asyncio.gather(*(ids_of(engine, prompt) for _ in range(4)))
            assert len({tuple(ids) for ids in outputs}) == 1

    run(main())
    assert (sizes.num_seqs, sizes.num_tokens) == (2, 16)


def test_the_model_may_be_elsewhere(tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "serving.properties").write_text(f"option.model_id={checkpoint('gpt2')}\n")
    model = resolve((str(directory),), {}, HOST).models[0]

    async def main():
        async with Engine(model.engine_config()) as engine:
            assert len(await ids_of(engine)) == 6

    run(main())


@pytest.mark.parametrize("key", ["max_model_len", "max_tokens", "n_positions", "max_total_tokens"])
def test_lengths(configured, key):
    async def main():
        async with Engine(configured(f"option.{key}=48")) as engine:
            assert engine.max_model_len == 48
            assert len(await ids_of(engine, num_tokens=100)) == 45

    run(main())


@pytest.mark.parametrize(
    ("written_dtype", "dtype"),
    [("auto", "float32"), ("bf16", "bfloat16"), ("fp16", "float16"), ("float32", "float32")],
)
def test_data_types(configured, written_dtype, dtype):
    async def main():
        async with Engine(configured(f"option.dtype={written_dtype}")) as engine:
            assert len(await ids_of(engine)) == 6
            return engine.info.runner.dtype

    assert run(main()) == dtype


def test_padding(configured):
    async def groups(properties):
        async with Engine(configured(f"option.rolling_batch=scheduler\n{properties}")) as engine:
            outputs = [
                engine.generate((9,) * n, SamplingParams(max_new_tokens=20, ignore_eos=True))
                for n in (60, 6, 5)
            ]
            for _ in range(4):
                for output in outputs:
                    await anext(output)
            found = sorted(len(group) for group in engine._parts.runner.groups)
            for output in outputs:
                await output.aclose()
            return found

    assert run(groups("")) == [1, 2]
    assert run(groups("option.max_splits=1")) == [3]
    assert run(groups("option.max_sparsity=1")) == [3]
    assert run(groups("option.max_sparsity=0")) == [1, 1, 1]


def test_padded_batches_of_a_model_that_the_engine_knows(tmp_path, monkeypatch):
    """By force, and else as the lmi engine has it; the same greedy tokens."""
    monkeypatch.undo()
    ids = {}
    for value, backend in (("true", "transformers"), ("false", "lmi")):
        directory = tmp_path / value
        directory.mkdir()
        (directory / "serving.properties").write_text(
            f"option.model_id={cached_checkpoint('llama2')}\noption.rolling_batch=scheduler\n"
            f"option.force_padded={value}\noption.num_threads=1\noption.dtype=fp32\n"
        )
        model = resolve((str(directory), "--prefer-native"), {}, HOST).models[0]
        assert model.backend == backend

        ids[value] = run(_first_ids(model.engine_config()))
    assert ids["true"] == ids["false"]


async def _first_ids(config):
    async with Engine(config) as engine:
        return await ids_of(engine, num_tokens=12)


def test_the_seed_decides_what_is_sampled(configured):
    async def sampled(properties):
        async with Engine(configured(properties)) as engine:
            return await ids_of(engine, temperature=1.0)

    first, again, other = (
        run(sampled(text)) for text in ("option.seed=1", "option.seed=1", "option.seed=2")
    )
    assert first == again != other


_CODE = """
from transformers import GPT2Config, GPT2LMHeadModel


class OwnConfig(GPT2Config):
    model_type = "own"


class OwnForCausalLM(GPT2LMHeadModel):
    config_class = OwnConfig
"""


def test_code_that_comes_with_the_model(written, monkeypatch, tmp_path):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "m"))

    async def generated(properties):
        directory = written(f"{properties}\noption.num_threads=1\n")
        settings = json.loads((directory / "config.json").read_text())
        settings["model_type"] = "own"
        settings["architectures"] = ["OwnForCausalLM"]
        settings["auto_map"] = {
            "AutoConfig": "own.OwnConfig",
            "AutoModelForCausalLM": "own.OwnForCausalLM",
        }
        (directory / "config.json").write_text(json.dumps(settings))
        (directory / "own.py").write_text(_CODE)
        config = resolve((str(directory),), {}, HOST).models[0].engine_config()
        async with Engine(config) as engine:
            return await ids_of(engine)

    assert len(run(generated("option.trust_remote_code=true"))) == 6
    with pytest.raises(ModelError, match=r"option\.trust_remote_code=true lets"):
        run(generated(""))


@pytest.mark.parametrize(
    ("properties", "message"),
    [
        ("option.quantize=eetq", "give a checkpoint that is quantised"),
        ("option.dtype=int8", "write fp32, fp16 or bf16"),
        ("option.kv_cache_dtype=bf16", "have the model's data type"),
        ("option.rope_scaling=linear", "into the model's config.json"),
        ("option.deterministic=true", "padding and company change roundings"),
        ("option.max_model_len=257", "257 tokens are more than the model's 256 positions"),
        ("option.task=fill-mask", "not available in this version: this task"),
    ],
)
def test_what_is_refused(written, properties, message):
    with pytest.raises(ConfigError, match=message):
        resolve((str(written(properties)),), {}, HOST)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"architectures": ["BertModel"]}, "doesn't generate text"),
    ],
)
def test_models_of_other_kinds(written, facts, message):
    directory = written()
    (directory / "config.json").write_text(json.dumps(facts))
    with pytest.raises(ConfigError, match=message):
        resolve((str(directory),), {}, HOST)


@pytest.mark.parametrize(
    ("model_type", "code"),
    [("t5", 0), ("whisper", 2)],
)
def test_of_encoder_decoders_those_that_read_text_are_served(written, capsys, model_type, code):
    """Relative positions bound no length, whatever n_positions says."""
    directory = written("option.max_model_len=2048\n")
    facts = {
        "architectures": [f"{model_type.capitalize()}ForConditionalGeneration"],
        "model_type": model_type,
        "is_encoder_decoder": True,
        "n_positions": 512,
        "relative_attention_num_buckets": 32,
    }
    (directory / "config.json").write_text(json.dumps(facts))
    assert explain([str(directory)], environ={}, host=HOST) == code
    text = " ".join(capsys.readouterr().out.split())
    assert ("has no model of type 'whisper' that generates text" in text) == (code == 2)


def test_transformers_without_torch(written, monkeypatch):
    (model,) = resolve((str(written("")),), {}, HOST).models
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "torch" else find_spec(name)
    )
    needs = r"needs the 'transformers' extra: pip install 'lmi-core\[transformers\]'"
    with pytest.raises(MissingExtraError, match=needs):
        run(start(model.engine_config()))
    with pytest.raises(ConfigError, match=needs):
        prepare_model(model, ServerConfig(values={}), {})


@pytest.mark.parametrize(
    ("asked", "format"),
    [
        ("option.quantize=bitsandbytes8", "int8"),
        ("option.load_in_8bit=true", "int8"),
        ("option.quantize=bitsandbytes-nf4", "nf4"),
        ("option.load_in_4bit=true", "fp4"),
        ("option.quantize=int4", "nf4"),
    ],
)
def test_weights_quantised_by_bitsandbytes(written, monkeypatch, asked, format):
    (model,) = resolve((str(written(f"{asked}\n")),), {}, HOST).models
    config = replace(model.engine_config(), num_threads=1)
    assert config.bitsandbytes == format
    if importlib.util.find_spec("bitsandbytes") is None:
        with pytest.raises(MissingExtraError, match=r"lmi-core\[bitsandbytes\]"):
            run(start(config))
        with pytest.raises(ConfigError, match=r"lmi-core\[bitsandbytes\]"):
            prepare_model(model, ServerConfig(values={}), {})
        return

    async def facts(config):
        async with Engine(config) as engine:
            events = [e async for e in engine.generate((5, 9, 77), max_new_tokens=4)]
            return len(events), engine.info.runner

    count, runner = run(facts(config), 60)
    _, plain = run(facts(replace(config, bitsandbytes=None)), 60)
    assert (count, runner.quantize) == (4, format)
    assert runner.weight_bytes < 0.8 * plain.weight_bytes


async def start(config):
    async with Engine(config):
        pass


def test_the_extra_is_named(written):
    with pytest.raises(ConfigError, match=r"pip install 'lmi-core\[transformers\]'"):
        resolve((str(written()),), {}, Host())


def test_formats_and_lengths_of_the_server_are_kept(written):
    directory = written("option.output_formatter=jsonlines\noption.tgi_compat=true\n")
    report = examine((str(directory),), {}, HOST)
    assert not report.errors
    model = report.models[0]
    assert (model.output_formatter, model.tgi_compat) == ("jsonlines", True)
    outcomes = {row.key: row.outcome for row in report.rows[0]}
    assert outcomes["option.output_formatter"] is Outcome.MAPPED
    assert outcomes["option.tgi_compat"] is Outcome.MAPPED
