"""The page of families and of what their tests show.

Run ``python -m tests.models.family_page > lmi_core/models/FAMILIES.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from lmi_core.models import families
from lmi_core.models.registry import MODULES, POOLED
from tests.adapters import test_lora_parity
from tests.checkpoints import FAMILIES, VARIANTS
from tests.engine import test_encoders, test_invariance
from tests.models import test_families, test_parity, test_quantised
from tests.pooled_checkpoints import ENCODERS

FOLDER = Path(families.__file__).parent
PAGE = FOLDER.parent / "FAMILIES.md"
TESTS: dict[str, tuple[Callable[..., object], ...]] = {
    "logits": (
        test_families.test_fp32_logits_and_greedy_tokens,
        test_parity.test_fp32_logits_and_greedy_tokens,
        test_encoders.test_means_are_those_of_transformers,
    ),
    "bf16": (
        test_families.test_bf16_error_is_close_to_that_of_transformers,
        test_parity.test_bf16_error_is_close_to_that_of_transformers,
        test_encoders.test_bf16_error_is_close_to_that_of_transformers,
    ),
    "bits": (
        test_families.test_same_bits_in_any_batch,
        test_invariance.test_bits_do_not_depend_on_company,
        test_encoders.test_same_bits_in_any_batch,
    ),
    "int8, int4": (
        test_families.test_quantised_logits_are_close,
        test_quantised.test_logits_are_close,
        test_encoders.test_quantised_embeddings_are_close,
    ),
    "LoRA": (test_families.test_adapters_of_every_linear, test_lora_parity.test_fp32_logits),
}
HEAD = """# Families

What models are computed by our own engine; others are by Transformers, within it. Written by
`python -m tests.models.family_page`, and a test holds it to what there is. Lines are those of a
family's file. The other numbers are of the small checkpoints that its tests have
(`tests/checkpoints.py`, `tests/pooled_checkpoints.py`):

- **logits**: Transformers' (or a reference's) in fp32 up to 1e-4 of their deviation, and its tokens
- **bf16**: an error of at most 1.5 times Transformers' own
- **bits**: the same in any batch and in chunks of any size
- **int8, int4**: quantised while loaded, near what the rounded weights give in floats
- **LoRA**: adapters as the merged weights, beside rows without: of all linears, but of experts and
  of what leads to latents
"""


def family_page() -> str:
    shown = {name: {*_shown_by(functions)} for name, functions in TESTS.items()}
    of_family: dict[str, list[str]] = {}
    for variant in [*FAMILIES, *VARIANTS, *ENCODERS]:
        of_family.setdefault(_module_of(variant), []).append(variant)
    lines = [HEAD, "| family | lines | in config.json | " + " | ".join(TESTS) + " |"]
    lines.append("|---" * (3 + len(TESTS)) + "|")
    for path in sorted(FOLDER.glob("[a-z]*.py")):
        modules = (MODULES | _ENCODERS).items()
        names = ", ".join(name for name, module in modules if module == path.stem)
        link = f"[{path.stem}](families/{path.name})"
        own = of_family.get(path.stem, [])
        counts = (f"{len(found.intersection(own))} of {len(own)}" for found in shown.values())
        size = len(path.read_text().splitlines())
        lines.append(f"| {link} | {size} | {names} | {' | '.join(counts)} |")
    return "\n".join(lines) + "\n"


_ENCODERS = {
    name.removesuffix("Model"): module
    for name, module in POOLED.items()
    if name.endswith("Model") and module not in MODULES.values()
}


def _module_of(variant: str) -> str:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    import tests.published_models  # noqa: F401

    if variant in MODULES.values():
        return variant
    if variant in ENCODERS:
        return {"xlm-roberta": "roberta"}.get(ENCODERS[variant][0], variant)
    model_type, _ = (FAMILIES | VARIANTS)[variant]
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    return MODULES[name or AutoModelForCausalLM._model_mapping[CONFIG_MAPPING[model_type]].__name__]


def _shown_by(functions: tuple[Callable[..., object], ...]) -> Iterator[str]:
    """The checkpoints that tests are run with."""
    for function in functions:
        for mark in function.pytestmark:  # type: ignore[attr-defined]
            names, values = mark.args
            names = [names] if isinstance(names, str) else [*names]
            place = next((names.index(name) for name in ("variant", "name") if name in names), None)
            for value in values if place is not None else ():
                yield value if isinstance(value, str) else value[place]


if __name__ == "__main__":
    print(family_page(), end="")
