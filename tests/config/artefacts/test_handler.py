"""A custom ``model.py`` is read, never run."""

import pytest

from lmi_core.config.artefacts.handler import read_handler
from lmi_core.errors import ModelError


def read(tmp_path, text, **kwargs):
    path = tmp_path / "model.py"
    path.write_text(text)
    return read_handler(path, **kwargs)


@pytest.mark.parametrize(
    "text",
    [
        "def handle(inputs): ...",
        "async def handle(inputs): ...",
        "def handle(inputs, extra=None): ...",
        "def handle(*inputs): ...",
        "def handle(inputs, *, flag=True): ...",
    ],
)
def test_handlers(tmp_path, text):
    assert read(tmp_path, text).handle == "handle"


def test_nothing_of_it_runs(tmp_path):
    text = f"open({str(tmp_path / 'ran')!r}, 'w')\ndef handle(inputs): ...\n"
    assert read(tmp_path, text).handle == "handle"
    assert not (tmp_path / "ran").exists()


def test_another_function_may_be_named(tmp_path):
    assert read(tmp_path, "def serve(x): ...", handle="serve").handle == "serve"


def test_formatters_are_found(tmp_path):
    handler = read(
        tmp_path,
        "@output_formatter\ndef out(output): ...\n@djl.input_formatter()\ndef into(inputs): ...\n",
    )
    assert (handler.handle, handler.output_formatter, handler.input_formatter) == (
        None,
        "out",
        "into",
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def handle(inputs:\n", r"model\.py:1: "),
        ("x = 1\n\nif\n", r"model\.py:3: "),
        ("def other(): ...", "defines other, but not handle"),
        ("", "defines no function, but not handle"),
        ("def handle(): ...", "must take one argument"),
        ("def handle(a, b): ...", "must take one argument"),
        ("def handle(a, *, b): ...", "must take one argument"),
        ("x\0y", "model.py"),
    ],
)
def test_faults(tmp_path, text, message):
    with pytest.raises(ModelError, match=message):
        read(tmp_path, text)


def test_an_unreadable_file_is_named(tmp_path):
    with pytest.raises(ModelError, match="can't be read"):
        read_handler(tmp_path / "absent.py")


@pytest.mark.parametrize(
    "line",
    [
        "from djl_python import Input, Output",
        "from djl_python.inputs import Input",
        "from djl_python.output_formatter import TextGenerationOutput, output_formatter",
        "from djl_python import output_formatter",
        "import djl_python.encode_decode",
        "import torch, os",
        "try:\n    import djl_python.huggingface\nexcept ImportError:\n    pass",
    ],
)
def test_imports_that_work(tmp_path, line):
    assert read(tmp_path, f"{line}\ndef handle(inputs): ...").handle == "handle"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("from djl_python.huggingface import HuggingFaceService", r"model\.py:1: djl_python.hugg"),
        ("import djl_python.transformers_neuronx", "djl_python.transformers_neuronx isn't here"),
        ("from djl_python.inputs import Inputs", "djl_python.inputs.Inputs isn't here"),
        ("from djl_python import rolling_batch", "djl_python.rolling_batch isn't here"),
        ("@prediction_handler\ndef predict(x): ...", "predict is a @prediction_handler, which is"),
    ],
)
def test_what_lmi_has_and_is_not_here_is_refused(tmp_path, line, message):
    with pytest.raises(ModelError, match=message):
        read(tmp_path, f"{line}\ndef handle(inputs): ...")
