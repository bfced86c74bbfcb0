"""What drafts for a model: another one, loaded with what and of which vocabulary, or heads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from lmi_core.errors import ModelError
from lmi_core.models.eagle_head import EagleHead
from lmi_core.models.medusa_heads import MedusaHeads
from lmi_core.settings.engine_config import EngineConfig
from lmi_core.text.tokenizer import Tokenizer
from lmi_core.weights.checkpoint import Checkpoint
from lmi_core.weights.quantized.methods import objection

FIELD = "draft_model"
"""What errors about it name."""

DraftHeads = MedusaHeads | EagleHead


def draft_config(asked: EngineConfig, checkpoint: Checkpoint) -> EngineConfig:
    """What the draft model of ``asked``, in ``checkpoint``, is loaded with: the same formats, as
    far as it isn't quantised itself; rank 0 has all of it. Raises ModelError."""
    quantize = asked.quantize
    if quantize is not None and objection(quantize, checkpoint.quantization):
        quantize = None
    return replace(
        asked,
        model=checkpoint.path,
        task="generate",
        quantize=quantize,
        lora=None,
        max_model_len=None,
        rope_scaling=None,
        rope_factor=None,
        rope_theta=None,
        prefix_cache_dir=None,
        tensor_parallel_degree=1,
        tp_invariant=False,
    )


def check_vocabulary(target: Path, draft: Path) -> None:
    """Raise ModelError unless the ids that both tokenizers have stand for the same tokens.
    Embeddings beyond, by which models of one family differ, are padding."""
    theirs, ours = _tokens(target), _tokens(draft)
    different = sorted(i for i in theirs.keys() & ours.keys() if theirs[i] != ours[i])
    if not different and ours:
        return
    first = different[0] if different else 0
    raise ModelError(
        f"{draft} has another vocabulary than {target}: {len(different)} ids stand for other "
        f"tokens, the first is {first}, which is {_shown(ours.get(first))} there and "
        f"{_shown(theirs.get(first))} here; name a model of the same family"
    )


def _tokens(directory: Path) -> dict[int, str]:
    tokenizer = Tokenizer.load(directory)
    try:
        return tokenizer.tokens()
    finally:
        tokenizer.close()


def _shown(token: str | None) -> str:
    return f"{token!r:.60}"
