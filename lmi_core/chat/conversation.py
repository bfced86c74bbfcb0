"""The state of a conversation, and what its commands do with it."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.errors import UserError

_SETTABLE = {
    field.name: field
    for field in fields(SamplingParams)
    if field.name
    in ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
}


@dataclass(slots=True)
class Conversation:
    """Messages so far, the system's apart, and how the next answer is sampled."""

    params: SamplingParams
    system: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)

    @property
    def prompt(self) -> list[dict[str, str]]:
        """All messages, the system's first."""
        head = [{"role": "system", "content": self.system}] if self.system else []
        return [*head, *self.messages]

    def add(self, role: str, text: str) -> None:
        self.messages.append({"role": role, "content": text})

    def undo(self) -> None:
        """Forget the last message of the user and what came after it."""
        while self.messages and self.messages.pop()["role"] != "user":
            pass

    def save(self, path: Path) -> None:
        """As JSON that ``load`` reads where the name ends in .json, else as text."""
        if path.suffix == ".json":
            text = json.dumps({"messages": self.prompt}, ensure_ascii=False, indent=1) + "\n"
        else:
            text = "\n".join(f"## {m['role']}\n\n{m['content']}\n" for m in self.prompt)
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UserError(f"{path} can't be written: {error.strerror}") from None

    def load(self, path: Path) -> None:
        try:
            messages = json.loads(path.read_text(encoding="utf-8"))["messages"]
            loaded = [{"role": str(m["role"]), "content": str(m["content"])} for m in messages]
        except OSError as error:
            raise UserError(f"{path} can't be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path} is no conversation that /save FILE.json wrote") from None
        self.system = "".join(m["content"] for m in loaded if m["role"] == "system")
        self.messages = [m for m in loaded if m["role"] != "system"]

    def set(self, name: str, text: str) -> None:
        """Change a sampling parameter; UserError for one that isn't there or a wrong value."""
        if name not in _SETTABLE:
            raise UserError(f"there is no {name or 'such'} to set; allowed: {', '.join(_SETTABLE)}")
        try:
            value: object = None if text == "none" else json.loads(text)
            params = replace(self.params, **{name: value})  # type: ignore[arg-type]
        except ValueError:
            raise UserError(f"{name} must be a number, got {text[:80]!r}") from None
        check(params)
        self.params = params


def check(params: SamplingParams) -> None:
    """UserError for what no model takes."""
    params.validate(vocab_size=1 << 31, max_logprobs=0)


def _path(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise UserError(f"{text}: there is no such user's home") from None


def run_command(line: str, conversation: Conversation, say: Callable[[str], None]) -> bool:
    """Do what a line that begins with a slash asks for; False ends the conversation.

    Raises UserError for a command that there isn't, with the nearest one.
    """
    name, _, argument = line[1:].strip().partition(" ")
    argument = argument.strip()
    match name:
        case "quit" | "exit" | "bye":
            return False
        case "help" | "?":
            say(HELP)
        case "system":
            conversation.system = argument
            say("the system message is set" if argument else "there is no system message")
        case "reset" | "clear":
            conversation.messages.clear()
            say("forgotten, but for the system message")
        case "undo":
            conversation.undo()
            say(f"{len(conversation.messages)} messages are left")
        case "save":
            path = _path(argument or "chat.json")
            conversation.save(path)
            say(f"saved to {path}")
        case "load":
            if not argument:
                raise UserError("name the file: /load FILE")
            conversation.load(_path(argument))
            say(f"{len(conversation.messages)} messages")
        case "set":
            key, _, value = argument.replace("=", " ", 1).partition(" ")
            conversation.set(key, value.strip())
            say(f"{key} is {value.strip()}")
        case _:
            near = difflib.get_close_matches(name, COMMANDS, n=1)
            hint = f"did you mean /{near[0]}?" if near else "see /help"
            raise UserError(f"there is no command /{name[:40]}; {hint}")
    return True


COMMANDS = ("help", "system", "reset", "undo", "save", "load", "set", "quit")
HELP = """\
/system TEXT        set the system message; without a text, none
/set NAME VALUE     a sampling parameter, such as /set temperature 0.7
/undo               forget the last question and its answer
/reset              forget all messages
/save [FILE]        to FILE (chat.json): JSON, or text where the name doesn't end in .json
/load FILE          go on with a conversation that was saved as JSON
/quit               leave, as Ctrl-D does; Ctrl-C ends an answer
\"\"\" begins and ends a message of several lines, or one that begins with a slash."""
