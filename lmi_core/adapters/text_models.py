"""Which models the installed Transformers can continue a text with, told without importing it."""

from __future__ import annotations

import ast
import functools
import importlib.util
from pathlib import Path

_TABLE = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"
_OWN_CODE = "AutoModelForCausalLM"
"""The key of config.json's ``auto_map`` that names such a model among the code beside it."""


@functools.cache
def text_model_types() -> frozenset[str]:
    """The ``model_type`` of every model that AutoModelForCausalLM has; empty: that isn't known."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        return frozenset()
    path = Path(spec.origin).parent / "models" / "auto" / "modeling_auto.py"
    try:
        body = ast.parse(path.read_bytes()).body
        table = next(
            node.value
            for node in body
            if isinstance(node, ast.Assign | ast.AnnAssign) and _assigns(node)
        )
        assert isinstance(table, ast.Call)
        return frozenset(name for name, _ in ast.literal_eval(table.args[0]))
    except (OSError, SyntaxError, StopIteration, AssertionError, IndexError, ValueError):
        return frozenset()


def _assigns(node: ast.Assign | ast.AnnAssign) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return any(isinstance(target, ast.Name) and target.id == _TABLE for target in targets)


def objection_to(config: dict[str, object], *, trust_remote_code: bool) -> str | None:
    """Why the model of ``config`` can't be loaded; None: it can, as far as its settings tell."""
    model_type, known = config.get("model_type"), text_model_types()
    if not known or model_type in known:
        return None
    auto_map = config.get("auto_map")
    if not isinstance(auto_map, dict) or _OWN_CODE not in auto_map:
        return (
            f"Transformers has no model of type {str(model_type)[:80]!r} that continues a text, "
            "and none comes with it"
        )
    if trust_remote_code:
        return None
    return (
        f"Transformers doesn't know models of type {str(model_type)[:80]!r}: this one is defined "
        "by Python code that comes with it; option.trust_remote_code=true lets that run here"
    )
