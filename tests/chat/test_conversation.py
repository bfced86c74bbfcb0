"""Commands of a conversation."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmi_core.chat.conversation import Conversation, run_command
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.errors import UserError


def make(*turns: str) -> Conversation:
    conversation = Conversation(SamplingParams())
    for i, text in enumerate(turns):
        conversation.add("assistant" if i % 2 else "user", text)
    return conversation


def do(conversation: Conversation, *lines: str) -> list[str]:
    said: list[str] = []
    for line in lines:
        assert run_command(line, conversation, said.append)
    return said


def test_the_system_message_comes_first() -> None:
    conversation = make("hi")
    do(conversation, "/system be brief")
    assert conversation.prompt == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
    ]
    do(conversation, "/system")
    assert conversation.prompt == conversation.messages


def test_undo_forgets_a_question_with_its_answer() -> None:
    conversation = make("a", "b", "c", "d")
    do(conversation, "/undo")
    assert conversation.messages == make("a", "b").messages
    do(conversation, "/undo", "/undo")
    assert not conversation.messages


def test_what_is_saved_can_be_loaded(tmp_path: Path) -> None:
    conversation = make("hällo", "wörld")
    do(conversation, "/system s", f"/save {tmp_path}/chat.json", f"/save {tmp_path}/chat.md")
    other = make("x")
    do(other, f"/load {tmp_path}/chat.json")
    assert other.prompt == conversation.prompt
    assert (tmp_path / "chat.md").read_text() == (
        "## system\n\ns\n\n## user\n\nhällo\n\n## assistant\n\nwörld\n"
    )


def test_parameters_are_set_and_checked() -> None:
    conversation = make()
    do(conversation, "/set temperature 0.7", "/set top_k=3", "/set seed none")
    assert conversation.params == SamplingParams(temperature=0.7, top_k=3)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/sytem x", "there is no command /sytem; did you mean /system?"),
        ("/set temprature 1", "there is no temprature to set; allowed: max_new_tokens"),
        ("/set temperature warm", "temperature must be a number, got 'warm'"),
        ("/set top_p 3", "top_p must be above 0 and at most 1, got 3"),
        ("/load /no/such.json", "/no/such.json can't be read: No such file or directory"),
        ("/save /no/such/dir/x.json", "can't be written: No such file or directory"),
    ],
)
def test_faults(line: str, message: str) -> None:
    conversation = make("a")
    with pytest.raises(UserError) as raised:
        do(conversation, line)
    assert message in str(raised.value)
    assert conversation == make("a")


def test_quit_ends_it() -> None:
    assert not run_command("/quit", make(), print)


@pytest.mark.parametrize("command", ["/save", "/load"])
def test_a_home_that_there_is_not_is_said(command: str) -> None:
    with pytest.raises(UserError, match="~nobody-here/x: there is no such user's home"):
        do(make("a"), f"{command} ~nobody-here/x")
