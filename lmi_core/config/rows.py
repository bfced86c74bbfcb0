"""The lines of an explanation: each key, its place, and what the chosen backend does with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lmi_core.config.problem import Problem, Problems
from lmi_core.config.sources.merge import Value, Values
from lmi_core.config.sources.origin import Setting
from lmi_core.config.table import BY_KEY
from lmi_core.config.table.effect import Effect, effect_of, effect_of_value, show
from lmi_core.config.table.option import Option, Outcome
from lmi_core.config.targets.library_settings import is_library

DEFAULT = "default"
"""The place of a value that wasn't given."""
SHOWN_DEFAULTS = (
    "option.device",
    "option.dtype",
    "option.rolling_batch",
    "option.max_rolling_batch_size",
    "job_queue_size",
    "option.trust_remote_code",
)
"""Keys whose defaults an explanation shows when they aren't given."""
_NOT_TAKEN_OVER = frozenset({"option.dtype"})
"""Keys whose default is the same for every system, whatever its users know."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of an explanation; ``where`` is "default" for a key that wasn't given."""

    key: str
    value: str
    where: str
    outcome: Outcome
    text: str
    overridden: tuple[str, ...] = ()


def server_rows(values: Values, problems: Problems) -> tuple[Row, ...]:
    """Return a row for every server key given."""
    return tuple(
        _ignored(value, values.ignored[key])
        if key in values.ignored
        else _given(value, "server", problems)
        for key, value in values.known.items()
    )


def model_rows(values: Values, backend: str, system: str, problems: Problems) -> tuple[Row, ...]:
    """Return a row for every key given to a model and for the defaults that matter.

    Values that the backend refuses are errors.
    """
    rows = [
        _ignored(value, values.ignored[key])
        if key in values.ignored
        else _given(value, backend, problems, values.refused.get(key))
        for key, value in values.known.items()
    ]
    rows += [
        Row(setting.key, setting.shown, setting.where, Outcome.REFUSED, reason)
        for setting, reason in values.impossible
    ]
    rows += [_unknown(setting, backend) for setting in values.unknown.values()]
    given = {*values.known, *(BY_KEY[setting.key].key for setting, _ in values.impossible)}
    for key in SHOWN_DEFAULTS:
        row = None if key in given else _default(BY_KEY[key], system, backend)
        if row is not None:
            rows.append(row)
    return tuple(rows)


def refused_rows(rows: Sequence[Row], errors: Sequence[Problem]) -> tuple[Row, ...]:
    """The rows, where those that an error is about say so: where devices, files and other keys
    are looked at decides more than a key's own row knew."""
    said = {(error.where, error.key) for error in errors if error.key is not None}
    return tuple(
        replace(row, outcome=Outcome.REFUSED, text="see below")
        if row.outcome is not Outcome.REFUSED and (row.where, row.key) in said
        else row
        for row in rows
    )


def _given(value: Value, backend: str, problems: Problems, refusal: str | None = None) -> Row:
    effect = effect_of_value(value, backend)
    if refusal is not None:
        effect = Effect(Outcome.REFUSED, refusal)
    key, where = value.option.key, value.setting.where
    if effect.outcome is Outcome.REFUSED:
        problems.error(where, f"{key}={value.shown}: {effect.text}", key)
    overridden = tuple(
        s.where if value.option.secret else f"{s.where}: {s.shown}" for s in value.overridden
    )
    return Row(key, value.shown, where, effect.outcome, effect.text, overridden)


def _ignored(value: Value, why: str) -> Row:
    return Row(value.option.key, value.shown, value.setting.where, Outcome.NO_EFFECT, why)


def _unknown(setting: Setting, backend: str) -> Row:
    effect = Effect(Outcome.NO_EFFECT, "unknown key")
    if backend == "handler" and setting.key.startswith("option."):
        name = setting.key.removeprefix("option.")
        effect = Effect(Outcome.MAPPED, f"given to the handler as {name}")
    if is_library(backend) and setting.key.startswith("option."):
        name = setting.key.removeprefix("option.")
        effect = Effect(Outcome.MAPPED, f"{name}={setting.shown}; passed on under its own name")
    return Row(setting.key, setting.shown, setting.where, effect.outcome, effect.text)


def _default(option: Option, system: str, backend: str) -> Row | None:
    taken_over = option.key not in _NOT_TAKEN_OVER
    default = option.default_for(system) if taken_over else option.default
    if default is None or backend not in option.actions:
        return None
    effect = effect_of(option, default, backend)
    return Row(option.key, show(default), DEFAULT, effect.outcome, effect.text)
