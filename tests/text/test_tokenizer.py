"""Reading a model directory's tokenizer, encoding, and what it refuses."""

from __future__ import annotations

import asyncio
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import tokenizers

import lmi_core
from lmi_core.errors import ModelError, UserError
from lmi_core.text import tokenizer as module
from lmi_core.text.tokenizer import Tokenizer
from tests.text.tokenizers_for_tests import byte_level


def write(directory: Path, config: dict[str, Any] | None = None) -> Path:
    byte_level().save(str(directory / "tokenizer.json"))
    if config is not None:
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def test_loads_and_round_trips(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write(tmp_path), vocab_size=512)
    text = "the café 🎉"
    ids = tokenizer.encode_now(text)
    assert ids[0] == tokenizer.token_id("<s>")
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode_now(text, add_special_tokens=False) == ids[1:]


def test_long_texts_are_encoded_off_the_loop_to_the_same_ids(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write(tmp_path))
    text = "the quick brown fox " * 5000

    async def main() -> tuple[list[int], int]:
        num_turns = 0

        async def count() -> None:
            nonlocal num_turns
            while True:
                num_turns += 1
                await asyncio.sleep(0)

        counter = asyncio.create_task(count())
        ids = await tokenizer.encode(text)
        counter.cancel()
        return ids, num_turns

    ids, num_turns = asyncio.run(main())
    assert ids == tokenizer.encode_now(text)
    assert num_turns > 3
    tokenizer.close()


def test_too_many_tokens_are_refused_with_numbers(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write(tmp_path))
    with pytest.raises(UserError, match=r"has \d+ tokens; at most 4 fit"):
        tokenizer.encode_now("one two three four five six", max_tokens=4)


@pytest.mark.parametrize(
    ("config", "first", "last"),
    [
        ({"add_bos_token": False}, "a", "b"),
        ({"add_bos_token": True}, "<s>", "b"),
        ({"add_eos_token": True}, "<s>", "</s>"),
        ({}, "<s>", "b"),
    ],
)
def test_bos_and_eos_settings_win(
    tmp_path: Path, config: dict[str, Any], first: str, last: str
) -> None:
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, **config}
    tokenizer = Tokenizer.load(write(tmp_path, config))
    ids = tokenizer.encode_now("a b")
    assert tokenizer.token_text(ids[0]) == first
    assert tokenizer.token_text(ids[-1]) in (last, " " + last)
    assert tokenizer.encode_now("a b", add_special_tokens=False) == [
        i for i in ids if i not in tokenizer.special_ids
    ]


def test_named_tokens_that_do_not_exist(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = Tokenizer.load(write(tmp_path, {"bos_token": "<none>"}))
    assert tokenizer.bos_token_id is None
    assert "names '<none>' as bos_token, but tokenizer.json has no such token" in caplog.text
    for name in ("bos_token", "eos_token"):
        config = {name: {"content": "<none>"}, f"add_{name}": True}
        with pytest.raises(ModelError, match=f"as {name}, to be added to every prompt"):
            Tokenizer.load(write(tmp_path, config))


@pytest.mark.parametrize(
    ("config", "shown"),
    [
        ({"bos_token": {"text": "<s>"}}, "{'text': '<s>'}"),
        ({"bos_token": ["<s>"]}, "['<s>']"),
        ({"eos_token": 2}, "2"),
        ({"bos_token": None, "add_bos_token": True}, "since add_bos_token is true"),
    ],
)
def test_named_tokens_that_are_no_tokens(
    tmp_path: Path, config: dict[str, Any], shown: str
) -> None:
    with pytest.raises(
        ModelError, match=r"tokenizer_config\.json has .* as [be]os_token"
    ) as caught:
        Tokenizer.load(write(tmp_path, config))
    assert shown in str(caught.value)


def test_null_names_no_token(tmp_path: Path) -> None:
    config = {"bos_token": None, "add_bos_token": False, "eos_token": None}
    tokenizer = Tokenizer.load(write(tmp_path, config))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (None, None)


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path) -> None:
    write(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    content["truncation"] = {
        "max_length": 3,
        "stride": 0,
        "strategy": "LongestFirst",
        "direction": "Right",
    }
    path.write_text(json.dumps(content))
    assert len(Tokenizer.load(tmp_path).encode_now("one two three four five")) > 3


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"\x00")
    with pytest.raises(ModelError, match=r"tokenizer\.model is "):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="is not a tokenizer"):
        Tokenizer.load(tmp_path)
    write(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(ModelError, match="must hold a JSON object"):
        Tokenizer.load(tmp_path)
    for broken in ("{", '{"a":' + "[" * 100_000):
        (tmp_path / "tokenizer_config.json").write_text(broken)
        with pytest.raises(ModelError, match="not valid JSON"):
            Tokenizer.load(tmp_path)


def test_ids_beyond_the_model_are_refused(tmp_path: Path) -> None:
    num_tokens = byte_level().get_vocab_size()
    message = f"token ids up to {num_tokens - 1}, but .* {num_tokens - 1} entries"
    with pytest.raises(ModelError, match=message):
        Tokenizer.load(write(tmp_path), vocab_size=num_tokens - 1)
    Tokenizer.load(tmp_path, vocab_size=num_tokens)


def test_a_lone_surrogate_is_named(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write(tmp_path))
    with pytest.raises(UserError, match="valid Unicode at character 2"):
        tokenizer.encode_now("ab\udc00")


def test_children_have_the_tokenizer_of_who_asks_though_files_were_replaced(tmp_path: Path) -> None:
    """As ``pickle`` takes it to them; they keep what they have read."""

    def ids(tokenizer: Tokenizer) -> list[int]:
        return pickle.loads(pickle.dumps(tokenizer)).encode_now("an apple")

    old = Tokenizer.load(write(tmp_path))
    expected = old.encode_now("an apple")
    assert ids(old) == expected
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.add_tokens(["an apple"])
    backend.save(str(tmp_path / "new"))
    (tmp_path / "new").rename(tmp_path / "tokenizer.json")
    new = Tokenizer.load(tmp_path)
    assert ids(new) == new.encode_now("an apple") != expected
    assert ids(old) == expected


@pytest.mark.parametrize("from_files", [True, False])
def test_a_long_text_in_a_child(from_files: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ids are those of one encode; the bound and what isn't Unicode are refused as ever."""
    monkeypatch.setattr(module, "_THREAD_CHARS", 3000)
    demo = Tokenizer.load(Path(lmi_core.__file__).parent / "demo" / "model")
    tokenizer = demo if from_files else Tokenizer(demo._backend, demo.config)
    text = "Once upon a time, é漢, there was. " * 100

    async def main() -> None:
        assert await tokenizer.encode(text) == tokenizer.encode_now(text)
        plain = await tokenizer.encode(text, add_special_tokens=False)
        assert plain == tokenizer.encode_now(text, add_special_tokens=False)
        with pytest.raises(UserError, match=f"has {len(plain) + 1} tokens"):
            await tokenizer.encode(text, max_tokens=len(plain))
        with pytest.raises(UserError, match="isn't valid Unicode at character 4000"):
            await tokenizer.encode("a" * 4000 + "\ud800")

    asyncio.run(main())
