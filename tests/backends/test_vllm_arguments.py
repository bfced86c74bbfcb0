"""What configurations pass on to vLLM are arguments that a release of it has."""

import dataclasses
from pathlib import Path

import pytest

from lmi_core.config.table import OPTIONS
from lmi_core.config.table.option import Action
from lmi_core.config.table.shared import FRONT
from lmi_core.config.targets.host import Host
from lmi_core.config.targets.library_settings import _OURS
from tests.backends.fake_vllm.vllm.engine.arg_utils import AsyncEngineArgs
from tests.config.conftest import explained

__all__ = ["explained"]

RECORDED = Path(__file__).with_name("vllm_arguments.txt").read_text().splitlines()
ARGUMENTS = frozenset(line for line in RECORDED if not line.startswith("#"))
HOST = Host(num_gpus=8, packages=frozenset({"vllm"}))


def actions_of(action: Action | None):
    if action is not None:
        yield action
        for each in (action.by_value or {}).values():
            yield from actions_of(each)


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.key)
def test_a_setting_of_vllm_is_one_of_its_arguments(option):
    settings = {action.setting for action in actions_of(option.actions.get("vllm"))} - {None}
    if option.key in FRONT or option.key == "job_queue_size":
        return
    passed_on = {s.partition(".")[0] for s in settings - _OURS if not s.startswith("option.")}
    assert passed_on <= ARGUMENTS


def test_the_scripted_module_has_no_others():
    assert {field.name for field in dataclasses.fields(AsyncEngineArgs)} <= ARGUMENTS


@pytest.mark.parametrize(
    "written",
    [
        "predict_timeout=60",
        "model_loading_timeout=600",
        "max_input_tokens=512",
        "adapters=adapters",
        "output_formatter=json",
        "job_queue_size=7",
        "lora_extra_vocab_size=256",
        "tensor_parallel_degree=2",
        "device=cuda",
    ],
)
def test_keys_that_the_server_takes_do_not_reach_vllm(explained, written):
    report = explained("org/m", "-o", "rolling_batch=vllm", "-o", written, host=HOST)
    assert not report.errors
    assert report.models[0].library.arguments.keys() <= ARGUMENTS


@pytest.mark.parametrize("written", ["lora_extra_vocab_size=512", "long_lora_scaling_factors=3.0"])
def test_what_vllm_has_no_more_is_refused(explained, written):
    report = explained("org/m", "-o", "rolling_batch=vllm", "-o", written, host=HOST)
    assert "leave it out" in str(report.errors[0])
