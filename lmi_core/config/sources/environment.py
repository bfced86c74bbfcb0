"""Reader of environment variables: ``OPTION_*``, ``SERVING_*``, documented aliases, launchers'.

Source: DJL-Serving's ModelInfo.java and ConfigManager.java; TGI's launcher/src/main.rs.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterator, Mapping

from lmi_core.config.problem import Problems
from lmi_core.config.sources.origin import Precedence, Setting
from lmi_core.config.table import (
    BY_FLAG,
    BY_KEY,
    OPTIONS,
    key_of,
    option_of_flag,
    suggest_flag,
)
from lmi_core.config.table.option import Option
from lmi_core.config.table.value_type import Bool

AMBIGUOUS = frozenset(
    {
        *(
            "PORT",
            "HOSTNAME",
            "REVISION",
            "DTYPE",
            "API_KEY",
            "MASTER_ADDR",
            "MASTER_PORT",
            "NGROK",
        ),
        *("ATTENTION", "PREFIX_CACHING", "PREFILL_CHUNKING", "USE_FLASH_ATTENTION"),
        *("LOG_LEVEL", "COMPUTE_TYPE", "HF_HUB_ENABLE_HF_TRANSFER", "MESSAGES_API_ENABLED"),
        *("EXLLAMA_VERSION", "DISABLE_EXLLAMA", "USE_CUTLASS_W8A8"),
    }
)
"""TGI variables with names so common that they count only next to ``MODEL_ID`` or a TGI flag."""


def _inverted(text: str) -> str:
    """``ENABLE_CUDA_GRAPHS``: exactly true means not eager, anything else eager."""
    return "false" if text == "true" else "true"


def _mebibytes(text: str) -> str:
    return str(int(text) << 20) if re.fullmatch("[0-9]{1,12}", text) else text


def _gibibytes(text: str) -> str:
    return str(int(text) << 30) if re.fullmatch("[0-9]{1,6}", text) else text


_LEVELS = {"trace": "debug", "warn": "warning", "off": "error"}
"""What TGI calls them otherwise."""


def _level(text: str) -> str:
    """Of ``info,text_generation_router=debug`` the level of what isn't named."""
    level = next((part for part in text.lower().split(",") if "=" not in part), "info").strip()
    return _LEVELS.get(level, level)


_FLAG_PREFIXES = ("SM_VLLM_", "SM_LLAMA_CPP_")
"""SageMaker's containers of these servers make a flag of what follows."""

_TRANSLATIONS: dict[str, Callable[[str], str]] = {
    "ENABLE_CUDA_GRAPHS": _inverted,
    "SAGEMAKER_MAX_PAYLOAD_IN_MB": _mebibytes,
    "VLLM_CPU_KVCACHE_SPACE": _gibibytes,
    "LOG_LEVEL": _level,
}


def is_tgi(environ: Mapping[str, str]) -> bool:
    """Tell whether the variables are those of a TGI launcher."""
    return bool(environ.get("MODEL_ID"))


def read_environment(
    environ: Mapping[str, str], problems: Problems, *, tgi: bool = False
) -> list[Setting]:
    """Return the settings of every variable that is one; ``tgi`` lets the ambiguous names count.

    Values that are empty don't count, as in the reference.
    """
    settings: list[Setting] = []
    settings += _regular(environ)
    settings += _aliases(environ)
    settings += _tgi(environ, problems, tgi or is_tgi(environ))
    settings += _flags(environ, problems)
    return settings


def secret_variables(environ: Mapping[str, str], *, tgi: bool = False) -> tuple[str, ...]:
    """Return the names of those variables that give the server a secret of its own, in order."""
    found = read_environment(environ, Problems(), tgi=tgi)
    return tuple(sorted({s.where for s in found if (o := BY_KEY.get(s.key)) and o.secret}))


def _regular(environ: Mapping[str, str]) -> Iterator[Setting]:
    for variable in sorted(environ):
        text = environ[variable]
        prefix, _, rest = variable.partition("_")
        if prefix not in ("OPTION", "SERVING", "ARGS") or not rest or not text:
            continue
        if variable in _ALIAS_VARIABLES and prefix == "SERVING":
            continue
        yield Setting(_key(prefix, rest), text, Precedence.VARIABLE, variable)


def _key(prefix: str, rest: str) -> str:
    if prefix != "OPTION":
        return key_of(rest) or rest.lower()
    if rest == "ENGINE":
        return "engine"
    key = "option." + rest
    return key_of(key) or (
        key if rest.lower() != rest.upper() and not rest.isupper() else key.lower()
    )


def _aliases(environ: Mapping[str, str]) -> Iterator[Setting]:
    """Yield the documented aliases; of several for one key only the first, the stronger one."""
    for option in _WITH_ALIASES:
        for variable in option.env:
            text = environ.get(variable)
            if not text or variable.startswith("OPTION_"):
                continue
            text = _TRANSLATIONS.get(variable, str)(text)
            yield Setting(option.key, text, Precedence.ALIAS_VARIABLE, variable)
            break


def _tgi(environ: Mapping[str, str], problems: Problems, tgi: bool) -> Iterator[Setting]:
    for variable, option in _TGI_VARIABLES.items():
        text = environ.get(variable)
        if not text or (variable in AMBIGUOUS and not tgi):
            continue
        if variable == "HOSTNAME" and not _is_address(text):
            continue  # A shell sets it to the host's name, which TGI doesn't use either.
        text = _TRANSLATIONS.get(variable, str)(text)
        setting = Setting(option.key, text, Precedence.TGI_VARIABLE, variable)
        if option.flag and option.flag.switch and text not in ("true", "false"):
            problems.value_error(setting, "must be exactly true or false in a TGI variable", text)
        else:
            yield setting


def _flags(environ: Mapping[str, str], problems: Problems) -> Iterator[Setting]:
    """Yield what SageMaker's containers of other servers would write on a command line.

    A variable without a value stands for a flag that has none.
    """
    for variable in sorted(environ):
        prefix = next((each for each in _FLAG_PREFIXES if variable.startswith(each)), None)
        if prefix is None:
            continue
        flag = "--" + variable.removeprefix(prefix).lower().replace("_", "-")
        option = BY_FLAG.get(flag) or option_of_flag(flag)
        text = environ[variable]
        if option is None:
            near = suggest_flag(flag)
            hint = f"did you mean {prefix}{_as_variable(near)}?" if near else "it has no effect"
            problems.warn(variable, f"unknown flag {flag}; {hint}", variable)
        elif text or isinstance(option.type, Bool):
            yield Setting(option.key, text or "true", Precedence.TGI_VARIABLE, variable)


def _as_variable(flag: str) -> str:
    return flag.lstrip("-").upper().replace("-", "_")


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _tgi_variables() -> dict[str, Option]:
    """Return the variables that only the launcher's flags have, old names included."""
    found: dict[str, Option] = {}
    for option in OPTIONS:
        if option.flag is None or option.flag.env is None:
            continue
        names = (option.flag.env, option.flag.legacy_env)
        found.update({name: option for name in names if name and name not in option.env})
    return found


_TGI_VARIABLES = _tgi_variables()
_WITH_ALIASES = tuple(option for option in OPTIONS if option.env)
_ALIAS_VARIABLES = frozenset(variable for option in OPTIONS for variable in option.env)


def variables_of(option: Option) -> tuple[str, ...]:
    """Return every variable that sets ``option``, the strongest first."""
    regular = () if "." in option.name else (option.variable,)
    names = [*regular, *option.env]
    if option.flag and option.flag.env:
        names.append(option.flag.env)
    return tuple(dict.fromkeys(names))
