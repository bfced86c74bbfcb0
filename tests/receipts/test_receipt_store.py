"""The files of receipts stay within their bounds, whoever has many and whatever the disk does."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import pytest

from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.receipts import store
from lmi_core.receipts.receipt import Choice, Receipt, encode, read_receipts
from lmi_core.receipts.store import ReceiptStore
from lmi_core.settings.record_config import RecordConfig


def receipt(name: str, num_tokens: int = 10) -> Receipt:
    ids = list(range(num_tokens))
    choice = Choice(num_tokens=num_tokens, token_ids=ids, logprobs=[-0.5] * num_tokens)
    return Receipt(
        request_id=name,
        time_s=1.0,
        model="m",
        num_prompt_tokens=num_tokens,
        prompt_token_ids=ids,
        choices=[choice],
    )


def kept(directory: Path) -> list[str]:
    return [r.request_id for _, r in read_receipts(directory) if r is not None]


def test_the_oldest_of_whoever_has_the_most_go(tmp_path: Path) -> None:
    files = ReceiptStore(RecordConfig(directory=tmp_path, max_bytes=4000, max_files=4))
    files.put("few", receipt("rare"))
    for number in range(100):
        files.put("many", receipt(f"{number:03}"))
    files.close()
    assert kept(tmp_path / "few") == ["rare"]
    names = kept(tmp_path / "many")
    assert names == [f"{number:03}" for number in range(100 - len(names), 100)]
    paths = list(tmp_path.rglob("*.jsonl"))
    assert len(paths) == 4
    assert sum(path.stat().st_size for path in paths) <= 4000


def test_a_restart_keeps_to_the_bounds_with_what_there_was(tmp_path: Path) -> None:
    config = RecordConfig(directory=tmp_path, max_bytes=3000, max_files=3)
    for start in range(8):
        files = ReceiptStore(config)
        files.put("all", receipt(f"start {start}"))
        files.close()
    assert kept(tmp_path) == ["start 5", "start 6", "start 7"]


def test_what_does_not_fit_is_dropped_and_the_next_is_not(tmp_path: Path) -> None:
    files = ReceiptStore(RecordConfig(directory=tmp_path, max_bytes=2000, max_files=2))
    for number, num_tokens in enumerate((10, 1000, 10)):
        files.put("all", receipt(str(number), num_tokens))
    files.close()
    assert kept(tmp_path) == ["0", "2"]
    assert (files.num_kept, files.num_dropped) == (2, 1)


def test_a_line_that_the_disk_took_half_of_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    lengths = iter([10_000, 20, 10_000])
    monkeypatch.setattr(store.os, "write", lambda fd, data: write(fd, bytes(data)[: next(lengths)]))
    files = ReceiptStore(RecordConfig(directory=tmp_path))
    for number in range(3):
        files.put("all", receipt(str(number)))
    files.close()
    assert kept(tmp_path) == ["0", "2"]


def test_more_than_may_wait_is_dropped_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_MAX_PENDING_TOKENS", 50)
    monkeypatch.setattr(ReceiptStore, "_run", lambda self: None)
    files = ReceiptStore(RecordConfig(directory=tmp_path))
    for number in range(5):
        files.put("all", receipt(str(number)))
    assert files.num_dropped == 3


def test_a_line_that_a_crash_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(encode(receipt("whole")) + encode(receipt("half"))[:40])
    assert [r and r.request_id for _, r in read_receipts(path)] == ["whole", None]


def test_what_is_redacted_has_no_more_than_numbers() -> None:
    """Of every parameter a request may have; those nobody thought of go, too."""
    params: dict[str, Any] = {field.name: "a client's" for field in fields(SamplingParams)}
    params |= {"temperature": 0.5, "num_beams": 4, "bad_words": ["a"], "bad_words_ids": [[7]]}
    kept = msgspec.structs.replace(receipt("r"), params=params).redacted()
    assert (kept.params["temperature"], kept.params["num_beams"]) == (0.5, 4)
    assert kept.params.keys() == {
        name for name, kind in get_type_hints(SamplingParams).items() if _is_number(kind)
    }
    assert not kept.prompt_token_ids
    assert not kept.choices[0].token_ids


def _is_number(kind: Any) -> bool:
    kinds = set(get_args(kind) or (kind,)) - {type(None)}
    return all(get_origin(each) is Literal or each in (int, float, bool) for each in kinds)
