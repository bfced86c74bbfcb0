"""The reference page of every option and the help of the command line, from the option table.

``python -m lmi_core.config.reference`` prints the page; REFERENCE.md beside this file is its copy.
"""

from __future__ import annotations

import sys
from pathlib import Path

from lmi_core.config.sources.environment import variables_of
from lmi_core.config.table import BY_KEY, OPTIONS, SYNONYMS, shared, transformers
from lmi_core.config.table.capabilities import BACKENDS, CAPABILITIES
from lmi_core.config.table.effect import effect_of, show
from lmi_core.config.table.option import SYSTEMS, Action, Option, Outcome
from lmi_core.config.table.value_type import Bool

_LIBRARIES = ("vllm", "trtllm", "neuron")
PAGE = Path(__file__).with_name("REFERENCE.md")

_INTRODUCTION = """\
# Configuration reference

This page is generated from the option table (`python -m lmi_core.config.reference`).

A key is written in a model's `serving.properties`, as a variable, as a launcher flag, or as
`--option key=value`. The strongest source wins: `--option`, then flags, the endpoint in
`load_models`, `serving.properties`, `OPTION_*` and `SERVING_*`, the aliases, the variables of the
text-generation-inference launcher, `config.properties`, the default. `SERVING_*` variables win over
`--models` and `--model-store`, as in the reference server. `HF_MODEL_ID` adds a model as if a
`serving.properties` of its own named it, with `HF_REVISION` and `HF_TASK`: these three count as
that file. `lmi explain` says for a given configuration what becomes of every key.

"lmi" says what the lmi engine of this version does: **honoured**, **mapped** to a setting of
its own, **no effect**, or **refused**.
"""


def reference_page() -> str:
    """Return the page in Markdown: a table of keys for every system."""
    parts = [_INTRODUCTION]
    for system, title in SYSTEMS.items():
        options = [option for option in OPTIONS if system in option.systems]
        parts.append(f"## {title}\n")
        parts.append("| Key | Value | Default | Also written | lmi | Meaning |")
        parts.append("|---|---|---|---|---|---|")
        parts += [_line(option, system) for option in options]
        parts.append("")
    parts.append("## Custom handlers\n")
    parts.append("With a `model.py` that answers requests; every other key is given to it.\n")
    parts += [
        f"- `{option.key}` ({_general(option.actions['handler'])}): {option.doc}"
        for option in OPTIONS
        if "handler" in option.actions
    ]
    parts.append("")
    parts.append("## Transformers models\n")
    parts.append(
        "Where our engine runs a Transformers model; keys of queues, batches and answers are as "
        "with families of ours.\n"
    )
    parts += [
        f"- `{key}` ({_general(action)}): {BY_KEY[key].doc}"
        for key, action in transformers.ACTIONS.items()
    ]
    parts.append("")
    parts += _library_lines()
    parts.append("## Backends\n")
    for backend in BACKENDS.values():
        has = ", ".join(CAPABILITIES[name] for name in sorted(backend.capabilities))
        parts.append(f"- **{backend.title}**{f': {has}' if has else ''}")
    return "\n".join(parts) + "\n"


def _library_lines() -> list[str]:
    """The keys that become arguments of another library's engine, or don't, and why."""
    titles = [BACKENDS[name].title for name in _LIBRARIES]
    lines = [
        "## Other libraries' engines\n",
        "What a key becomes there; nothing: there is no such setting. Keys of queues and answers "
        "are as with our engine.\n",
        f"| Key | {' | '.join(titles)} |",
        "|---" * (len(titles) + 1) + "|",
    ]
    for option in OPTIONS:
        actions = [option.actions.get(name) for name in _LIBRARIES]
        if option.key in shared.FRONT or not any(actions):
            continue
        cells = (
            "" if action is None else _general(action, name)
            for name, action in zip(_LIBRARIES, actions, strict=True)
        )
        lines.append(f"| `{option.key}` | {' | '.join(cells)} |")
    return [*lines, ""]


def _line(option: Option, system: str) -> str:
    default = option.default_for(system)
    kind = ", ".join(option.choices.get(system, ())) or option.type.describe()
    doc = option.doc
    if option.deprecated:
        hint = f"; write `{option.replaced_by}`" if option.replaced_by else ""
        doc += f" Deprecated {option.deprecated}{hint}."
    cells = (
        f"`{option.key}`",
        kind,
        "" if default is None else f"`{show(default)}`",
        ", ".join(f"`{name}`" for name in _other_names(option)),
        _native(option, default),
        doc,
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _other_names(option: Option) -> list[str]:
    names = [*option.spellings, *variables_of(option)]
    if option.flag:
        names += [option.flag.name, *option.flag.aliases]
    return names


def _native(option: Option, default: object) -> str:
    """Say what the lmi engine does with a value that asks for something."""
    backend = "server" if option.scope == "server" else "lmi"
    action = option.actions[backend]
    text = _general(action)
    for value, special in (action.by_value or {}).items():
        if _outcome(special) != _outcome(action):
            text += f"; `{show(value)}`: {_general(special)}"
    if default is not None and action.idle:
        effect = effect_of(option, default, backend)
        if effect.outcome is Outcome.NO_EFFECT and _outcome(action) is Outcome.REFUSED:
            text += f"; `{show(default)}`: no effect"
    return text


def _outcome(action: Action, backend: str = "lmi") -> Outcome:
    missing = action.capability is not None and not any(
        action.capability in BACKENDS[name].capabilities for name in (backend, "server")
    )
    if not missing:
        return action.outcome
    return Outcome.NO_EFFECT if action.tuning else Outcome.REFUSED


def _general(action: Action, backend: str = "lmi") -> str:
    outcome = _outcome(action, backend)
    if outcome is not action.outcome and action.capability is not None:
        return f"{outcome}: {CAPABILITIES[action.capability]} not available"
    if outcome is Outcome.MAPPED and action.setting is not None:
        return f"mapped to `{action.setting}`"
    return f"{outcome}: {action.text}" if action.text else str(outcome)


_USAGE = {
    "serve": "Serves a model over HTTP; without one named, the embedded demonstration model.\n",
    "explain": """\
Says for every key that was given where it comes from and what the chosen backend does with it.
Exit code: 0 usable, 1 usable with warnings and --strict, 2 refused.

  --all
      also show defaults that nothing was written for
  --json
      print JSON instead of a table
""",
}


def command_help(command: str) -> str:
    """Return the help of ``lmi serve`` or ``lmi explain``: its arguments and every flag."""
    return f"""\
usage: lmi {command} [PATH | HUB_ID ...] [flags] [--option KEY=VALUE ...]

{_USAGE[command]}
  -o KEY=VALUE, --option KEY=VALUE
      set a key, above every other source
  -f FILE, --config-file FILE
      config.properties of the server
  -m NAME=URL ..., --models NAME=URL ...
      models to serve, as load_models lists them
  -s DIR, --model-store DIR
      directory of models to serve
  --prefer-native
      serve with the lmi engine where another backend is asked for
  --strict
      unknown keys are errors

Flags, with the key that each sets; every other key is a flag of its name with dashes:

{flags_help()}"""


def flags_help() -> str:
    """Return the help of our own flags and the launcher's, two lines each."""
    lines = []
    names_of: dict[str, list[str]] = {}
    for name, key in SYNONYMS.items():
        names_of.setdefault(f"no {key}" if name.startswith("--no-") else key, []).append(name)
    for written, flags in names_of.items():
        key = written.removeprefix("no ")
        option = BY_KEY[key]
        is_switch = isinstance(option.type, Bool)
        value = "" if is_switch else " " + option.name.rpartition(".")[2].upper()
        doc = option.doc if written == key else f"not: {option.doc}"
        shown = ", ".join(sorted(flags, key=len))
        lines += [f"  {shown}{value}", f"      {doc} [{key}]"]
    for option in OPTIONS:
        if option.flag is None:
            continue
        names = ", ".join((*option.flag.aliases, option.flag.name))
        value = "" if option.flag.switch else " " + option.name.upper()
        lines += [f"  {names}{value}", f"      {option.doc} [{option.key}]"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(reference_page())
