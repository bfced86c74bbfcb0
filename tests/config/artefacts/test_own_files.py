"""What a model's own serving.properties may name of the host's files."""

import pytest

from lmi_core.config.artefacts.model_source import find_source
from lmi_core.config.artefacts.own_files import refuse_others_files
from lmi_core.config.problem import Problems
from lmi_core.config.sources.load_models import ModelEntry
from lmi_core.config.sources.merge import merge
from lmi_core.config.sources.models import Listed
from lmi_core.config.sources.origin import Precedence, Setting

CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}


@pytest.mark.parametrize(
    "line",
    [
        "option.chat_template=/etc/passwd",
        "option.chat_template=../../etc/passwd",
        "option.chat_template=sub/../../other",
        "option.tokenizer_config_path=/etc/passwd",
        "option.tokenizer=/etc",
        "option.entryPoint=/etc/handler.py",
        "option.entryPoint=../handler.py",
        "option.lora_adapters=mine=/etc",
        "option.lora_adapters=ok,mine=../other@main",
        "option.speculative_draft_model=/etc",
    ],
)
def test_files_of_the_host_are_refused(model_dir, explained, line):
    directory = model_dir(line + "\n", config=CONFIG)
    messages = [error.message for error in explained(directory).errors]
    assert any("outside the model's directory" in message for message in messages)


@pytest.mark.parametrize(
    "line",
    [
        "option.chat_template=a.jinja",
        "option.chat_template=./sub/../a.jinja",
        "option.chat_template={% for m in messages %}/../{{ m }}{% endfor %}",
        "option.chat_template=TMP/model/a.jinja",
        "option.tokenizer=org/name",
        "option.model_id=TMP/elsewhere",
    ],
)
def test_its_own_files_are_not(model_dir, explained, tmp_path, line):
    model_dir(None, name="elsewhere", config=CONFIG)
    directory = model_dir(line.replace("TMP", str(tmp_path)) + "\n", config=CONFIG)
    messages = [error.message for error in explained(directory).errors]
    assert not any("outside" in message for message in messages)


@pytest.mark.parametrize("where", ["flag", "variable"])
def test_the_operator_may_name_any_file(model_dir, explained, where):
    directory = model_dir("", config=CONFIG)
    if where == "flag":
        report = explained(directory, "--option", "chat_template=/etc/passwd")
    else:
        report = explained(directory, environ={"OPTION_CHAT_TEMPLATE": "/etc/passwd"})
    assert not [error for error in report.errors if "outside" in error.message]


@pytest.mark.parametrize("model_id", ["TMP/other", "../other", "other"])
def test_an_archive_serves_no_other_models_weights(model_dir, tmp_path, model_id):
    model_dir(None, name="other", config=CONFIG)
    unpacked = tmp_path / "unpacked"
    unpacked.mkdir()
    listed = Listed(ModelEntry("https://x/m.zip", "m", "test"), unpacked, is_downloaded=True)
    text = model_id.replace("TMP", str(tmp_path))
    setting = Setting("option.model_id", text, Precedence.FILE, f"{unpacked}/serving.properties:1")
    problems = Problems()
    values = merge([setting], problems)
    refuse_others_files(values, listed, None)
    assert values.refused or find_source(values, listed, problems).kind == "hub"


def test_a_name_of_its_own_is_not_looked_for_where_the_server_runs(model_dir, tmp_path, resolved):
    (tmp_path / "a.jinja").write_text("of the host")
    weights = tmp_path / model_dir(None, name="model/weights", config=CONFIG)
    text = f"option.chat_template=a.jinja\noption.model_id={weights}\n"
    (model,) = resolved(model_dir(text)).models
    assert model.file("option.chat_template", weights) == str(weights / "a.jinja")
    (tmp_path / "model" / "a.jinja").write_text("of the model")
    assert model.file("option.chat_template", weights) == "model/a.jinja"
