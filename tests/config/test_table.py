"""The option table knows every documented key, variable and flag."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from lmi_core.config.sources.environment import variables_of
from lmi_core.config.table import BY_FLAG, BY_KEY, OPTIONS, suggest_key
from lmi_core.config.table.capabilities import BACKENDS, CAPABILITIES
from lmi_core.config.table.option import SYSTEMS, Outcome

DATA = Path(__file__).parent / "data"
LMI_KEYS: dict[str, list[str]] = json.loads((DATA / "lmi_keys.json").read_text())
TGI_FLAGS: dict[str, str] = json.loads((DATA / "tgi_flags.json").read_text())


@pytest.mark.parametrize("system", LMI_KEYS)
def test_every_documented_key_is_listed_under_its_system(system):
    missing = [key for key in LMI_KEYS[system] if key not in BY_KEY]
    elsewhere = [
        key for key in LMI_KEYS[system] if key in BY_KEY and system not in BY_KEY[key].systems
    ]
    assert (missing, elsewhere) == ([], [])


@pytest.mark.parametrize("flag", TGI_FLAGS)
def test_every_launcher_flag_has_its_variable(flag):
    option = BY_FLAG[flag]
    assert "tgi" in option.systems
    if flag == option.flag.name:
        assert TGI_FLAGS[flag] == option.flag.env
    else:
        assert flag in option.flag.aliases


def test_spellings_and_flags_belong_to_one_option():
    spellings = [s for option in OPTIONS for s in (option.key, *option.spellings)]
    flags = [n for o in OPTIONS if o.flag for n in (o.flag.name, *o.flag.aliases)]
    assert len(spellings) == len(set(spellings))
    assert len(flags) == len(set(flags))


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.key)
def test_record_is_complete(option):
    assert option.doc.endswith(".")
    assert option.systems
    assert set(option.systems) <= set(SYSTEMS)
    assert set(option.defaults) <= set(SYSTEMS)
    assert set(option.choices) <= set(SYSTEMS)
    assert ("server" if option.scope == "server" else "lmi") in option.actions
    if option.replaced_by:
        assert option.deprecated
        assert option.replaced_by in BY_KEY
    for action in option.actions.values():
        for each in (action, *(action.by_value or {}).values()):
            assert (each.outcome is Outcome.HONOURED) == bool(each.test)
            assert each.text or each.setting or each.capability
            assert each.capability is None or each.capability in CAPABILITIES


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.key)
def test_defaults_and_choices_are_possible_values(option):
    for default in (option.default, *option.defaults.values()):
        if default is not None:
            assert option.type.parse(str(default)) == default or default in (True, False, "false")
    for choices in option.choices.values():
        for choice in choices:
            option.type.parse(choice)


def test_variables_of_an_option_start_with_the_regular_one():
    assert variables_of(BY_KEY["option.quantize"]) == (
        "OPTION_QUANTIZE",
        "HF_MODEL_QUANTIZE",
        "QUANTIZE",
    )
    assert variables_of(BY_KEY["job_queue_size"])[0] == "SERVING_JOB_QUEUE_SIZE"


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("option.max_rolling_batchsize", "option.max_rolling_batch_size"),
        ("option.entrypoint", "option.entryPoint"),
        ("option.tensor-parallel-degree", "option.tensor_parallel_degree"),
        ("zzzzqqqq", None),
        ("option.foo", None),
        ("max_modell_len", "option.max_model_len"),
    ],
)
def test_suggestion(written, meant):
    assert suggest_key(written) == meant


def test_backends_export_known_capabilities_only():
    for backend in BACKENDS.values():
        assert backend.capabilities <= set(CAPABILITIES)
    assert {name for option in OPTIONS for name in option.actions} <= set(BACKENDS)


def test_extras_that_errors_name_exist():
    root = Path(__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = set(project["optional-dependencies"])
    named = {b.extra for b in BACKENDS.values() if b.extra}
    for folder in ("lmi_core", "server"):
        for path in (root / folder).rglob("*.py"):
            named |= set(re.findall(r'MissingExtraError\([^)]*"(\w+)"\s*\)', path.read_text()))
            named |= set(re.findall(r"lmi-core\[(\w+)\]", path.read_text()))
    assert {"hub", "neuron", "transformers", "trtllm", "vllm"} <= named <= extras
