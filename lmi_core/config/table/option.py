"""One row of the option table: an option's names, type, defaults and what each backend does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from lmi_core.config.table.value_type import ValueType

SYSTEMS = {
    "common": "Common keys",
    "batching": "Dynamic batching and workers",
    "accelerate": "Hugging Face Accelerate",
    "scheduler": "Scheduler rolling batch",
    "lmi_dist": "LMI-Dist",
    "vllm": "vLLM",
    "deepspeed": "DeepSpeed",
    "fastertransformer": "FasterTransformer",
    "neuronx": "Transformers-NeuronX",
    "trtllm": "TensorRT-LLM",
    "stable_diffusion": "Stable Diffusion",
    "tgi": "Text Generation Inference",
    "lmi": "lmi engine",
    "llama_cpp": "llama-server",
    "server": "Server",
}
"""The systems a configuration can be written for, with their titles."""


class Outcome(StrEnum):
    """What becomes of a value: the four answers of an explanation."""

    HONOURED = "honoured"
    MAPPED = "mapped"
    NO_EFFECT = "no effect"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Action:
    """What one backend does with an option.

    ``setting`` is the backend's own name for it; ``convert`` translates values on the way.
    ``capability`` is needed for any value outside ``idle`` (values that ask for what happens
    anyway). Without it the value is refused, or has no effect if it is only ``tuning``.
    ``instead`` says what is done or to be written while it is missing. ``test`` names the test of
    the behaviour and is required to say "honoured".
    """

    outcome: Outcome
    text: str = ""
    setting: str | None = None
    capability: str | None = None
    tuning: bool = False
    idle: tuple[object, ...] = ()
    convert: Mapping[Any, object] | None = None
    by_value: Mapping[Any, Action] | None = None
    test: str | None = None
    instead: str = ""

    def for_value(self, value: object) -> Action:
        """Return the action for this value (they differ for keys such as ``quantize``)."""
        return (self.by_value or {}).get(value, self)


def honoured(
    setting: str | None = None,
    text: str = "",
    *,
    test: str,
    capability: str | None = None,
    tuning: bool = False,
    idle: tuple[object, ...] = (),
    convert: Mapping[Any, object] | None = None,
    by_value: Mapping[Any, Action] | None = None,
) -> Action:
    """Say that the behaviour is the documented one, as ``test`` shows."""
    return Action(
        Outcome.HONOURED,
        text,
        setting,
        capability,
        tuning,
        idle,
        convert=convert,
        by_value=by_value,
        test=test,
    )


def mapped(
    setting: str | None,
    text: str = "",
    *,
    capability: str | None = None,
    tuning: bool = False,
    idle: tuple[object, ...] = (),
    convert: Mapping[Any, object] | None = None,
    by_value: Mapping[Any, Action] | None = None,
) -> Action:
    """Say that the value becomes ``setting`` of the backend, or what ``text`` says."""
    return Action(
        Outcome.MAPPED, text, setting, capability, tuning, idle, convert, by_value=by_value
    )


def no_effect(why: str, *, by_value: Mapping[Any, Action] | None = None) -> Action:
    """Say that the value changes nothing, and why."""
    return Action(Outcome.NO_EFFECT, why, by_value=by_value)


def refused(
    instead: str,
    *,
    idle: tuple[object, ...] = (),
    by_value: Mapping[Any, Action] | None = None,
) -> Action:
    """Say that the value can't be used at all, and what to write instead."""
    return Action(Outcome.REFUSED, instead, idle=idle, by_value=by_value)


def needs(
    capability: str,
    instead: str = "",
    *,
    setting: str | None = None,
    tuning: bool = False,
    idle: tuple[object, ...] = (False,),
    convert: Mapping[Any, object] | None = None,
) -> Action:
    """Say that the value waits for ``capability``; ``tuning`` if its absence only costs speed."""
    return Action(Outcome.MAPPED, "", setting, capability, tuning, idle, convert, instead=instead)


@dataclass(frozen=True, slots=True)
class Flag:
    """The option's name on the text-generation-inference command line and in its environment.

    A ``switch`` takes no value on the command line and only ``true`` or ``false`` in its variable.
    ``legacy_env`` is an older name of the variable.
    """

    name: str
    env: str | None = None
    legacy_env: str | None = None
    aliases: tuple[str, ...] = ()
    switch: bool = False
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option: names in every source, type, defaults, and an action per backend.

    ``key`` is the spelling in a properties file, ``spellings`` are others accepted there, ``env``
    lists variables beyond the regular ``OPTION_*`` or ``SERVING_*`` form. ``defaults`` and
    ``choices`` refine ``default`` and ``type`` per system. ``replaced_by`` is the key that a
    deprecated option turns into.
    """

    key: str
    type: ValueType
    doc: str
    systems: tuple[str, ...]
    actions: Mapping[str, Action]
    default: object = None
    defaults: Mapping[str, object] = field(default_factory=dict)
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    spellings: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    flag: Flag | None = None
    deprecated: str = ""
    replaced_by: str | None = None
    scope: Literal["model", "server"] = "model"
    secret: bool = False

    @property
    def name(self) -> str:
        """The key without its ``option.`` prefix."""
        return self.key.removeprefix("option.")

    @property
    def variable(self) -> str:
        """The regular environment variable of the key."""
        if self.key.startswith("option."):
            return "OPTION_" + self.name.upper()
        return "SERVING_" + self.key.upper()

    def default_for(self, system: str) -> object:
        """Return the default that users of ``system`` know."""
        return self.defaults.get(system, self.default)


def server_option(
    key: str,
    kind: ValueType,
    doc: str,
    action: Action,
    default: object = None,
    *env: str,
    secret: bool = False,
    flag: Flag | None = None,
) -> Option:
    """An option of the server as a whole."""
    return Option(
        key=key,
        type=kind,
        doc=doc,
        systems=("server",),
        default=default,
        env=env,
        flag=flag,
        scope="server",
        secret=secret,
        actions={"server": action},
    )
