"""Devices and packages are found without importing anything."""

import sys

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
        ({"NVIDIA_VISIBLE_DEVICES": "all"}, 2),
        ({"NVIDIA_VISIBLE_DEVICES": "void"}, 0),
        ({"NVIDIA_VISIBLE_DEVICES": "0"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "0", "NVIDIA_VISIBLE_DEVICES": "all"}, 1),
    ],
)
def test_gpus(dev, environ, expected):
    host = detect_host(environ, dev("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"))
    assert (host.num_gpus, host.num_devices) == (expected, expected)


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
