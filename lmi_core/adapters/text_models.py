"""Which models the installed Transformers can generate text with, told without importing it."""

from __future__ import annotations

import ast
import functools
import importlib.util
from pathlib import Path

from lmi_core.errors import MissingExtraError

_TABLES = {
    "AutoModelForCausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "AutoModelForSeq2SeqLM": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
}
"""By the class that loads them, which also is the key of config.json's ``auto_map`` that names such
a model among the code beside it."""


@functools.cache
def text_model_types(loader: str = "AutoModelForCausalLM") -> frozenset[str]:
    """The ``model_type`` of every model that the class ``loader`` has; empty: that isn't known."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        return frozenset()
    path = Path(spec.origin).parent / "models" / "auto" / "modeling_auto.py"
    try:
        body = ast.parse(path.read_bytes()).body
        table = next(
            node.value
            for node in body
            if isinstance(node, ast.Assign | ast.AnnAssign) and _assigns(node, _TABLES[loader])
        )
        assert isinstance(table, ast.Call)
        return frozenset(name for name, _ in ast.literal_eval(table.args[0]))
    except (OSError, SyntaxError, StopIteration, AssertionError, IndexError, ValueError):
        return frozenset()


def check_torch() -> None:
    """Raise MissingExtraError without torch, which the package transformers doesn't bring along."""
    if importlib.util.find_spec("torch") is None:
        raise MissingExtraError("serving a model with Transformers", "transformers")


def check_bitsandbytes() -> None:
    """Raise MissingExtraError unless weights can be quantised by it."""
    if any(importlib.util.find_spec(name) is None for name in ("bitsandbytes", "accelerate")):
        raise MissingExtraError("option.quantize of a Transformers model", "bitsandbytes")


def check_peft() -> None:
    """Raise MissingExtraError unless adapters can be added to a model by it."""
    if importlib.util.find_spec("peft") is None:
        raise MissingExtraError("LoRA on a model that Transformers computes", "peft")


def _assigns(node: ast.Assign | ast.AnnAssign, table: str) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return any(isinstance(target, ast.Name) and target.id == table for target in targets)


def objection_to(config: dict[str, object], *, trust_remote_code: bool) -> str | None:
    """Why the model of ``config`` can't be loaded; None: it can, as far as its settings tell."""
    has_encoder = config.get("is_encoder_decoder") is True
    loader = "AutoModelForSeq2SeqLM" if has_encoder else "AutoModelForCausalLM"
    model_type, known = config.get("model_type"), text_model_types(loader)
    if not known or model_type in known:
        return None
    auto_map = config.get("auto_map")
    if not isinstance(auto_map, dict) or loader not in auto_map:
        return (
            f"Transformers has no model of type {str(model_type)[:80]!r} that generates text, "
            "and none comes with it"
        )
    if trust_remote_code:
        return None
    return (
        f"Transformers doesn't know models of type {str(model_type)[:80]!r}: this one is defined "
        "by Python code that comes with it; option.trust_remote_code=true lets that run here"
    )
