"""From an architecture's name in config.json to its family."""

from __future__ import annotations

from lmi_core.errors import ModelError
from lmi_core.models.families import (
    cohere,
    cohere2,
    exaone4,
    gemma,
    gemma2,
    gemma3,
    glm,
    glm4,
    granite,
    llama,
    mistral,
    nemotron,
    olmo,
    olmo2,
    olmo3,
    phi3,
    qwen2,
    qwen3,
    smollm3,
    stablelm,
)
from lmi_core.models.family import Family

FAMILIES: tuple[Family, ...] = (
    cohere.FAMILY,
    cohere2.FAMILY,
    exaone4.FAMILY,
    gemma.FAMILY,
    gemma2.FAMILY,
    gemma3.FAMILY,
    glm.FAMILY,
    glm4.FAMILY,
    granite.FAMILY,
    llama.FAMILY,
    mistral.FAMILY,
    nemotron.FAMILY,
    olmo.FAMILY,
    olmo2.FAMILY,
    olmo3.FAMILY,
    phi3.FAMILY,
    qwen2.FAMILY,
    qwen3.FAMILY,
    smollm3.FAMILY,
    stablelm.FAMILY,
)


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
