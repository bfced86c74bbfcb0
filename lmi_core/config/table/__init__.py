"""The option table: every key, variable and flag that is understood, one record each."""

from __future__ import annotations

import difflib
import re
from dataclasses import replace
from functools import cache, lru_cache

from lmi_core.config.table import (
    accelerate,
    answers,
    batching,
    common,
    deepspeed,
    handler,
    launchers,
    lmi_dist,
    lora,
    native,
    neuronx,
    observing,
    processes,
    scheduler,
    server,
    shared,
    stable_diffusion,
    tgi,
    tgi_server,
    transformers,
    trtllm,
    vllm,
)
from lmi_core.config.table.option import Option
from lmi_core.config.table.value_type import Bool

_OPTIONS: tuple[Option, ...] = (
    common.OPTIONS
    + answers.OPTIONS
    + processes.OPTIONS
    + batching.OPTIONS
    + accelerate.OPTIONS
    + scheduler.OPTIONS
    + lmi_dist.OPTIONS
    + lora.OPTIONS
    + vllm.OPTIONS
    + deepspeed.OPTIONS
    + neuronx.OPTIONS
    + trtllm.OPTIONS
    + tgi.OPTIONS
    + tgi_server.OPTIONS
    + native.OPTIONS
    + launchers.OPTIONS
    + stable_diffusion.OPTIONS
    + server.OPTIONS
    + observing.OPTIONS
)

_ADAPTERS = ("transformers", "vllm", "trtllm", "neuron")


def _complete(option: Option) -> Option:
    """Add the columns that are kept by backend rather than by key."""
    if option.scope == "server":
        return option
    actions = dict(option.actions)
    if "vllm" in actions:
        actions.setdefault("neuron", actions["vllm"])  # vLLM serves there, by a plugin
        if actions["vllm"].capability is not None:  # this server lacks it, whoever computes
            actions.setdefault("trtllm", actions["vllm"])
    own = transformers.transformers_action(option)
    if own is not None:
        actions["transformers"] = own
    actions |= shared.front_actions(option, _ADAPTERS)
    if option.key in handler.ACTIONS:
        actions["handler"] = handler.ACTIONS[option.key]
    return replace(option, actions=actions)


OPTIONS: tuple[Option, ...] = tuple(map(_complete, _OPTIONS))

BY_KEY: dict[str, Option] = {
    spelling: option for option in OPTIONS for spelling in (option.key, *option.spellings)
}
"""Every spelling of a properties key to its option."""

BY_FLAG: dict[str, Option] = {
    name: option
    for option in OPTIONS
    if option.flag
    for name in (option.flag.name, *option.flag.aliases)
}
"""Every command line flag to its option."""


@cache
def _keys_by_lower_case() -> dict[str, str]:
    return {key.lower(): key for key in BY_KEY}


def key_of(text: str) -> str | None:
    """Return the table's spelling of a key written in any case, if there is one."""
    return _keys_by_lower_case().get(text.lower())


_LONGEST_SUGGESTED = 60
_PREFIX = "option."
_NO = re.compile("(no|not|disable|without|dis)_")


@lru_cache(maxsize=1024)
def suggest_key(text: str) -> str | None:
    """Return the known key nearest to a misspelled one."""
    return _nearest(text, _normal_keys())


SYNONYMS = launchers.SYNONYMS


def option_of_flag(name: str) -> Option | None:
    """Return the option that a flag sets: a synonym, or a key spelled with dashes.

    Underscores are as good as dashes, as on vLLM's command line. A truth value's flag may begin
    with ``--no-``.
    """
    name = name.replace("_", "-")
    if name in SYNONYMS:
        return BY_KEY[SYNONYMS[name]]
    if not name.startswith("--"):
        return None
    key = name[2:].replace("-", "_")
    option = _of_key(key)
    if option is None and (negated := _of_key(key.removeprefix("no_"))) is not None:
        option = negated if isinstance(negated.type, Bool) else None
    return option


def _of_key(name: str) -> Option | None:
    return BY_KEY.get("option." + name) or BY_KEY.get(name)


@lru_cache(maxsize=1024)
def suggest_flag(text: str) -> str | None:
    """Return the known command line flag nearest to a misspelled one."""
    return _nearest(text, _normal_flags())


@cache
def _normal_flags() -> dict[str, str]:
    by_key = ("--" + key.removeprefix(_PREFIX).replace("_", "-") for key in BY_KEY)
    return {_normal(name): name for name in (*by_key, *SYNONYMS, *BY_FLAG)}


def _normal(name: str) -> str:
    return name.lower().replace("-", "_")


@cache
def _normal_keys() -> dict[str, str]:
    return {_normal(key): key for key in BY_KEY}


def _nearest(text: str, known: dict[str, str]) -> str | None:
    normal = _normal(text)
    if normal in known:
        return known[normal]
    if len(normal) > _LONGEST_SUGGESTED:
        return None
    # The prefix that most keys have would make short names alike.
    bare = {name.removeprefix(_PREFIX): name for name in known}
    normal = normal.removeprefix(_PREFIX)
    near = difflib.get_close_matches(normal, bare, n=1, cutoff=0.75)
    return known[bare[near[0]]] if near and not _are_opposites(near[0], normal) else None


def _are_opposites(one: str, other: str) -> bool:
    """Whether one of two names says no to what the other says."""
    nos = [_NO.match(name.lstrip("_")) is not None for name in (one, other)]
    return nos[0] != nos[1]
