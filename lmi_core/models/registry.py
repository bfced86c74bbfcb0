"""From an architecture's name in config.json to its family."""

from __future__ import annotations

from lmi_core.errors import ModelError
from lmi_core.models.families import llama, mistral, qwen2, qwen3
from lmi_core.models.family import Family

FAMILIES: tuple[Family, ...] = (llama.FAMILY, mistral.FAMILY, qwen2.FAMILY, qwen3.FAMILY)


def supported_architectures() -> tuple[str, ...]:
    return tuple(name for family in FAMILIES for name in family.architectures)


def family_of(architecture: str) -> Family:
    """The family that an architecture belongs to, or ModelError listing those there are."""
    for family in FAMILIES:
        if architecture in family.architectures:
            return family
    raise ModelError(
        f"architecture {architecture!r} in config.json is not supported; supported: "
        f"{', '.join(supported_architectures())}",
        field="architectures",
    )
