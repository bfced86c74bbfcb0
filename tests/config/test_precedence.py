"""Every option, put into random combinations of its sources: the strongest wins."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmi_core.config.problem import Problems
from lmi_core.config.sources.command_line import parse_command_line
from lmi_core.config.sources.environment import AMBIGUOUS, read_environment
from lmi_core.config.sources.merge import merge
from lmi_core.config.sources.origin import Precedence
from lmi_core.config.sources.properties import parse_properties
from lmi_core.config.table import BY_FLAG, OPTIONS, SYNONYMS
from lmi_core.config.table.value_type import (
    Bool,
    Bytes,
    Choice,
    Float,
    Int,
    Items,
    Json,
    Rate,
    ScaledInt,
    StopList,
    Text,
)

TRANSLATED = {"ENABLE_CUDA_GRAPHS", "SAGEMAKER_MAX_PAYLOAD_IN_MB"}
OWN_FLAGS = {key: name for name, key in SYNONYMS.items() if not name.startswith("--no-")}


def values_of(option):
    """Return texts of at least two different values of an option where there are two."""
    kind = option.type
    if option.flag and option.flag.choices:
        return list(option.flag.choices)
    if isinstance(kind, Bool):
        return ["true", "false"]
    if isinstance(kind, Choice):
        return list(kind.choices)
    if isinstance(kind, Int):
        first = max(kind.minimum or 0, 0)
        return [str(n) for n in range(first, min(first + 9, kind.maximum + 1))]
    if isinstance(kind, Float):
        low = kind.minimum if kind.minimum > float("-inf") else 0.0
        high = kind.maximum if kind.maximum < float("inf") else low + 9
        return [str(low + (high - low) * n / 10) for n in range(1, 10)]
    made = {
        Bytes: [f"{n}K" for n in range(1, 9)],
        ScaledInt: [f"{n}k" for n in range(1, 9)],
        Json: [f'{{"a": {n}}}' for n in range(9)],
        StopList: [f'["{n}"]' for n in range(9)],
        Rate: [f"{n}/PT{n}M" for n in range(1, 9)],
        Text: [f"text{n}" for n in range(9)],
    }
    if isinstance(kind, Items):
        made[Items] = made[Text] if isinstance(kind.item, Text) else [str(n) for n in range(1, 9)]
        return list(kind.item.choices) if isinstance(kind.item, Choice) else made[Items]
    return made[type(kind)]


def flag_of(option):
    """Return the flag that takes a value of an option, the launcher's, our own or the key's."""
    if option.flag:
        return None if option.flag.switch else option.flag.name
    if option.key in OWN_FLAGS:
        return OWN_FLAGS[option.key]
    flag = "--" + option.name.replace("_", "-")
    is_model_key = option.scope == "model" and option.key.startswith("option.")
    return flag if is_model_key and flag not in BY_FLAG else None


def sources_of(option):
    """Return the places that can set an option, strongest first, each with its own writing."""
    sources = [("option", option.key)]
    flag = flag_of(option)
    if flag is not None:
        sources.append(("flag", flag))
    if option.scope == "model":
        sources.append(("file", option.key))
    if "." not in option.name:
        sources.append(("variable", option.variable))
    sources += [
        ("variable", name)
        for name in option.env
        if not name.startswith("OPTION_") and name not in TRANSLATED
    ]
    if option.flag and option.flag.env and option.flag.env not in (*option.env, *AMBIGUOUS):
        sources.append(("variable", option.flag.env))
    return [*sources, ("server file", option.key)]


@st.composite
def placements(draw):
    option = draw(st.sampled_from(OPTIONS))
    sources = sources_of(option)
    texts = st.sampled_from(values_of(option))
    chosen = draw(st.sets(st.integers(0, len(sources) - 1), min_size=1))
    return option, [(*sources[place], draw(texts)) for place in sorted(chosen)]


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(placements())
def test_the_strongest_source_wins(placement):
    option, written = placement
    problems = Problems()
    argv, environ, given_settings = [], {}, []
    for source, name, text in written:
        if source == "option":
            argv += ["--option", f"{name}={text}"]
        elif source == "flag":
            argv += [f"{name}={text}"]
        elif source == "variable":
            environ[name] = text
        else:
            precedence = Precedence.FILE if source == "file" else Precedence.SERVER_FILE
            escaped = text.replace("\\", "\\\\")
            given_settings += parse_properties(
                f"{name}={escaped}".encode(), source, precedence, problems
            )
    given_settings += read_environment(environ, problems)
    given_settings += parse_command_line(argv, problems).settings
    values = merge(given_settings, problems)
    assert not problems.errors
    source, name, text = written[0]
    assert values.get(option.key) == option.type.parse(text)
    where = {"option": f"--option {name}", "file": "file:1", "server file": "server file:1"}
    assert values.where(option.key) == where.get(source, name)
