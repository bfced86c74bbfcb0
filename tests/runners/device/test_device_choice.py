"""What ``lmi serve`` takes on a machine with a GPU, as far as a machine without one can tell."""

from __future__ import annotations

import importlib.util
import logging
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from lmi_core.config.resolve import resolve
from lmi_core.config.targets.host import Host
from lmi_core.config.targets.launch import Launch, prepare
from lmi_core.errors import UserError
from lmi_core.settings.engine_config import EngineConfig
from lmi_core.settings.lora_config import LoraConfig
from lmi_core.version import LEAST_TORCH
from tests.checkpoints import cached_checkpoint

torch = pytest.importorskip("torch", exc_type=ImportError)

from lmi_core.models import loader  # noqa: E402
from lmi_core.runners.device import device_runner  # noqa: E402

EXTRAS = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"][
    "optional-dependencies"
]


class _LoadingError(Exception):
    """Weights would be loaded now."""


def config_on_a_gpu() -> EngineConfig:
    deployment = resolve([str(cached_checkpoint("llama2"))], {}, Host(num_gpus=1, num_cores=8))
    (launch,) = prepare(deployment, {})
    assert isinstance(launch, Launch)
    assert isinstance(launch.engine, EngineConfig)
    return launch.engine


@pytest.mark.parametrize("ops", ["", "torch"])
def test_a_gpu_is_used_with_triton_and_torch_which_the_log_names(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ops: str
) -> None:
    def stop(*_: object) -> None:
        raise _LoadingError

    monkeypatch.setenv("LMI_OPS", ops)
    find_spec = importlib.util.find_spec
    has_triton = {"triton": object()}
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *p: has_triton.get(name) or find_spec(name, *p)
    )
    monkeypatch.setattr(device_runner, "find_device", lambda config: torch.device("cuda", 0))
    monkeypatch.setattr(device_runner, "memory_of", lambda device: None)
    monkeypatch.setattr(loader, "load_weights", stop)
    config = config_on_a_gpu()
    assert config.device == "cuda"
    with caplog.at_level(logging.INFO), pytest.raises(_LoadingError):
        device_runner.load_device_runner(config)
    (text,) = (message for message in caplog.messages if message.startswith("ops on cuda:0: "))
    attention = "triton" if not ops else "torch"
    assert re.search(rf"{attention}: [a-z_, ]*attention", text)
    assert re.search(r"torch: [a-z_, ]*sample", text)
    assert "native: " not in text
    assert "; CUDA kernels where LMI_OPS=native asks: the wheel lmi-cuda is not inst" in text


def test_an_old_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.7.1+cu128")
    with pytest.raises(
        UserError, match=r"device=cuda, but torch 2\.7\.1\+cu128 here is older"
    ) as e:
        device_runner.find_device(config_on_a_gpu())
    assert e.value.field == "device"


def test_the_extras_want_the_torch_that_is_checked() -> None:
    least = f"torch>={'.'.join(map(str, LEAST_TORCH))}"
    assert least in EXTRAS["torch"]
    assert least in EXTRAS["cuda"]


def test_no_extra_for_gpus_compiles_anything() -> None:
    """flash-attn has no wheels on PyPI."""
    assert not any("flash" in name for name in EXTRAS["cuda"])
    assert any("flash-attn" in name for name in EXTRAS["flash-attn"])


@pytest.mark.parametrize(("ops", "launched_by"), [("", "Python"), ("native", "C++")])
def test_what_no_gpu_has_seen_is_launched_by_c_where_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, ops: str, launched_by: str
) -> None:
    monkeypatch.setenv("LMI_OPS", ops)
    monkeypatch.setattr(device_runner, "CudaRunner", lambda *_: "C++")
    monkeypatch.setattr(device_runner, "TorchRunner", lambda *_: "Python")
    device, chosen = torch.device("cuda"), {"launch": "native"}
    config, lora = EngineConfig(model="any"), EngineConfig(model="any", lora=LoraConfig())
    make: Callable[..., object] = device_runner.make_runner
    assert make(config, None, device, chosen) == "C++"
    assert make(config, None, device, chosen, ranks=object()) == launched_by
    assert make(lora, None, device, chosen) == launched_by
