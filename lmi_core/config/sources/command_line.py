"""Arguments of ``lmi serve`` and ``lmi explain``: our own, the model server's and TGI's."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmi_core.config.paths import exists
from lmi_core.config.problem import Problems
from lmi_core.config.sources.origin import Precedence, Setting
from lmi_core.config.table import BY_FLAG, BY_KEY, option_of_flag, suggest_flag
from lmi_core.config.table.option import Flag, Option
from lmi_core.config.table.value_type import FALSE_WORDS, TRUE_WORDS, Bool, json_or_text

_OWN_SWITCHES = {
    "--strict": "strict",
    "--prefer-native": "prefer_native",
    "--json": "json",
    "--all": "all",
}
_OWN_VALUES = {
    "--option": "option",
    "-o": "option",
    "--config-file": "config_file",
    "-f": "config_file",
    "--models": "models",
    "-m": "models",
    "--model-store": "model_store",
    "-s": "model_store",
}
_FLASH_ATTENTION = "option.flash_attn"
_ORIGINS = "--cors-allow-origin"
_WHAT_TO_SERVE = {"option.model_id", "load_models", "model_store"}
_NAME = re.compile(r"[^-/][^/]*")
_MODULES = "--lora-modules"
_MODULE = re.compile(r"(\{|[^-=][^=]*=).*", re.DOTALL)
_NAMES, _KEYS = _WITH_FURTHER = ("--served-model-name", "--api-key")
"""Flags of which vLLM takes several values behind one another."""


@dataclass(slots=True)
class Invocation:
    """What a command line says; ``models`` are the positional paths, URLs or hub ids.

    ``tgi`` says that it is a TGI launcher's: the model is named by ``--model-id``.
    """

    models: list[str] = field(default_factory=list)
    settings: list[Setting] = field(default_factory=list)
    config_file: str | None = None
    strict: bool = False
    prefer_native: bool = False
    json: bool = False
    all: bool = False
    help: bool = False
    tgi: bool = False


def parse_command_line(argv: Sequence[str], problems: Problems) -> Invocation:
    """Read arguments; unknown flags and malformed ones are errors with a suggestion."""
    return _Parser(list(argv), problems).parse()


def _is_value(argument: str) -> bool:
    if argument.startswith("-"):
        return argument[1:2].isdigit()
    return not exists(Path(argument))


def split_arguments(
    argv: Sequence[str], own: Mapping[str, bool]
) -> tuple[list[str], list[str], list[str]]:
    """Part a command's arguments into its ``own`` flags, words, and flags of the option table.

    ``own``: whether each flag takes a value. Values stay with their flags.
    """
    flags: list[str] = []
    words: list[str] = []
    others: list[str] = []
    rest = list(argv)
    while rest:
        argument = rest.pop(0)
        name, separator, _ = argument.partition("=")
        if argument == "--":
            words, rest = words + rest, []
        elif name in own:
            flags.append(argument)
            if own[name] and not separator and rest:
                flags.append(rest.pop(0))
        elif len(argument) > 1 and argument.startswith("-"):
            parser = _Parser(list(rest), Problems())
            parser._flag(argument)
            num_values = len(rest) - len(parser.rest)
            others += [argument, *rest[:num_values]]
            rest = parser.rest
        else:
            words.append(argument)
    return flags, words, others


class _Parser:
    def __init__(self, argv: list[str], problems: Problems) -> None:
        self.rest = argv
        self.problems = problems
        self.result = Invocation()
        self.further: list[tuple[str, str]] = []
        self.documents: dict[str, tuple[str, dict[str, Any]]] = {}

    def parse(self) -> Invocation:
        while self.rest:
            argument = self.rest.pop(0)
            if argument == "--":
                self.result.models += self.rest
                break
            if len(argument) > 1 and argument.startswith("-"):
                self._flag(argument)
                while argument in _WITH_FURTHER and self._is_name_next():
                    self.further.append((argument, self.rest.pop(0)))
            else:
                self.result.models.append(argument)
        self._further_values()
        self._documents()
        return self.result

    def _flag(self, argument: str) -> None:
        name, separator, inline = argument.partition("=")
        value = inline if separator else None
        if name.startswith("-O") and name[2:].isdecimal():  # vLLM's level of optimisation, glued on
            name, value = "-O", name[2:]
        if name in ("-h", "--help"):
            self.result.help = True
        elif name in _OWN_SWITCHES and value is None:
            setattr(self.result, _OWN_SWITCHES[name], True)
        elif name in _OWN_VALUES:
            self._own_value(name, value)
        elif name == "--model":  # it needs no flag
            self.result.models += [value] if value is not None else self._take(name)
        elif name in BY_FLAG:
            self._tgi_flag(name, value)
        elif (option := option_of_flag(name)) is not None:
            self._option_flag(option, name, value)
        elif (option := _option_of_part(name)) is not None:
            self._part_flag(option, name, value)
        else:
            self._unknown(name, has_value=value is not None)

    def _own_value(self, name: str, value: str | None) -> None:
        kind = _OWN_VALUES[name]
        values = [value] if value is not None else self._take(name)
        if kind == "models":
            while value is None and values and self.rest and not self.rest[0].startswith("-"):
                values.append(self.rest.pop(0))
            if values:
                self._add("load_models", ",".join(values), Precedence.SERVER_FLAG, name)
        elif kind == "model_store" and values:
            self._add("model_store", values[0], Precedence.SERVER_FLAG, name)
        elif kind == "config_file" and values:
            self.result.config_file = values[0]
        elif kind == "option" and values:
            self._option(name, values[0])

    def _option(self, name: str, pair: str) -> None:
        key, separator, text = pair.partition("=")
        key = key.strip()
        if not separator or not key:
            self.problems.error(name, f"{pair[:80]!r} is not key=value")
            return
        if key not in BY_KEY and "option." + key in BY_KEY:
            key = "option." + key
        self._add(key, text, Precedence.OVERRIDE, f"{name} {key}")

    def _option_flag(self, option: Option, name: str, value: str | None) -> None:
        """Any other option, under its own name; a truth value may stand alone or be ``--no-``."""
        if isinstance(option.type, Bool) and name.startswith("--no-"):
            if value is not None:
                self.problems.error(name, f"{name} takes no value")
            value = "false"
        elif value is None and isinstance(option.type, Bool) and not self._is_word_next():
            value = "true"
        elif value is None and option.key == _FLASH_ATTENTION and not self._is_word_next():
            value = "on"  # older versions of llama-server know -fa alone
        values = [value] if value is not None else self._take(name)
        if name == _MODULES:
            while self.rest and _MODULE.fullmatch(self.rest[0]):
                values.append(self.rest.pop(0))
            values = [named for each in values if (named := self._named(each))]
        if values:
            self._add(option.key, ",".join(values), Precedence.FLAG, name)

    def _named(self, module: str) -> str | None:
        """``name=path`` of an adapter, which may be written as JSON, as vLLM has it."""
        if not module.startswith("{"):
            return module
        try:
            values = json.loads(module)
            return f"{values['name']}={values['path']}"
        except (ValueError, KeyError, RecursionError):
            message = f"{module[:80]!r} is no JSON object with name and path"
            self.problems.error(_MODULES, message, "option.lora_adapters")
            return None

    def _is_name_next(self) -> bool:
        return bool(self.rest and _NAME.fullmatch(self.rest[0]) and _is_value(self.rest[0]))

    def _further_values(self) -> None:
        """A model has one name here, so that further ones are refused, lest models be made of them;
        but where nothing else says what to serve, they do."""
        keys = {setting.key for setting in self.result.settings}
        if not self.result.models and not keys & _WHAT_TO_SERVE:
            self.result.models = [value for _, value in self.further]
            return
        for name in (value for flag, value in self.further if flag == _NAMES):
            self.problems.error(_NAMES, f"a model has one name here; leave out {name[:80]!r}")
        api_keys = [value for flag, value in self.further if flag == _KEYS]
        if any("," in key for key in api_keys):
            self.problems.error(_KEYS, "a further key has a comma, which ends a key of api_keys")
        elif api_keys:
            self._add("api_keys", ",".join(api_keys), Precedence.FLAG, _KEYS)

    def _part_flag(self, option: Option, name: str, value: str | None) -> None:
        """A part of an option's JSON, as vLLM's command line has it: ``--hf-overrides.a.b 1`` is
        ``--hf-overrides '{"a": {"b": 1}}'``, and ``--x.a+ 1,2`` puts items of a list behind others.

        Source: ``parse_args`` of vLLM's argparse_utils.py.
        """
        values = [value] if value is not None else self._take(name)
        if not values:
            return
        part = values[0].split(",") if name.endswith("+") else json_or_text(values[0])
        flag, *keys = name.removesuffix("+").split(".")
        document = self.documents.setdefault(option.key, (flag, {}))[1]
        if _put(document, keys, part):
            self.problems.warn(name[:80], "is given again; the last one counts", option.key)

    def _documents(self) -> None:
        for key, (flag, document) in self.documents.items():
            try:
                self._add(key, json.dumps(document), Precedence.FLAG, flag)
            except RecursionError:
                self.problems.error(flag, "is nested too deeply", key)

    def _is_word_next(self) -> bool:
        return bool(self.rest) and self.rest[0].lower() in TRUE_WORDS | FALSE_WORDS | {"auto"}

    def _tgi_flag(self, name: str, value: str | None) -> None:
        option = BY_FLAG[name]
        flag = option.flag
        assert flag is not None
        self.result.tgi |= option.key == "option.model_id"
        if flag.switch:
            if value is None and self._is_word_next():  # the word would count as a model
                value = self.rest.pop(0)
            if value is not None:
                self.problems.error(name, f"{name} takes no value")
            self._add(option.key, "true", Precedence.FLAG, name)
            return
        values = [value] if value is not None else self._take(name)
        if values and self._is_choice(option, flag, name, values[0]):
            if name == _ORIGINS:  # one is given for each
                settings = self.result.settings
                values = [*(s.text for s in settings if s.where == name), *values]
                self.result.settings = [s for s in settings if s.where != name]
            self._add(option.key, ",".join(values), Precedence.FLAG, name)

    def _is_choice(self, option: Option, flag: Flag, name: str, value: str) -> bool:
        if not flag.choices or value in flag.choices:
            return True
        allowed = ", ".join(flag.choices)
        self.problems.error(name, f"{value[:80]!r} is not one of {allowed}", option.key)
        return False

    def _take(self, name: str) -> list[str]:
        if not self.rest or self.rest[0].startswith("--"):
            self.problems.error(name, f"{name} needs a value")
            return []
        return [self.rest.pop(0)]

    def _add(self, key: str, text: str, precedence: Precedence, where: str) -> None:
        self.result.settings.append(Setting(key, text, precedence, where))

    def _unknown(self, name: str, *, has_value: bool) -> None:
        """Note the flag; what follows it is taken as its value, unless that is there to be served,
        lest a model be made of it."""
        if not has_value and self.rest and _is_value(self.rest[0]):
            self.rest.pop(0)
        near = suggest_flag(name)
        hint = f"did you mean {near}?" if near else "see lmi explain --help"
        self.problems.error(name[:80], f"unknown flag; {hint}")


def _option_of_part(name: str) -> Option | None:
    """The option of whose JSON a flag with dots names a part."""
    flag, *keys = name.removesuffix("+").split(".")
    option = BY_FLAG.get(flag) or option_of_flag(flag)
    takes_json = option is not None and "JSON" in option.type.describe()
    return option if takes_json and keys and all(keys) else None


def _put(document: dict[str, Any], keys: Sequence[str], value: Any) -> bool:
    """Add what ``keys`` lead to, lists and objects to those that are there; whether something else
    was there."""
    *outer, last = keys
    is_replaced = False
    for key in outer:
        inner = document.setdefault(key, {})
        if not isinstance(inner, dict):
            inner = document[key] = {}
            is_replaced = True
        document = inner
    there = document.get(last)
    if isinstance(there, list) and isinstance(value, list):
        there += value
    elif isinstance(there, dict) and isinstance(value, dict):
        there.update(value)
    else:
        is_replaced |= last in document
        document[last] = value
    return is_replaced
