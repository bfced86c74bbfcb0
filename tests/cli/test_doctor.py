"""``lmi doctor`` finds what is there and imports nothing heavy."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from lmi_core import doctor
from lmi_core.config.targets.host import Host


def test_examine() -> None:
    findings = {finding.topic: finding for finding in doctor.examine()}
    for topic in ("lmi", "processor", "kernels", "threads", "memory", "GPU", "torch", "vllm"):
        assert findings[topic].text
    assert not any(finding.is_problem for finding in findings.values())


def test_devices_that_would_be_left_unused_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = "lmi_core.config.targets.host.detect_host"
    monkeypatch.setattr(hosts, lambda environ: Host(num_gpus=1, num_cores=8))
    assert doctor._placement() == doctor.Finding("models run on", "1 GPU (0), 8 cores")
    monkeypatch.setattr(hosts, lambda environ: Host(num_gpus=1, torch_objection="torch is old"))
    finding = doctor._placement()
    assert finding.is_problem
    assert "1 GPU is visible, but torch is old; --device cpu serves it" in finding.text


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(as_json=True) == 0
    assert "threads" in json.loads(capsys.readouterr().out)


def test_imports_no_optional_package() -> None:
    code = (
        "import sys\nfrom lmi_core.doctor import examine\nexamine()\nprint('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "False\n"


def test_missing_extension_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lmi_core._native", None)
    monkeypatch.delattr("lmi_core._native", raising=False)
    assert doctor.main() == 1


def test_byte_counts() -> None:
    assert doctor._bytes(512) == "512 B"
    assert doctor._bytes(1536) == "1.5 KiB"
    assert doctor._bytes(24 << 30) == "24 GiB"
