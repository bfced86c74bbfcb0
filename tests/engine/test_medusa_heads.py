"""Medusa heads decide how many steps a text takes, and nothing else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmi_core.engine.model_drafts import DraftChain
from lmi_core.errors import ModelError
from lmi_core.models.medusa_heads import FILE
from lmi_core.runners.cpu.memory_needs import estimate
from tests.checkpoints import SHAPE
from tests.engine.random_drafts import SPECULATION, draft_whatever_it_costs
from tests.engine.test_invariance import CONDITIONS, assert_same, outcomes_alone
from tests.engine.test_model_drafts import PARAMS, both, copy_of_target, find, share
from tests.tiny_tokenizer import VOCAB_SIZE

HIDDEN = SHAPE["hidden_size"]


def write_heads(directory: Path, num_heads: int = 3, **changes: Any) -> Path:
    """Whose blocks add nothing and whose outputs are the model's own: each guesses the next token
    once more."""
    from safetensors.torch import load_file, save_file
    from torch import bfloat16, zeros

    directory.mkdir()
    head = load_file(copy_of_target() / "model.safetensors")["lm_head.weight"]
    tensors = {}
    for i in range(num_heads):
        tensors[f"{i}.0.linear.weight"] = zeros(HIDDEN, HIDDEN, dtype=bfloat16)
        tensors[f"{i}.0.linear.bias"] = zeros(HIDDEN, dtype=bfloat16)
        tensors[f"{i}.1.weight"] = head.clone()
    tensors |= changes.pop("tensors", {})
    save_file({k: v for k, v in tensors.items() if v is not None}, directory / FILE)
    config = {"medusa_num_heads": num_heads, "medusa_num_layers": 1, **changes}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(autouse=True)
def _drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    draft_whatever_it_costs(monkeypatch)


def test_heads_see_the_last_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedily, these give the last token again."""
    seen: list[bool] = []
    read = DraftChain.read

    def note(chain: DraftChain, step: Any) -> None:
        read(chain, step)
        for sequence in chain.rows:
            last = sequence.token_ids[-1]
            seen.extend(draft == last for draft in sequence.drafts)

    monkeypatch.setattr(DraftChain, "read", note)
    both(write_heads(tmp_path / "heads"), replace(PARAMS, temperature=0.0), 4)
    assert len(seen) > 100
    assert np.mean(seen) > 0.9  # their matrices are rounded


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_right_ones_save_steps(temperature: float, tmp_path: Path) -> None:
    params = replace(PARAMS, temperature=temperature, logit_bias=((7, 100.0),))
    totals = both(write_heads(tmp_path / "heads"), params)
    assert share(totals) == 1.0
    assert totals.num_steps <= 2 + -(-47 // 4)


def test_bits_do_not_depend_on_heads(tmp_path: Path) -> None:
    case = ("llama3", "bf16", None, "auto")
    outcomes_alone(*case)
    speculation = replace(SPECULATION, draft_model=write_heads(tmp_path / "heads"))
    num_drafted = 0
    for name in ("two threads", "plain loop"):
        changes = {**CONDITIONS[name], "speculation": speculation}
        totals = assert_same(case, name, len(name), **changes).stats().totals
        num_drafted += totals.num_model_draft_tokens
    assert num_drafted > 0


def test_heads_of_another_model_are_one_error(tmp_path: Path) -> None:
    from torch import zeros

    small = {"1.0.linear.weight": zeros(8, 8), "2.1.weight": None}
    heads = write_heads(tmp_path / "small", tensors=small)
    with pytest.raises(ModelError) as error:
        find(heads)
    message = str(error.value)
    assert f"a model of {HIDDEN} columns and {VOCAB_SIZE} tokens" in message
    assert f"1.0.linear.weight is F32 [8, 8], not [{HIDDEN}, {HIDDEN}]" in message
    assert f"2.1.weight is missing, not [{VOCAB_SIZE}, {HIDDEN}]" in message
    with pytest.raises(ModelError, match=r"medusa_num_heads is 0; allowed are 1 to 64"):
        find(write_heads(tmp_path / "none", medusa_num_heads=0))
    (heads / FILE).unlink()
    with pytest.raises(ModelError, match=f"has no {FILE}"):
        find(heads)


def test_memory_counts_the_heads(tmp_path: Path) -> None:
    found, _ = find(write_heads(tmp_path / "heads"))
    plain = estimate(replace(found, heads=None))
    added = 3 * HIDDEN * (HIDDEN + VOCAB_SIZE)
    assert estimate(found).weights == plain.weights + added
