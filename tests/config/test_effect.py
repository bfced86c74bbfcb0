"""The contract of capabilities: what is missing is refused or has no effect; adding one turns
rows on."""

from dataclasses import replace

import pytest

from lmi_core.config.table import BY_KEY, capabilities
from lmi_core.config.table.effect import Effect, effect_of, show
from lmi_core.config.table.option import Option, Outcome, mapped, needs, no_effect, refused
from lmi_core.config.table.value_type import Text

LOAD_FORMAT = BY_KEY["option.load_format"]


def option(action):
    return Option(key="option.x", type=Text(), doc="X.", systems=("common",), actions=action)


@pytest.fixture
def with_capability(monkeypatch):
    def add(*names):
        native = capabilities.BACKENDS["lmi"]
        more = replace(native, capabilities=native.capabilities | set(names))
        monkeypatch.setitem(capabilities.BACKENDS, "lmi", more)

    return add


def test_a_missing_capability_refuses_what_changes_tokens():
    effect = effect_of(LOAD_FORMAT, "dummy", "lmi")
    assert effect.outcome is Outcome.REFUSED
    assert effect.text == "not available in this version: random weights"


def test_a_missing_capability_has_no_effect_where_it_only_tunes(monkeypatch):
    native = capabilities.BACKENDS["lmi"]
    less = replace(native, capabilities=native.capabilities - {"speculation.draft_model"})
    monkeypatch.setitem(capabilities.BACKENDS, "lmi", less)
    effect = effect_of(BY_KEY["option.draft_model_id"], "m", "lmi")
    assert effect.outcome is Outcome.NO_EFFECT
    assert "draft model" in effect.text


def test_values_that_ask_for_nothing_are_not_refused():
    for key, value in (("option.chat_template_content_format", "auto"),):
        effect = effect_of(BY_KEY[key], value, "lmi")
        assert effect == Effect(Outcome.NO_EFFECT, "asks for what happens anyway")


def test_adding_the_capability_turns_the_row_on(with_capability):
    with_capability("weights.dummy")
    assert effect_of(LOAD_FORMAT, "dummy", "lmi").outcome is Outcome.MAPPED
    assert effect_of(LOAD_FORMAT, "pt", "lmi").outcome is Outcome.NO_EFFECT


@pytest.mark.parametrize(
    ("action", "value", "expected"),
    [
        (mapped("y"), "v", Effect(Outcome.MAPPED, "y=v")),
        (mapped("y", "so"), True, Effect(Outcome.MAPPED, "y=true; so")),
        (mapped("y", convert={"v": 3}), "v", Effect(Outcome.MAPPED, "y=3")),
        (mapped(None, "so"), "v", Effect(Outcome.MAPPED, "so")),
        (no_effect("why"), "v", Effect(Outcome.NO_EFFECT, "why")),
        (refused("write z"), "v", Effect(Outcome.REFUSED, "write z")),
        (
            refused("write z", idle=("v",)),
            "v",
            Effect(Outcome.NO_EFFECT, "asks for what happens anyway"),
        ),
        (
            needs("server.sessions_in_s3", tuning=True, idle=()),
            "v",
            Effect(
                Outcome.NO_EFFECT,
                "not available in this version: sessions in S3",
                is_missing=True,
            ),
        ),
        (mapped("y", by_value={"v": refused("no")}), "v", Effect(Outcome.REFUSED, "no")),
    ],
)
def test_actions(action, value, expected):
    assert effect_of(option({"lmi": action}), value, "lmi") == expected


def test_a_backend_without_the_key_has_no_effect():
    effect = effect_of(option({}), "v", "vllm")
    assert effect == Effect(Outcome.NO_EFFECT, "vLLM has no such setting", is_missing=True)


def test_values_are_shown_as_they_are_written():
    assert show((1, 2)) == "1,2"
    assert show(False) == "false"
    assert show("x" * 100) == "x" * 57 + "..."
