"""LoRA in a configuration: which adapters there are, where their files are, and what is refused."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from lmi_core.config.artefacts.model_source import ModelSource
from lmi_core.config.resolve import resolve
from lmi_core.config.table.option import Outcome
from lmi_core.config.targets.launch import prepare
from lmi_core.engine.engine import Engine
from lmi_core.engine.request import GenerationRequest
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.errors import ConfigError
from lmi_core.settings.engine_config import EngineConfig
from lmi_core.settings.lora_config import LoraConfig
from tests.checkpoints import cached_checkpoint
from tests.lora_adapters import cached_adapter

from .artefacts.fake_hub import FakeHub
from .cases import CPU, LLAMA, NO_CACHE

PROMPT = tuple(range(10, 50))
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def with_adapters(model_dir, tmp_path):
    """Return a function that writes a model directory with empty adapters beside it."""

    def write(properties, *adapters, name="model"):
        model_dir(properties, name=name, config=LLAMA)
        for adapter in adapters:
            (tmp_path / name / "adapters" / adapter).mkdir(parents=True)
        return name

    return write


def texts(problems):
    return "\n".join(map(str, problems))


def lora_of(report):
    (model,) = report.models
    return model.engine_config().lora


def test_directories_beside_the_properties_are_adapters(with_adapters, explained):
    name = with_adapters("option.enable_lora=true\noption.max_lora_rank=32", "fr", "de", ".git")
    path = Path(name, "adapters")
    (path / "notes.txt").write_text("")
    report = explained(name)
    lora = lora_of(report)
    assert lora.max_rank == 32
    assert lora.adapters == (("de", path / "de"), ("fr", path / "fr"))
    rows = [row for row in report.rows[0] if row.key.startswith("adapters/")]
    assert [(row.key, row.where, row.text) for row in rows] == [
        ("adapters/de", "model/adapters", "registered as de"),
        ("adapters/fr", "model/adapters", "registered as fr"),
    ]
    assert not report.errors


def test_directories_in_the_model_are_adapters_too(with_adapters, explained, tmp_path):
    with_adapters(None, "inside", name="weights")
    name = with_adapters(
        f"option.enable_lora=true\noption.model_id={tmp_path / 'weights'}", "beside"
    )
    assert [adapter for adapter, _ in lora_of(explained(name)).adapters] == ["beside", "inside"]


def test_the_same_directory_counts_once(with_adapters, explained, tmp_path):
    name = with_adapters(f"option.enable_lora=true\noption.model_id={tmp_path / 'model'}", "fr")
    assert [adapter for adapter, _ in lora_of(explained(name)).adapters] == ["fr"]


def test_one_name_in_two_places_is_refused(with_adapters, explained, tmp_path):
    with_adapters(None, "fr", name="weights")
    properties = f"option.enable_lora=true\noption.model_id={tmp_path / 'weights'}"
    report = explained(with_adapters(properties, "fr"))
    assert "2 adapters have the name 'fr'; give each its own" in texts(report.errors)
    (tmp_path / "weights" / "adapters" / "fr").rename(tmp_path / "weights" / "adapters" / "de")
    assert not explained("model").errors


def test_adapters_that_are_not_enabled_are_mentioned(with_adapters, explained):
    for properties in ("", "option.enable_lora=false"):
        report = explained(with_adapters(properties, "fr", "de", name=f"m{len(properties)}"))
        assert lora_of(report) is None
        assert (
            "/adapters: holds adapters that are not loaded (de, fr): set option.enable_lora=true"
        ) in texts(report.warnings)


def test_a_model_without_lora_has_none(with_adapters, explained):
    report = explained(with_adapters(""))
    assert lora_of(report) is None
    assert not report.warnings


def test_adapters_with_code_are_refused(with_adapters, explained, tmp_path):
    name = with_adapters("option.enable_lora=true", "fr")
    (tmp_path / name / "adapters" / "fr" / "model.py").write_text("def output_formatter(): ...\n")
    assert "model.py: an adapter's own formatters are not available" in texts(
        explained(name).errors
    )


def test_a_launcher_names_adapters(model_dir, explained, tmp_path):
    model_dir(config=LLAMA)
    (tmp_path / "local").mkdir()
    places = "org/a, org/b@main , c=local,d=org/d@v1,e=s3://bucket/e,local"
    report = explained("--model-id", "model", environ={"LORA_ADAPTERS": places})
    assert [(each.name, each.source) for each in report.models[0].lora.named] == [
        ("org/a", ModelSource("hub", "org/a")),
        ("org/b", ModelSource("hub", "org/b", "main")),
        ("c", ModelSource("local", "local")),
        ("d", ModelSource("hub", "org/d", "v1")),
        ("e", ModelSource("s3", "s3://bucket/e")),
        ("local", ModelSource("local", "local")),
    ]
    assert report.models[0].lora.max_rank == 128
    (row,) = [row for row in report.rows[0] if row.key == "option.lora_adapters"]
    assert (row.outcome, row.text) == (Outcome.HONOURED, "registered at load")
    assert not report.errors


@pytest.mark.parametrize(
    ("items", "text"),
    [
        ("a@b@c", "is not id, id=path"),
        ("a=b=c", "is not id, id=path"),
        ("=b", "is not id, id=path"),
        ("a=./absent/x", "is in neither a directory, a hub repository"),
        ("a=model,a=org/a", "2 adapters have the name 'a'"),
    ],
)
def test_faults_of_a_launchers_list(model_dir, explained, items, text):
    model_dir(config=LLAMA)
    report = explained("--model-id", "model", "--lora-adapters", items)
    assert text in texts(report.errors)


def test_a_revision_of_a_directory_is_mentioned(model_dir, explained):
    model_dir(config=LLAMA)
    report = explained("--model-id", "model", "--lora-adapters", "a=model@main")
    assert "the revision of LoRA adapter 'a=model@main' has no effect" in texts(report.warnings)


def test_naming_adapters_and_turning_them_off_is_refused(model_dir, explained):
    name = model_dir("option.enable_lora=false\noption.lora_adapters=org/a", config=LLAMA)
    assert "names adapters, but option.enable_lora=false" in texts(explained(name).errors)


@pytest.mark.parametrize(
    ("lora_dtype", "dtype", "is_refused"),
    [
        ("auto", "fp32", False),
        ("bf16", "auto", False),
        ("bfloat16", "bf16", False),
        ("fp16", "bf16", False),
        ("fp32", "bf16", True),
        ("bf16", "float32", True),
        ("bf16", "int8", False),
    ],
)
def test_adapters_have_the_type_of_the_activations(
    model_dir, explained, lora_dtype, dtype, is_refused
):
    lines = ("enable_lora=true", f"lora_dtype={lora_dtype}", f"dtype={dtype}")
    name = model_dir("\n".join(f"option.{line}" for line in lines), config=LLAMA)
    errors = texts(explained(name).errors)
    assert ("option.lora_dtype" in errors) == is_refused
    assert is_refused == ("adapters have the type of the activations" in errors)


@pytest.mark.parametrize(
    ("line", "outcome", "text"),
    [
        ("max_loras=8", Outcome.NO_EFFECT, "a batch may have all registered adapters"),
        ("max_cpu_loras=8", Outcome.NO_EFFECT, "all registered adapters stay in memory"),
        ("fully_sharded_loras=true", Outcome.NO_EFFECT, "ranks cut adapters"),
        ("lora_extra_vocab_size=512", Outcome.NO_EFFECT, "refused when it is loaded"),
        ("long_lora_scaling_factors=3.0,4.0", Outcome.REFUSED, "no long LoRA"),
        ("enable_lora=false", Outcome.NO_EFFECT, "no adapters are served"),
    ],
)
def test_what_becomes_of_other_keys(model_dir, explained, line, outcome, text):
    name = model_dir(f"option.{line}", config=LLAMA)
    (row,) = [row for row in explained(name).rows[0] if row.key in f"option.{line}"]
    assert (row.outcome, text in row.text) == (outcome, True)


def test_backends_without_lora_refuse_it(model_dir, explained):
    name = model_dir("option.enable_lora=true\noption.rolling_batch=trtllm", config=LLAMA)
    report = explained(name, "--strict")
    assert report.models[0].backend == "trtllm"
    assert "option.enable_lora=true: not available in this version: LoRA" in texts(report.errors)


@pytest.fixture
def checkpoint(tmp_path):
    """A model directory with a real checkpoint."""
    directory = tmp_path / "real"
    directory.mkdir()
    for path in cached_checkpoint("llama2").iterdir():
        (directory / path.name).symlink_to(path)
    return directory


def launched(*argv, environ=None):
    (launch,) = prepare(resolve(argv, {**NO_CACHE, **(environ or {})}, CPU), NO_CACHE)
    return launch.engine


async def texts_of(config, *adapters):
    """What the base model and each adapter say of the same prompt."""
    params = SamplingParams(max_new_tokens=8, ignore_eos=True)
    async with Engine(config, check_integrity=True) as engine:
        assert tuple(engine.adapters) == adapters
        requests = [
            GenerationRequest(
                request_id=f"r{i}", prompt_token_ids=PROMPT, params=params, adapter=adapter
            )
            for i, adapter in enumerate(("", *adapters))
        ]
        return [[e.token_id async for e in engine.generate(request)] for request in requests]


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 60))


def expected(directory, **adapters):
    """The same of an engine that is told of the adapters directly."""
    config = LoraConfig(adapters=tuple(adapters.items()))
    return run(texts_of(EngineConfig(model=directory, lora=config), *adapters))


def test_adapters_beside_a_model_answer(checkpoint):
    (checkpoint / "serving.properties").write_text("option.enable_lora=true\n")
    places = {name: cached_adapter("llama2", seed) for seed, name in enumerate(("de", "fr"))}
    (checkpoint / "adapters").mkdir()
    for name, place in places.items():
        (checkpoint / "adapters" / name).symlink_to(place)
    texts = run(texts_of(launched(str(checkpoint)), "de", "fr"))
    assert len({tuple(text) for text in texts}) == 3
    assert texts == expected(checkpoint, **places)
    (checkpoint / "serving.properties").write_text("")
    assert launched(str(checkpoint)).lora is None


def test_adapters_that_a_launcher_names_answer(checkpoint):
    place = cached_adapter("llama2", rank=32)
    argv = ("--model-id", str(checkpoint), "--lora-adapters", f"org/fr={place}")
    texts = run(texts_of(launched(*argv), "org/fr"))
    assert texts[0] != texts[1]
    assert texts[0] == expected(checkpoint)[0]


def test_adapters_of_a_higher_rank_are_refused(checkpoint):
    place = cached_adapter("llama2", rank=8)
    argv = (str(checkpoint), "-o", f"lora_adapters=a={place}", "-o", "max_lora_rank=4")
    with pytest.raises(ConfigError, match=r"rank 8; allowed are up to 4 \(max_lora_rank\)"):
        run(texts_of(launched(*argv), "a"))
    assert run(texts_of(launched(*argv[:-1], "max_lora_rank=8"), "a"))


def test_an_adapter_that_is_not_there_is_named(checkpoint, tmp_path):
    (tmp_path / "empty").mkdir()
    argv = ("--model-id", str(checkpoint), "--lora-adapters", f"fr={tmp_path / 'empty'}")
    with pytest.raises(ConfigError, match="empty is no LoRA adapter: it needs adapter_config"):
        launched(*argv)


def test_an_adapter_of_the_hub_is_fetched(checkpoint, tmp_path):
    place = cached_adapter("llama2")
    environ = {"HF_HUB_CACHE": str(tmp_path / "hub"), "LORA_ADAPTERS": "org/m@main"}

    def adapters(**more):
        variables = {**NO_CACHE, **environ, **more}
        (launch,) = prepare(resolve(("--model-id", str(checkpoint)), variables, CPU), variables)
        return launch.engine.lora.adapters

    with FakeHub(place, COMMIT).running() as url:
        ((name, fetched),) = adapters(HF_ENDPOINT=url)
    assert (name, fetched.name) == ("org/m", COMMIT)
    for file in place.iterdir():
        assert (fetched / file.name).read_bytes() == file.read_bytes()
    assert adapters(HF_HUB_OFFLINE="1") == (("org/m", fetched),)
    (fetched / "adapter_config.json").unlink()
    with pytest.raises(ConfigError, match="org/m at main is not whole"):
        adapters(HF_HUB_OFFLINE="1")


def test_adapters_may_be_in_another_directory(checkpoint, explained):
    (checkpoint / "mine").mkdir()
    (checkpoint / "mine" / "fr").symlink_to(cached_adapter("llama2"))
    argv = (str(checkpoint), "-o", "enable_lora=true", "-o", "adapters=mine")
    assert [name for name, _ in launched(*argv).lora.adapters] == ["fr"]
    report = explained(*argv[:-1], "adapters=../mine")
    assert "leaves the model's directory: name one within it" in str(report.errors[0])


@pytest.fixture
def alone(checkpoint, tmp_path):
    """A directory with an adapter of rank 32 and no model, whose base is named as given."""

    def write(base=None, name="fr"):
        directory = tmp_path / name
        shutil.copytree(cached_adapter("llama2", rank=32), directory)
        path = directory / "adapter_config.json"
        config = json.loads(path.read_text())
        config["base_model_name_or_path"] = str(checkpoint) if base is None else base
        path.write_text(json.dumps(config))
        return directory

    return write


def test_an_adapter_alone_is_served_with_its_base(checkpoint, alone, explained):
    place = alone()
    config = launched(str(place))
    assert (config.model, config.lora.max_rank, config.lora.default) == (checkpoint, 32, "fr")
    without_a_name, with_it = run(texts_of(config, "fr"))
    direct = replace(config, lora=LoraConfig(max_rank=32, adapters=(("fr", place),)))
    base, adapted = run(texts_of(direct, "fr"))
    assert without_a_name == with_it == adapted != base
    report = explained(str(place))
    assert not report.errors
    (row,) = [row for row in report.rows[0] if row.key == "base_model_name_or_path"]
    assert row.text == "the base model's files; adapter fr answers what names no other"


def test_a_base_beside_the_adapter(checkpoint, alone):
    assert launched(str(alone(base="real"))).model.samefile(checkpoint)


@pytest.mark.parametrize(
    ("base", "text"),
    [
        ("/home/somebody/llama", "neither a directory here nor a hub id; name the base model in"),
        ("", "neither a directory here nor a hub id"),
        ("org/absent", "org/absent is not whole in"),
    ],
)
def test_a_base_that_is_not_here(alone, base, text):
    with pytest.raises(ConfigError, match=text):
        launched(str(alone(base=base)), environ={"HF_HUB_OFFLINE": "1"})


def test_an_adapter_alone_on_the_hub_brings_its_base(checkpoint, alone, tmp_path):
    with FakeHub(alone(), COMMIT).running() as url:
        environ = {**NO_CACHE, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_ENDPOINT": url}
        (launch,) = prepare(resolve(("--model-id", "org/m"), environ, CPU), environ)
    config = launch.engine
    assert config.model.samefile(checkpoint)
    assert [(name, path.name) for name, path in config.lora.adapters] == [("m", COMMIT)]


def test_what_has_no_lora_refuses_an_adapter_alone(checkpoint, alone, explained):
    report = explained(str(alone()), "-o", "rolling_batch=trtllm", "--strict")
    assert "is a LoRA adapter, which TensorRT-LLM applies to no model here" in texts(report.errors)
