"""SageMaker's secure mode: what its controls forbid is refused, wherever it comes from."""

import shutil

import pytest

from lmi_core.config.judge import Verdict
from lmi_core.config.resolve import examine, resolve
from lmi_core.config.targets import launch
from lmi_core.config.targets.host import Host
from lmi_core.errors import UserError

from .cases import NO_CACHE
from .test_judge import explain, write

NO_PICKLES = NO_CACHE | {
    "SAGEMAKER_SECURE_MODE": "true",
    "SAGEMAKER_SECURITY_CONTROLS": "DISALLOW_PICKLE_FILES",
}
HANDLE = "def handle(inputs):\n    return None\n"


@pytest.mark.parametrize(
    ("control", "change", "argv", "said"),
    [
        ("DISALLOW_REQUIREMENTS_TXT", write("requirements.txt", ""), (), "requirements.txt is"),
        ("DISALLOW_PICKLE_FILES", write("optimizer.PT", ""), (), "optimizer.PT is"),
        ("DISALLOW_CUSTOM_INFERENCE_SCRIPTS", write("model.py", HANDLE), (), "model.py is"),
        (
            "DISALLOW_CUSTOM_INFERENCE_SCRIPTS",
            write("other.py", HANDLE),
            ("-o", "option.entryPoint=other.py"),
            "option.entryPoint is",
        ),
        (
            "DISALLOW_CUSTOM_INFERENCE_SCRIPTS",
            lambda model: None,
            ("-o", "option.pythonExecutable=/models/m/python"),
            "option.pythonExecutable is",
        ),
        ("DISALLOW_CHAT_TEMPLATE", write("chat_template.jinja", "x"), (), "chat_template.jinja is"),
        (
            "DISALLOW_CHAT_TEMPLATE",
            write("tokenizer_config.json", '{"chat_template": "x"}'),
            (),
            "tokenizer_config.json is",
        ),
        (
            "DISALLOW_CHAT_TEMPLATE",
            lambda model: None,
            ("--tokenizer-config-path", "other.json"),
            "option.tokenizer_config_path is forbidden",
        ),
        (
            "DISALLOW_TRUST_REMOTE_CODE",
            lambda model: None,
            ("--trust-remote-code",),
            "option.trust_remote_code is",
        ),
        ("DISALLOW_EVERYTHING", lambda model: None, (), "isn't a control of secure mode"),
    ],
)
def test_secure_mode_forbids(control, change, argv, said, model):
    change(model)
    environ = NO_CACHE | {"SAGEMAKER_SECURITY_CONTROLS": f"DISALLOW_PICKLE_FILES, {control}"}
    assert said not in explain(str(model), *argv, environ=environ)[1]
    code, shown = explain(str(model), *argv, environ=environ | {"SAGEMAKER_SECURE_MODE": "True"})
    assert (code, said in " ".join(shown.split())) == (2, True)


def test_secure_mode_looks_into_channels(model, tmp_path):
    channel = tmp_path / "channel"
    (channel / "deep").mkdir(parents=True)
    (channel / "deep/weights.pkl").write_bytes(b"")
    assert explain(str(model), environ=NO_PICKLES)[0] == 0
    code, shown = explain(
        str(model), environ=NO_PICKLES | {"SAGEMAKER_UNTRUSTED_CHANNELS": str(channel)}
    )
    assert (code, "weights.pkl" in shown) == (2, True)


def test_secure_mode_follows_links(model, tmp_path):
    """To directories outside, and in a circle."""
    outside = tmp_path / "outside"
    (outside / "deep").mkdir(parents=True)
    (outside / "deep/again").symlink_to(outside, target_is_directory=True)
    (model / "more").symlink_to(outside, target_is_directory=True)
    assert explain(str(model), environ=NO_PICKLES)[0] == 0
    (outside / "deep/weights.pkl").write_bytes(b"")
    code, shown = explain(str(model), environ=NO_PICKLES)
    assert (code, "more/deep/weights.pkl is forbidden" in " ".join(shown.split())) == (2, True)


@pytest.mark.parametrize(
    ("variable", "text", "said"),
    [
        ("SAGEMAKER_SECURITY_CONTROLS", " ", "names no control"),
        ("SAGEMAKER_UNTRUSTED_CHANNELS", "/nowhere/at/all", "isn't a directory"),
    ],
)
def test_secure_mode_is_never_on_in_vain(variable, text, said, model):
    code, shown = explain(str(model), environ=NO_PICKLES | {variable: text})
    assert (code, said in shown) == (2, True)


def test_secure_mode_looks_into_draft_models(model, tmp_path):
    draft = tmp_path / "draft"
    shutil.copytree(model, draft)
    argv = (str(model), "-o", f"option.speculative_draft_model={draft}")
    assert explain(*argv, environ=NO_PICKLES)[0] == 0
    (draft / "optimizer.pt").write_bytes(b"")
    code, shown = explain(*argv, environ=NO_PICKLES)
    assert (code, "optimizer.pt is forbidden" in shown) == (2, True)


def test_secure_mode_looks_into_adapters_that_are_fetched(model, tmp_path, monkeypatch):
    fetched = tmp_path / "fetched"
    fetched.mkdir()
    monkeypatch.setattr(launch, "fetch_adapter", lambda source, server, **options: fetched)
    monkeypatch.setattr(launch, "judge", lambda *arguments: Verdict(()))
    argv = (str(model), "--enable-lora", "--lora-modules", "fr=org/adapter")
    [config] = examine(argv, NO_CACHE, Host()).models
    server = resolve((str(model),), NO_CACHE, Host()).server
    launch.prepare_model(config, server, NO_PICKLES)
    (fetched / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"adapter_model.bin is forbidden by DISALLOW_PICKLE_FILES"):
        launch.prepare_model(config, server, NO_PICKLES)
