"""A model's requirements go to a directory of their own."""

import subprocess
import sys
import zipfile

import pytest

from lmi_core.config.artefacts.requirements import install_requirements
from lmi_core.errors import ModelError


def write_wheel(directory, name="lmi_probe", version="1.0"):
    """Write a wheel of one module by hand."""
    directory.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    path = directory / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}.py", "VALUE = 42\n")
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        wheel.writestr(
            f"{info}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr(f"{info}/RECORD", f"{name}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n")


@pytest.fixture
def model(tmp_path):
    directory = tmp_path / "model"
    write_wheel(directory / "requirements")
    (directory / "requirements.txt").write_text("lmi_probe==1.0\n")
    return directory


def test_requirements_are_installed_beside_the_server(model, tmp_path):
    target = install_requirements(model, tmp_path / "cache", offline=True)
    assert target.is_relative_to(tmp_path / "cache")
    assert (target / "lmi_probe.py").is_file()
    code = "import lmi_probe; print(lmi_probe.VALUE)"
    alone = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert alone.returncode != 0
    found = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(target)!r}); {code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == "42"
    (model / "requirements").rename(tmp_path / "moved")
    assert install_requirements(model, tmp_path / "cache", offline=True) == target


def test_a_model_without_requirements_installs_nothing(tmp_path):
    assert install_requirements(tmp_path, tmp_path / "cache") is None
    assert not (tmp_path / "cache").exists()


def test_a_failure_says_what_pip_says(model, tmp_path):
    (model / "requirements.txt").write_text("lmi_probe==2.0\n")
    with pytest.raises(
        ModelError, match=r"requirements\.txt can't be installed: ERROR:.*lmi.probe"
    ):
        install_requirements(model, tmp_path / "cache", offline=True)


def test_pip_gets_the_variables_that_the_models_code_gets(model, tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho ERROR: PROBE is $PROBE and HOME $HOME >&2\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(ModelError, match=r"PROBE is 1 and HOME$"):
        install_requirements(
            model, tmp_path / "cache", offline=True, python=str(python), env={"PROBE": "1"}
        )
