"""Helpers shared by the tests of the configuration."""

from __future__ import annotations

import itertools
import json
import shutil

import pytest

from lmi_core.config.resolve import examine, resolve
from lmi_core.config.targets.host import Host
from tests.checkpoints import cached_checkpoint

from .cases import CPU, NO_CACHE


@pytest.fixture
def model(tmp_path):
    """Return a directory with a small model."""
    path = tmp_path / "model"
    shutil.copytree(cached_checkpoint("llama2", dtype="bfloat16"), path)
    return path


@pytest.fixture
def model_dir(tmp_path, monkeypatch):
    """Return a function that writes a model directory under a temporary working directory."""
    monkeypatch.chdir(tmp_path)

    def write(properties=None, *, name="model", config=None, **files):
        directory = tmp_path / name
        directory.mkdir(parents=True, exist_ok=True)
        if properties is not None:
            (directory / "serving.properties").write_text(properties)
        if config is not None:
            (directory / "config.json").write_text(json.dumps(config))
        for file, text in files.items():
            (directory / file.replace("__", ".")).write_text(text)
        return name

    return write


@pytest.fixture
def explained():
    """Return a function that examines a command line on a machine without devices."""

    def run(*argv, environ=None, host=CPU):
        return examine(argv, {**NO_CACHE, **(environ or {})}, host)

    return run


@pytest.fixture
def resolved():
    """Return a function that resolves a command line on a machine without devices."""

    def run(*argv, environ=None, host=CPU):
        return resolve(argv, {**NO_CACHE, **(environ or {})}, host)

    return run


@pytest.fixture
def configured(tmp_path):
    """Return a function from what is written to the lmi engine's configuration."""
    numbers = itertools.count()
    checkpoint = cached_checkpoint("llama2", dtype="bfloat16")

    def configure(properties="", argv=(), environ=None):
        directory = tmp_path / f"model{next(numbers)}"
        directory.mkdir()
        for path in checkpoint.iterdir():
            (directory / path.name).symlink_to(path)
        if properties:
            (directory / "serving.properties").write_text(properties)
        arguments = argv if "--model-id" in argv else [*argv, str(directory), "--prefer-native"]
        arguments = [str(directory) if a == "MODEL" else a for a in arguments]
        host = Host(num_gpus=1 if "device=cuda" in properties else 0)
        deployment = resolve(arguments, environ or {}, host)
        return deployment.models[0].engine_config(directory)

    return configure
