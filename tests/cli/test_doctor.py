"""``lmi doctor`` finds what is there and imports nothing heavy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lmi_core import doctor
from lmi_core.config.targets.host import Host
from lmi_core.errors import UserError
from lmi_core.runners.cpu.cpu_model import check_instruction_set


def test_examine() -> None:
    findings = {finding.topic: finding for finding in doctor.examine()}
    for topic in ("lmi", "processor", "kernels", "threads", "memory", "GPU", "torch", "vllm"):
        assert findings[topic].text
    assert not any(finding.is_problem for finding in findings.values())


def test_where_no_gpu_is_ops_are_said_to_who_chooses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmi_core.config.targets.gpus.driver_version", lambda: None)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    monkeypatch.delenv("LMI_OPS", raising=False)
    assert not [each for each in doctor.examine() if "attention" in each.topic]
    monkeypatch.setenv("LMI_OPS", "torch")
    assert [each for each in doctor.examine() if "attention" in each.topic]


def test_devices_that_would_be_left_unused_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = "lmi_core.config.targets.host.detect_host"
    monkeypatch.setattr(hosts, lambda environ: Host(num_gpus=1, num_cores=8))
    assert doctor._placement() == doctor.Finding("models run on", "1 GPU (0), 8 cores")
    monkeypatch.setattr(hosts, lambda environ: Host(num_gpus=1, torch_objection="torch is old"))
    finding = doctor._placement()
    assert finding.is_problem
    assert "1 GPU is visible, but torch is old; --device cpu serves it" in finding.text


def test_a_machine_with_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As nvidia-smi and the driver describe it: what is there, and what would run each op."""
    smi = tmp_path / "nvidia-smi"
    rows = "0, NVIDIA H200, 9.0, 143771 MiB, 580.65\\n1, NVIDIA L4, 8.9, 23034 MiB, 580.65\\n"
    smi.write_text(f"#!/bin/sh\nprintf '{rows}'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("lmi_core.config.targets.gpus.driver_version", lambda: (13, 0))
    monkeypatch.setattr(
        "lmi_core.config.targets.host.detect_host", lambda environ: Host(num_gpus=2, num_cores=8)
    )
    monkeypatch.delenv("LMI_OPS", raising=False)
    texts = {finding.topic: finding.text for finding in doctor.examine()}
    assert texts["driver"] == "580.65, knows CUDA up to 13.0"
    assert texts["GPU 0"] == "NVIDIA H200, sm_90, 143771 MiB"
    assert texts["GPU 1"] == "NVIDIA L4, sm_89, 23034 MiB"
    assert texts["GPU sample"] == "torch: there is no Triton kernel"
    assert texts["GPU attention"].partition(":")[0] in ("triton", "torch")
    assert texts["CUDA kernels"].startswith("the wheel lmi-cuda is not installed")
    library = tmp_path / "library.so"
    library.touch()
    monkeypatch.setenv("LMI_CUDA_LIBRARY", str(library))
    monkeypatch.setattr("lmi_core.ops.kernels.select.why_not_native", lambda device: "it is new")
    assert doctor._cuda_kernels().text.endswith("; not used unless LMI_OPS=native: it is new")
    monkeypatch.setenv("LMI_OPS", "torch")
    texts = {finding.topic: finding.text for finding in doctor.examine()}
    assert texts["GPU attention"] == "torch: LMI_OPS asks for it"


def test_kernels_that_the_build_leaves_out_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `make run` builds, on the machine that it was built on and on a better one."""
    from lmi_core import _native

    monkeypatch.setattr(_native, "unbuilt_instruction_sets", lambda: ["avx2", "avx512"])
    for levels, text in (
        (["scalar", "avx512_vnni"], "avx512_vnni (also built: scalar; left out by make run: "),
        (["scalar"], "scalar (left out by make run: avx2, avx512; make build adds them)"),
    ):
        monkeypatch.setattr(_native, "instruction_sets", lambda levels=levels: levels)
        (kernels,) = (each for each in doctor.examine() if each.topic == "kernels")
        assert kernels.text.startswith(text)
        with pytest.raises(UserError, match=r"avx2, avx512: not built; .*`make build` adds them"):
            check_instruction_set("avx2", "instruction_set 'avx2'")


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
