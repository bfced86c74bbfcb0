"""Which models a configuration names, where they come from and what they are called."""

import shutil
from pathlib import Path

import pytest

from lmi_core.config.resolve import resolve_entry
from lmi_core.config.sources.load_models import ModelEntry
from lmi_core.config.table.option import Outcome
from lmi_core.errors import ConfigError

from .cases import CPU, NO_CACHE

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


def test_load_models_names_the_models(model_dir, explained):
    model_dir("option.seed=1", name="a", config=LLAMA)
    model_dir("option.seed=2\nengine=Python", name="b", config=LLAMA)
    environ = {"SERVING_LOAD_MODELS": "x:v1=a,y::MPI=b", "OPTION_MAX_MODEL_LEN": "64"}
    first, second = explained(environ=environ).models
    assert (first.name, first.version, first.engine.config.seed) == ("x", "v1", 1)
    assert (second.name, second.version, second.engine.config.seed) == ("y", None, 2)
    assert first.engine.config.max_model_len == second.engine.config.max_model_len == 64
    assert second.mpi_mode
    assert second.where("engine") == "SERVING_LOAD_MODELS"


@pytest.mark.parametrize("host", ["", "//", "//localhost"])
def test_a_file_url_of_load_models_is_decoded(host, model_dir, resolved):
    """A blank can only be written so: it separates models."""
    model = Path(model_dir("option.seed=1", name="my ü model", config=LLAMA)).absolute()
    url = f"file:{host}{model.as_uri().removeprefix('file://')}"
    [found] = resolved(environ={"SERVING_LOAD_MODELS": f"{url}/"}).models
    assert (found.name, found.directory) == ("my_ü_model", model)


def test_load_models_beside_models_of_the_command_line_is_not_used(model_dir, explained):
    path = model_dir("", name="a", config=LLAMA)
    report = explained(path, environ={"SERVING_LOAD_MODELS": "other=elsewhere"})
    [warning] = report.warnings
    why = "is not used: the command line names the models"
    assert str(warning) == f"SERVING_LOAD_MODELS: load_models {why}"
    assert [(row.outcome, row.text) for row in report.server_rows] == [(Outcome.NO_EFFECT, why)]
    assert [model.name for model in report.models] == ["a"]


def test_properties_that_are_no_file_are_not_used(model_dir, explained, tmp_path):
    path = model_dir(name="a", config=LLAMA)
    (tmp_path / path / "serving.properties").mkdir()
    [warning] = explained(path).warnings
    assert "a/serving.properties: can't be read (it is a directory, not a regular" in str(warning)


def test_a_name_that_no_answer_can_hold(model_dir, explained):
    path = model_dir("", name="a", config=LLAMA)
    [error] = explained(path, environ={"OPTION_MODELNAME": "caf\udce9"}).errors
    assert str(error) == (
        "OPTION_MODELNAME: the model's name 'caf\\udce9' isn't valid UTF-8; give it another"
    )


def test_model_store_is_scanned(model_dir, explained):
    model_dir("", name="store/a", config=LLAMA)
    model_dir("", name="store/b", config=LLAMA)
    environ = {"SERVING_MODEL_STORE": "store", "SERVING_LOAD_MODELS": "ALL"}
    assert [model.name for model in explained(environ=environ).models] == ["a", "b"]


def test_the_containers_store_serves_where_nothing_is_named(
    model_dir, resolved, tmp_path, monkeypatch
):
    store = tmp_path / model_dir("option.seed=4", config=LLAMA)
    monkeypatch.setattr("lmi_core.config.sources.models.CONTAINER_STORE", store)
    (model,) = resolved(environ={"OPTION_MAX_MODEL_LEN": "9"}).models
    assert (model.name, model.engine.config.seed, model.engine.config.max_model_len) == (
        "model",
        4,
        9,
    )
    (other,) = resolved("--model-id", "org/m").models
    assert (other.name, other.source.location) == ("org_m", "org/m")
    (content,) = resolved(environ={"OPTION_MODEL_ID": "org/m"}).models
    assert (content.name, content.engine.config.seed) == ("model", 4)


def test_a_directory_that_a_flag_names_is_called_by_its_last_part(model_dir, resolved, tmp_path):
    path = tmp_path / model_dir("", name="store/b", config=LLAMA)
    for argv in (("--model-id", str(path)), ("--model", str(path)), (str(path),)):
        (model,) = resolved(*argv).models
        assert model.name == "b"


def test_an_archive_is_named_as_a_directory_is(model_dir, resolved, tmp_path):
    path = tmp_path / model_dir("option.seed=5", name="b", config=LLAMA)
    archive = shutil.make_archive(str(path), "gztar", path)
    environ = {"SERVING_DOWNLOAD_DIR": str(tmp_path / "cache")}
    (model,) = resolved(archive, environ=environ).models
    assert (model.name, model.engine.config.seed) == ("b", 5)


def test_hub_variable_adds_a_model_of_its_own(model_dir, explained):
    model_dir("", name="a", config=LLAMA)
    environ = {
        "SERVING_LOAD_MODELS": "a=a",
        "HF_MODEL_ID": "org/some-model",
        "HF_REVISION": "abc",
    }
    local, hub = explained(environ=environ).models
    assert (local.source.kind, local.source.location) == ("local", "a")
    assert (hub.name, hub.source.kind) == ("org_some_model", "hub")
    assert (hub.source.location, hub.source.revision) == ("org/some-model", "abc")


def test_hub_variable_is_stronger_than_the_option_and_says_so(explained):
    environ = {"HF_MODEL_ID": "org/hub", "OPTION_MODEL_ID": "org/option", "MODEL_ID": "org/tgi"}
    environ |= {"HF_REVISION": "abc", "HF_MODEL_REVISION": "old", "OPTION_REVISION": "def"}
    report = explained(environ=environ)
    assert [model.source.location for model in report.models] == ["org/hub"]
    rows = {row.key: row for row in report.rows[0]}
    overridden = ("OPTION_MODEL_ID: org/option", "MODEL_ID: org/tgi")
    assert rows["option.model_id"].overridden == overridden
    assert rows["option.revision"].value == "abc"
    losers = ("HF_MODEL_REVISION: old", "OPTION_REVISION: def")
    assert rows["option.revision"].overridden == losers


def test_a_directory_that_the_variable_names_is_weaker_than_the_option(explained, model_dir):
    first, second = model_dir(), model_dir(name="second")
    report = explained(environ={"HF_MODEL_ID": first, "OPTION_MODEL_ID": second})
    assert report.models[0].source.location == second
    row = next(row for row in report.rows[0] if row.key == "option.model_id")
    assert row.overridden == (f"HF_MODEL_ID: {first}",)


@pytest.mark.parametrize(
    "variable", ["HF_MODEL_ID", "OPTION_MODEL_ID", "MODEL_ID", "SM_VLLM_MODEL"]
)
def test_a_variable_that_names_a_directory_has_a_row(variable, explained, model_dir):
    directory = model_dir("", config=LLAMA)
    report = explained(environ={variable: directory})
    assert report.models[0].source.location == directory
    row = next(row for row in report.rows[0] if row.key == "option.model_id")
    assert (row.value, row.where) == (directory, variable)


@pytest.mark.parametrize("model", ["HERE", "s3://bucket/model", "org/m"])
def test_what_comes_from_no_hub_has_no_revision(model, explained, model_dir):
    name = model_dir("", config=LLAMA) if model == "HERE" else model
    report = explained(environ={"HF_MODEL_ID": name, "HF_REVISION": "abc"})
    row = next(row for row in report.rows[0] if row.key == "option.revision")
    assert row.outcome is (Outcome.HONOURED if model == "org/m" else Outcome.NO_EFFECT)
    assert report.models[0].source.revision == ("abc" if model == "org/m" else None)


@pytest.mark.parametrize(
    ("argv", "environ", "unused"),
    [
        (["org/m"], {"HF_MODEL_ID": "org/hub", "HF_TASK": "x"}, ["HF_MODEL_ID", "HF_TASK"]),
        (["--model-id", "org/m"], {"HF_REVISION": "abc"}, ["HF_REVISION"]),
        ([], {"HF_MODEL_ID": "org/hub", "HF_REVISION": "abc"}, []),
    ],
)
def test_hub_variables_that_do_not_count_are_named(explained, argv, environ, unused):
    warnings = explained(*argv, environ=environ).warnings
    assert [w.where for w in warnings if "is not used" in w.message] == unused


def test_several_models_have_names_of_their_own(model_dir, resolved):
    first, second = model_dir("", name="a", config=LLAMA), model_dir("", name="b", config=LLAMA)
    assert [model.name for model in resolved(first, second).models] == ["a", "b"]
    again = model_dir("option.modelName=a", name="c", config=LLAMA)
    with pytest.raises(ConfigError, match=r"c/serving.properties:1: two models are named 'a'"):
        resolved(first, again)
    with pytest.raises(ConfigError, match="two models are named 'x'"):
        resolved(first, second, "--served-model-name", "x")


def test_an_entry_is_resolved_like_the_servers_own_models(model_dir):
    model_dir("option.seed=1\njob_queue_size=5", name="late", config=LLAMA)
    entry = ModelEntry("late", "m", "POST /models", version="2", engine="Python")
    environ = {**NO_CACHE, "OPTION_MAX_MODEL_LEN": "64", "OPTION_MODEL_ID": "org/other"}
    argv = ["--model-id", "org/first", "--served-model-name", "first", "--dtype", "float32"]
    model, _ = resolve_entry(entry, {"job_queue_size": "7"}, argv, environ, CPU)
    assert (model.name, model.version, model.source.location) == ("m", "2", "late")
    assert model.engine.config.seed == 1
    assert model.engine.config.max_queue_size == 7
    assert model.engine.config.max_model_len == 64
    assert model.engine.config.dtype == "fp32"
    assert model.where("job_queue_size") == "POST /models"
    with pytest.raises(ConfigError, match="'absent' doesn't exist"):
        resolve_entry(ModelEntry("absent", "m", "POST /models"), {}, argv, environ, CPU)


def test_hub_variable_may_name_a_directory(model_dir, resolved):
    model_dir("option.seed=3", name="my-model", config=LLAMA)
    (model,) = resolved(environ={"HF_MODEL_ID": "my-model", "OPTION_MAX_MODEL_LEN": "9"}).models
    assert (model.name, model.source.kind) == ("my_model", "local")
    assert (model.engine.config.seed, model.engine.config.max_model_len) == (3, 9)


@pytest.mark.parametrize(
    ("argv", "environ", "name", "kind"),
    [
        (["org/m"], {}, "org_m", "hub"),
        (["--model-id", "org/m"], {}, "org_m", "hub"),
        (["s3://bucket/m"], {}, "s3___bucket_m", "s3"),
        ([], {"MODEL_ID": "org/m"}, "org_m", "hub"),
        ([], {"OPTION_MODEL_ID": "org/m"}, "model", "hub"),
        ([], {"OPTION_MODEL_ID": "s3://b/m", "OPTION_MODELNAME": "mine"}, "mine", "s3"),
    ],
)
def test_models_without_a_directory(resolved, argv, environ, name, kind):
    (model,) = resolved(*argv, environ=environ).models
    assert (model.name, model.source.kind) == (name, kind)
    with pytest.raises(ValueError, match="must be fetched"):
        model.engine_config()
    assert model.engine_config(Path("/fetched")).model == Path("/fetched")


def test_a_model_id_may_be_a_directory_inside_the_model(model_dir, resolved):
    model_dir(None, name="model/weights", config=LLAMA)
    (model,) = resolved(model_dir("option.model_id=weights")).models
    assert model.source.kind == "local"
    assert model.files.architecture == "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("argv", "environ", "message"),
    [
        ([], {}, "no model is named"),
        (["/absent/dir"], {}, "neither a path that exists"),
        ([], {"SERVING_LOAD_MODELS": "a=/absent"}, "doesn't exist"),
        ([], {"SERVING_LOAD_MODELS": "a=https://h/m.zip"}, "model_url_pattern, which isn't set"),
        ([], {"SERVING_LOAD_MODELS": "a=djl://h/m"}, "not supported"),
        ([], {"SERVING_LOAD_MODELS": "ALL"}, "needs a model_store"),
        (["-f", "absent.properties", "org/m"], {}, "no such file"),
        (["--model-id", "/absent/dir"], {}, "neither a directory"),
    ],
)
def test_models_that_cannot_be_found(resolved, argv, environ, message):
    with pytest.raises(ConfigError, match=message):
        resolved(*argv, environ=environ)
