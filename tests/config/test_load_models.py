"""The ``load_models`` grammar and the scan of a model store."""

import pytest

from lmi_core.config.problem import Problems
from lmi_core.config.sources.load_models import (
    name_of,
    name_of_hub_id,
    parse_load_models,
    scan_store,
)


def parse(text):
    problems = Problems()
    return parse_load_models(text, "SERVING_LOAD_MODELS", problems), problems


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("test::Python=/opt/ml/model", [("test", None, "Python", (), "/opt/ml/model")]),
        ("test::MPI=/opt/ml/model", [("test", None, "MPI", (), "/opt/ml/model")]),
        (
            "[m:v1:Python:0;1]=https://h/m.zip",
            [("m", "v1", "Python", ("gpu0", "gpu1"), "https://h/m.zip")],
        ),
        ("/opt/ml/model", [("model", None, None, (), "/opt/ml/model")]),
        ("a=/m/a,b=/m/b", [("a", None, None, (), "/m/a"), ("b", None, None, (), "/m/b")]),
        ("/m/a , /m/b", [("a", None, None, (), "/m/a"), ("b", None, None, (), "/m/b")]),
        ("s3://b/p/llama-2/", [("llama_2", None, None, (), "s3://b/p/llama-2/")]),
        ("https://h/m.tar.gz?x=1", [("m", None, None, (), "https://h/m.tar.gz?x=1")]),
        ("m:::cpu;nc0=/m", [("m", None, None, ("cpu", "nc0"), "/m")]),
        ("m:::*=/m", [("m", None, None, (), "/m")]),
        ("m:v:Python:*:rest=/m", [("m", "v", "Python", (), "/m")]),
        ("none", []),
        ("NONE", []),
        ("ALL", None),
        ("", None),
    ],
)
def test_grammar(text, expected):
    entries, problems = parse(text)
    assert not problems.items
    if expected is None:
        assert entries is None
    else:
        assert [(e.name, e.version, e.engine, e.devices, e.url) for e in entries] == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a=/x,a=/y", "'a' twice"),
        ("a::Pythn=/x", "engine 'Pythn'"),
        ("a:::gpux=/x", "device 'gpux'"),
    ],
)
def test_faults(text, message):
    _, problems = parse(text)
    assert message in str(problems.errors[0])


def test_one_name_may_have_several_versions():
    entries, problems = parse("a:1=/x,a:2=/y")
    assert [e.version for e in entries] == ["1", "2"]
    assert not problems.items


def test_names():
    assert name_of("/m/my-model.zip") == "my_model"
    assert name_of("/m/_x") == "_x"
    assert name_of("/") == "model"
    assert name_of_hub_id("meta-llama/Llama-2-7b") == "meta_llama_Llama_2_7b"


def test_a_store_of_directories_is_many_models(tmp_path):
    for name in ("a", "b/inner", "empty"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "a" / "serving.properties").touch()
    (tmp_path / "b/inner/config.json").touch()
    (tmp_path / ".hidden").touch()
    problems = Problems()
    entries = scan_store(tmp_path, "model_store", problems)
    assert [(e.name, e.url) for e in entries] == [
        ("a", str(tmp_path / "a")),
        ("b", str(tmp_path / "b/inner")),
    ]


def test_a_store_with_files_is_one_model(tmp_path):
    store = tmp_path / "model"
    (store / "adapters").mkdir(parents=True)
    (store / "serving.properties").touch()
    problems = Problems()
    assert [e.name for e in scan_store(store, "", problems)] == ["model"]
    assert not problems.warnings


def test_a_stray_file_that_makes_a_store_one_model_is_named(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "notes.txt").touch()
    problems = Problems()
    assert len(scan_store(tmp_path, "-s", problems)) == 1
    assert "read as one model, for it holds 'notes.txt'" in str(problems.warnings[0])


def test_a_store_of_files_alone_hides_nothing(tmp_path):
    (tmp_path / "model.gguf").touch()
    problems = Problems()
    assert len(scan_store(tmp_path, "-s", problems)) == 1
    assert not problems.warnings


@pytest.mark.parametrize("name", ["absent", "\ud800", "a\0b", "x" * 5000])
def test_an_unreadable_store_is_an_error(tmp_path, name):
    problems = Problems()
    assert scan_store(tmp_path / name, "model_store", problems) == []
    assert "can't be read" in str(problems.errors[0])
