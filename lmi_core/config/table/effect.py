"""What the chosen backend does with one value: the rows of an explanation."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lmi_core.config.sources.merge import Value
from lmi_core.config.table.capabilities import BACKENDS, CAPABILITIES, Backend
from lmi_core.config.table.option import Action, Option, Outcome

_ANYWAY = "asks for what happens anyway"


@dataclass(frozen=True, slots=True)
class Effect:
    """An outcome, and in words what becomes of the value; ``is_missing``: the backend lacks it."""

    outcome: Outcome
    text: str
    is_missing: bool = False


def effect_of(option: Option, value: object, backend_name: str) -> Effect:
    """Decide what ``backend_name`` does with ``value``, by the rule ``capability``."""
    backend = BACKENDS[backend_name]
    action = option.actions.get(backend_name)
    if action is None and backend_name == "handler":
        return Effect(Outcome.MAPPED, f"given to the handler as {option.name}")
    if action is None:
        return Effect(Outcome.NO_EFFECT, f"{backend.title} has no such setting", is_missing=True)
    action = action.for_value(value)
    if action.outcome is Outcome.REFUSED:
        if value in action.idle:
            return Effect(Outcome.NO_EFFECT, _ANYWAY)
        return Effect(Outcome.REFUSED, action.text)
    if _misses(action, backend):
        return _missing(action, value)
    return Effect(action.outcome, _describe(action, value))


def _misses(action: Action, backend: Backend) -> bool:
    return action.capability is not None and action.capability not in backend.capabilities


def _missing(action: Action, value: object) -> Effect:
    assert action.capability is not None
    if value in action.idle:
        return Effect(Outcome.NO_EFFECT, _ANYWAY)
    what = f"not available in this version: {CAPABILITIES[action.capability]}"
    if action.instead:
        what += f" ({action.instead})"
    return Effect(Outcome.NO_EFFECT if action.tuning else Outcome.REFUSED, what, is_missing=True)


def _describe(action: Action, value: object) -> str:
    if action.setting is None:
        return action.text or CAPABILITIES.get(action.capability or "", "")
    text = f"{action.setting}={show(converted(action, value))}"
    return f"{text}; {action.text}" if action.text else text


def converted(action: Action, value: object) -> object:
    """Return the backend's form of ``value``."""
    return (action.convert or {}).get(value, value)


def show(value: object) -> str:
    """Write a value the way it is written in a properties file."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return ",".join(show(item) for item in value)
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def effect_of_value(value: Value, backend_name: str) -> Effect:
    """Decide what ``backend_name`` does with a value that was given; secrets stay masked."""
    effect = effect_of(value.option, value.value, backend_name)
    if not value.option.secret:
        return effect
    given = f"={show(value.value)}"  # ``_describe`` says it so; alone it may be part of other words
    return replace(effect, text=effect.text.replace(given, f"={value.shown}"))
