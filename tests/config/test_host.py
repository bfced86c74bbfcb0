"""Devices and packages are found without importing anything."""

import importlib.util
import sys
from types import SimpleNamespace

import pytest

from lmi_core.config.targets.host import detect_host


@pytest.fixture
def dev(tmp_path):
    def make(*names):
        for name in names:
            (tmp_path / name).touch()
        return tmp_path

    return make


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, 2),
        ({"CUDA_VISIBLE_DEVICES": "1"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, 2),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, 0),
        ({"CUDA_VISIBLE_DEVICES": "2"}, 0),
        ({"CUDA_VISIBLE_DEVICES": "0, 1"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "0,7,1"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "GPU-1b5c"}, 1),
        ({"NVIDIA_VISIBLE_DEVICES": "all"}, 2),
        ({"NVIDIA_VISIBLE_DEVICES": "void"}, 0),
        ({"NVIDIA_VISIBLE_DEVICES": "0"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "0", "NVIDIA_VISIBLE_DEVICES": "all"}, 1),
    ],
)
def test_gpus(dev, environ, expected):
    host = detect_host(environ, dev("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"))
    assert (host.num_gpus, host.num_devices) == (expected, expected)


def test_gpus_keep_the_names_that_the_variable_gives_them(dev):
    host = detect_host({"CUDA_VISIBLE_DEVICES": "1,GPU-1b5c"}, dev("nvidia0", "nvidia1"))
    assert host.gpu_names == ("1", "GPU-1b5c")
    assert detect_host({}, dev()).gpu_names == ("0", "1")


@pytest.mark.parametrize(
    ("version", "driver", "objection"),
    [
        ("cuda: Optional[str] = None", None, "built without CUDA"),
        ("cuda: Optional[str] = '13.0'", None, "libcuda.so.1 can't be loaded"),
        ("cuda: Optional[str] = '13.0'", (12, 8), "for CUDA 13.0, and the driver knows CUDA 12.8"),
        ("cuda: Optional[str] = '12.8'", (12, 4), ""),
        ("cuda: Optional[str] = '12.8'", (13, 0), ""),
        ("nothing that is known", None, ""),
        ("__version__ = '2.7.1+cu128'\ncuda: Optional[str] = '12.8'", (13, 0), "older than 2.8,"),
    ],
)
def test_whether_torch_can_use_a_gpu_is_found_without_it(
    dev, tmp_path, monkeypatch, version, driver, objection
):
    torch = tmp_path / "packages" / "torch"
    torch.mkdir(parents=True)
    (torch / "__init__.py").write_text("raise RuntimeError('imported')")
    (torch / "version.py").write_text(f"__version__ = '2.13.0'\n{version}\n")
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: SimpleNamespace(origin=str(torch / "__init__.py")),
    )
    monkeypatch.setattr("lmi_core.config.targets.gpus.driver_version", lambda: driver)
    found = detect_host({}, dev("nvidia0")).torch_objection
    assert objection in found
    assert bool(found) == bool(objection)
    assert detect_host({"CUDA_VISIBLE_DEVICES": ""}, dev("nvidia0")).torch_objection == ""


def test_a_gpu_without_torch(dev, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "lmi-core[cuda]" in detect_host({}, dev("nvidia0")).torch_objection


def test_sizes_of_the_machine(dev):
    host = detect_host({}, dev())
    assert host.num_cores >= 1
    assert host.memory_bytes > 1 << 28


def test_a_variable_alone_makes_no_device(dev):
    assert detect_host({"CUDA_VISIBLE_DEVICES": "0,1"}, dev()).num_devices == 0


def test_neuron_cores(dev):
    directory = dev("neuron0", "neuron1")
    assert detect_host({}, directory).num_neuron_cores == 4
    assert detect_host({"NEURON_RT_NUM_CORES": "2"}, directory).num_neuron_cores == 2


def test_packages_are_not_imported(tmp_path, monkeypatch):
    (tmp_path / "vllm.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert "vllm" in detect_host({}, tmp_path).packages
    assert "vllm" not in sys.modules
