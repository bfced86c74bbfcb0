"""Which of a model's own functions count, beside which entry point and backend."""

import pytest

from lmi_core.config.targets.host import Host
from tests.config.test_dispatch import LLAMA, model_of


def test_a_handler_takes_over_unless_an_entry_point_is_given(model_dir, explained):
    name = model_dir("", config=LLAMA, model__py="def handle(inputs): ...")
    report = explained(name)
    model = model_of(report)
    assert not report.errors
    assert (model.backend, model.handler.handle) == ("handler", "handle")
    assert model.reason == "model.py answers the requests"
    again = explained(name, "-o", "entryPoint=djl_python.huggingface")
    assert model_of(again).backend == "lmi"
    assert model_of(again).custom_code_config() is None
    assert not again.errors


def test_another_file_may_be_the_handler(model_dir, explained):
    name = model_dir("option.entryPoint=own.py", own__py="def handle(inputs): ...")
    model = model_of(explained(name))
    assert model.backend == "handler"
    assert model.custom_code_config().path.name == "own.py"


@pytest.mark.parametrize(
    ("properties", "function"),
    [
        ("", "@output_formatter\ndef f(output): ..."),
        ("option.output_formatter=f", "def f(output): ..."),
    ],
)
def test_a_formatter_leaves_the_model_to_the_native_engine(
    model_dir, explained, properties, function
):
    report = explained(model_dir(properties, config=LLAMA, model__py=function))
    model = model_of(report)
    assert not report.errors
    assert (model.backend, model.output_formatter) == ("lmi", None)
    config = model.custom_code_config()
    assert (config.function, config.output_formatter) == (None, "f")


@pytest.mark.parametrize(
    "entry_point", ["djl_python.huggingface", "djl_python.lmi_vllm.vllm_async_service"]
)
def test_formatters_count_beside_a_built_in_entry_point(model_dir, explained, entry_point):
    text = "@output_formatter\ndef f(output): ...\ndef handle(inputs): ..."
    properties = f"option.entryPoint={entry_point}"
    report = explained(model_dir(properties, config=LLAMA, model__py=text), "--prefer-native")
    assert not report.errors
    (model,) = report.models
    config = model.custom_code_config()
    assert (model.backend, config.function, config.output_formatter) == ("lmi", None, "f")
    (warning,) = [w for w in report.warnings if "isn't called" in w.message]
    assert f"handle isn't called, as in LMI: {properties} answers the requests" in str(warning)


def test_a_handler_beside_a_built_in_entry_point_is_reported(model_dir, explained):
    model = model_dir(
        "option.entryPoint=djl_python.huggingface", config=LLAMA, model__py="def handle(i): ..."
    )
    report = explained(model)
    assert report.models[0].custom_code_config() is None
    assert "model.py: handle isn't called, as in LMI" in str(report.warnings[0])


def test_an_entry_point_may_be_a_module_of_the_model(model_dir, explained, tmp_path):
    name = model_dir("option.entryPoint=code.mine", config=LLAMA)
    assert "is neither a built-in handler" in str(explained(name).errors[0])
    for odd in ("/", "..", ".", "a..b", "/etc/passwd"):
        again = explained(name, "-o", f"entryPoint={odd}")
        assert "is neither a built-in handler" in str(again.errors[0])
    (tmp_path / name / "code").mkdir()
    (tmp_path / name / "code" / "mine.py").write_text("def handle(inputs): ...")
    (model,) = explained(name).models
    assert (model.backend, model.custom_code_config().path.name) == ("handler", "mine.py")


def test_an_input_formatter_leaves_the_model_to_the_native_engine(model_dir, explained):
    text = "@input_formatter\ndef f(i): ..."
    report = explained(model_dir("option.output_formatter=json", config=LLAMA, model__py=text))
    model = model_of(report)
    assert not report.errors
    assert not report.warnings
    assert (model.backend, model.output_formatter) == ("lmi", "json")
    config = model.custom_code_config()
    assert (config.function, config.input_formatter, config.output_formatter) == (None, "f", None)


def test_a_built_in_format_yields_to_the_models_formatter(model_dir, explained):
    text = "@output_formatter\ndef f(output): ..."
    report = explained(model_dir("option.output_formatter=json", config=LLAMA, model__py=text))
    assert "f of model.py formats the answers" in str(report.warnings[0])


@pytest.mark.parametrize(
    ("properties", "text", "message"),
    [
        ("", "def handle(", "model/model.py: model/model.py:1: "),
        ("", "def other(): ...", "defines other, but not handle"),
        ("option.entryPoint=other.py", "def handle(i): ...", "handler model/other.py can't be"),
        ("option.entryPoint=https://h/model.py", "", "code is not fetched from the network"),
        ("option.output_formatter=g", "@output_formatter\ndef f(o): ...", "=g is neither one of"),
        (
            "option.rolling_batch=vllm",
            "@output_formatter\ndef f(o): ...",
            "model.py has formatters, which only our own engine can use",
        ),
    ],
)
def test_handlers_are_checked(model_dir, explained, properties, text, message):
    host = Host(packages=frozenset({"vllm"}))
    report = explained(model_dir(properties, config=LLAMA, model__py=text), host=host)
    assert message in "\n".join(map(str, report.errors))


def test_formatters_stay_where_our_engine_stands_in(model_dir, explained):
    text = "@output_formatter\ndef f(o): ..."
    name = model_dir("option.rolling_batch=vllm", config=LLAMA, model__py=text)
    report = explained(name)
    assert not report.errors
    assert model_of(report).custom_code_config().output_formatter == "f"


def test_a_formatter_that_is_not_there(model_dir, explained):
    report = explained(model_dir("option.output_formatter=g", config=LLAMA))
    assert "=g is neither one of json, jsonlines, sse nor a function" in str(report.errors[0])
