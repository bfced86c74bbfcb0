"""EAGLE heads draft what they are defined to, and change nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lmi_core.engine.model_drafts import DraftChain
from lmi_core.errors import ModelError
from lmi_core.runners.cpu.memory_needs import estimate
from tests.checkpoints import SHAPE
from tests.engine.eagle_heads import DRAFT_VOCAB, Reference, write_head
from tests.engine.random_drafts import SPECULATION, draft_whatever_it_costs
from tests.engine.test_invariance import CONDITIONS, assert_same, outcomes_alone
from tests.engine.test_model_drafts import PARAMS, both, copy_of_target, find, share
from tests.tiny_tokenizer import VOCAB_SIZE

HIDDEN = SHAPE["hidden_size"]
KINDS = ("eagle3", "speculators", "eagle")


@pytest.fixture(autouse=True)
def _drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    draft_whatever_it_costs(monkeypatch)


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_those_of_the_definition(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[list[int], list[int]]] = []
    read = DraftChain.read

    def note(chain: DraftChain, step: Any) -> None:
        read(chain, step)
        seen.extend((list(s.token_ids), list(s.drafts)) for s in chain.rows if s.drafts)

    monkeypatch.setattr(DraftChain, "read", note)
    head = write_head(tmp_path / kind, kind)
    params = replace(PARAMS, temperature=0.0, max_new_tokens=20)
    both(head, params, 2, dtype="fp32", block_size=16)
    reference = Reference(head, copy_of_target())
    equal = [
        list(np.array(drafts) == reference.drafts(token_ids, len(drafts)))
        for token_ids, drafts in seen[::2]
    ]
    firsts = [each[0] for each in equal]
    assert len(firsts) > 8
    assert np.mean(firsts) > 0.6  # its matrices are rounded
    assert np.mean([value for each in equal for value in each]) > 0.5


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_right_ones_save_steps(temperature: float, tmp_path: Path) -> None:
    head = write_head(tmp_path / "head")
    ids = _draft_ids(head)
    params = replace(PARAMS, temperature=temperature, logit_bias=((ids[7], 100.0),))
    totals = both(head, params)
    assert share(totals) == 1.0
    assert totals.num_steps <= 2 + -(-47 // 5)


def _draft_ids(head: Path) -> list[int]:
    from safetensors.torch import load_file

    above = load_file(head / "model.safetensors")["d2t"]
    return (above + torch.arange(DRAFT_VOCAB)).tolist()


@pytest.mark.parametrize(
    "params",
    [
        replace(PARAMS, temperature=1.6, top_p=0.9, logprobs=2),
        replace(PARAMS, temperature=1.0, repetition_penalty=1.3, frequency_penalty=0.5),
        replace(PARAMS, temperature=1.0, n=3),
    ],
    ids=["filtered", "penalised", "choices"],
)
def test_it_changes_nothing(params: Any, tmp_path: Path) -> None:
    both(write_head(tmp_path / "head"), params, 3)


@pytest.mark.parametrize("kind", ["eagle3", "eagle"])
def test_bits_do_not_depend_on_a_head(kind: str, tmp_path: Path) -> None:
    case = ("llama3", "bf16", None, "auto")
    outcomes_alone(*case)
    speculation = replace(SPECULATION, draft_model=write_head(tmp_path / kind, kind))
    num_drafted = 0
    for name in ("two threads", "chunks of 7", "few blocks"):
        changes = {**CONDITIONS[name], "speculation": speculation}
        totals = assert_same(case, name, len(name), **changes).stats().totals
        num_drafted += totals.num_model_draft_tokens
    assert num_drafted > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"tensors": {"fc.weight": torch.zeros(8, 8), "midlayer.hidden_norm.weight": None}},
            rf"a model of {HIDDEN} columns and {VOCAB_SIZE} tokens: .*fc.weight is F32 \[8, 8\]",
        ),
        ({"tensors": {"norm.weight": None}}, r"norm.weight is missing"),
        ({"tensors": {"layers.1.mlp.up_proj.weight": torch.zeros(8, 8)}}, "layers.1.mlp.up_proj"),
        ({"tensors": {"t2d": torch.zeros(500, dtype=torch.bool)}}, "vocabulary of .500,. tokens"),
        ({"tensors": {"d2t": torch.full((DRAFT_VOCAB,), 900)}}, "d2t doesn't name ascending ids"),
        ({"tensors": {"d2t": torch.arange(0, -DRAFT_VOCAB, -1)}}, "d2t doesn't name ascending"),
        ({"norm_before_fc": True}, "norm_before_fc is True"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 40]}},
            r"is \[1, 2, 40\]; the model has 3 layers",
        ),
    ],
)
def test_heads_that_do_not_fit_are_one_error(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        find(write_head(tmp_path / "head", **changes))


def test_memory_counts_the_head_and_its_states(tmp_path: Path) -> None:
    found, _ = find(write_head(tmp_path / "head"), kv_cache_bytes=None, max_num_seqs=4)
    plain = estimate(replace(found, heads=None))
    needs = estimate(found)
    assert needs.weights == plain.weights + found.heads.num_weights
    # Three layers' blocks and the head's; a layer's keys and values are as wide as a state here.
    assert needs.kv_cache * 3 == plain.kv_cache * 5
