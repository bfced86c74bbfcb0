"""Rotary settings that are asked for in the form of config.json: what is refused."""

import json

import pytest

from lmi_core.cli import DEMO_MODEL
from lmi_core.config.explain import main
from lmi_core.config.targets.host import Host

YARN = {"rope_type": "yarn", "factor": 2.0}
OVER_THETA = ("--hf-overrides", json.dumps({"rope_parameters": {**YARN, "rope_theta": 6}}))


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--rope-scaling", "cubic"), "is not linear or dynamic or a JSON object"),
        (("--rope-scaling", '{"factor": 2, "rope_type": "cubic"}'), "has rope_type 'cubic'; supp"),
        (("--rope-scaling", '{"factor": 2}'), "has a factor, but no rope_type, which is one of"),
        (("--rope-scaling", json.dumps({**YARN, "fcator": 2})), "has 'fcator'; allowed are"),
        (("--hf-overrides", '{"rope_parameters": {"rope_type": 3}}'), "has rope_type 3; supported"),
        (("--hf-overrides", '{"rope_parameters": 3}'), "rope_parameters must be an object"),
        (("--hf-overrides", '{"hidden_size": 64, "rope_theta": 5}'), "write hidden_size into the"),
        (("--hf-overrides", '{"rope_theta": "5"}'), "rope_theta is '5'; allowed are int, float"),
        (("--hf-overrides", "[]"), "is not a JSON object"),
    ],
)
def test_what_no_model_has(explained, argv, said):
    """Whether its files are here or not."""
    report = explained("org/m", *argv)
    assert [said in str(error) for error in report.errors] == [True]
    rows = {row.key: row.outcome for row in report.rows[0] if row.where == argv[0]}
    assert "theta is" in said or list(rows.values()) == ["refused"]


def test_two_that_disagree(explained):
    argv = ("--rope-scaling", json.dumps(YARN), "--hf-overrides", '{"rope_parameters": {}}')
    [error] = explained("org/m", *argv).errors
    assert "both set rope_scaling of the lmi engine, to different values" in str(error)
    [error] = explained("org/m", *argv[:2], "--rope-factor", "3").errors
    assert "both set rope_factor of the lmi engine, to different values" in str(error)
    [error] = explained("org/m", "--rope-theta", "5", *OVER_THETA).errors
    assert "both set rope_theta of the lmi engine, to different values" in str(error)
    same = json.dumps({"rope_parameters": YARN})
    assert not explained("org/m", *argv[:2], "--hf-overrides", same).errors


def test_a_number_that_is_none_disagrees_with_nothing(capsys):
    nan = '{"rope_type": "linear", "factor": NaN}'
    assert main([str(DEMO_MODEL), "--rope-scaling", nan]) != 0
    said = capsys.readouterr().out
    assert "rope_scaling.factor is nan, but must be a number above 0" in said
    assert "both set" not in said


def test_vllm_has_them_as_overrides(explained):
    argv = ("-o", "rolling_batch=vllm", "--rope-scaling", json.dumps(YARN))
    host = Host(num_gpus=1, packages=frozenset({"vllm"}))
    [error] = explained("org/m", *argv, host=host).errors
    assert "vLLM has it as option.hf_overrides" in str(error)
    argv = (*argv[:2], "--hf-overrides", json.dumps({"rope_parameters": YARN}))
    [model] = explained("org/m", *argv, host=host).models
    assert model.library.arguments["hf_overrides"] == {"rope_parameters": YARN}
