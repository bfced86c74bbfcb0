"""``lmi doctor`` finds what is there and imports nothing heavy."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from lmi_core import doctor


def test_examine() -> None:
    findings = {finding.topic: finding for finding in doctor.examine()}
    for topic in ("lmi", "processor", "kernels", "threads", "memory", "GPU", "torch", "vllm"):
        assert findings[topic].text
    assert not any(finding.is_problem for finding in findings.values())


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
