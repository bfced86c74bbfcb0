"""What a model's own files say: architecture, lengths, checkpoint format, custom code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lmi_core.config.paths import is_dir, is_file
from lmi_core.config.problem import Problems
from lmi_core.errors import ModelError
from lmi_core.weights.checkpoint import weight_files
from lmi_core.weights.hf_config import (
    GENERATES,
    HfConfig,
    QuantizationSettings,
    Task,
    read_quantization,
    task_of,
)
from lmi_core.weights.quantized.methods import is_in_fp8

MAX_CONFIG_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Facts read from a model directory; None where the files don't say or aren't here yet."""

    architecture: str | None = None
    model_type: str | None = None
    max_position_embeddings: int | None = None
    quantization: QuantizationSettings | None = None
    task: Task = "generate"
    """What the model is for, unless it is asked for something else."""
    is_encoder_decoder: bool = False
    is_diffusion: bool = False
    unsupported: str | None = None
    """A setting of a native architecture that the lmi engine doesn't have."""
    pickled: str = ""
    """A file of weights, where they are torch's; "": they are safetensors."""
    requirements: Path | None = None
    gguf_types: Mapping[str, int] = field(default_factory=dict)
    """Of a model in GGUF, how many tensors it has of each type."""
    known: bool = False

    @property
    def quant_method(self) -> str | None:
        """How the checkpoint is quantised."""
        return None if self.quantization is None else self.quantization.method

    @property
    def is_in_fp8(self) -> bool:
        """Whether the checkpoint's matrices are."""
        return self.quantization is not None and is_in_fp8(self.quantization)

    @property
    def is_generative(self) -> bool:
        """Whether the architecture generates text, as far as its name tells."""
        return self.architecture is None or self.architecture.endswith(GENERATES)


def read_model_files(directory: Path | None, problems: Problems) -> ModelFiles:
    """Read what ``directory`` holds; a broken config.json is an error."""
    if directory is None or not is_dir(directory):
        return ModelFiles()
    requirements = directory / "requirements.txt"
    config = _read_config(directory / "config.json", problems)
    facts = config or {}
    architectures = facts.get("architectures")
    architecture = _first_text(architectures)
    return ModelFiles(
        architecture=architecture,
        task="generate" if architecture is None else task_of(directory, architecture),
        model_type=_text(facts.get("model_type")),
        max_position_embeddings=_max_positions(facts),
        quantization=_quantization(directory, facts, problems),
        is_encoder_decoder=facts.get("is_encoder_decoder") is True,
        is_diffusion=is_file(directory / "model_index.json"),
        unsupported=_unsupported(directory / "config.json", facts),
        pickled=_pickled(directory),
        requirements=requirements if is_file(requirements) else None,
        gguf_types=_gguf_types(facts),
        known=config is not None,
    )


def _gguf_types(facts: dict[str, object]) -> dict[str, int]:
    settings = facts.get("gguf")
    types = settings.get("types") if isinstance(settings, dict) else None
    return types if isinstance(types, dict) else {}


def _pickled(directory: Path) -> str:
    try:
        name = next((path.name for path in weight_files(directory)), "")
    except OSError:
        return ""  # what can't be listed is for loading to say
    return name if name.endswith(".bin") else ""


def _unsupported(path: Path, facts: dict[str, object]) -> str | None:
    from lmi_core.models.registry import unsupported_setting

    return unsupported_setting(HfConfig(path, facts))


def _read_config(path: Path, problems: Problems) -> dict[str, object] | None:
    if not is_file(path):
        return None
    try:
        with path.open("rb") as file:
            config = json.loads(file.read(MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        problems.error(str(path), f"is not readable JSON ({str(error)[:120]})")
        return None
    if not isinstance(config, dict):
        problems.error(str(path), "is not a JSON object")
        return None
    return config


def _quantization(
    directory: Path, facts: dict[str, object], problems: Problems
) -> QuantizationSettings | None:
    try:
        settings = read_quantization(HfConfig(directory / "config.json", facts))
        return None if settings is None or not settings.method else settings
    except ModelError as error:
        where, _, what = str(error).partition(": ")
        problems.error(where, what)
        return None


def _max_positions(facts: dict[str, object]) -> int | None:
    """Return the model's length limit, unless rotary scaling moves it, which the loader knows then,
    or positions are relative, as T5's."""
    if "relative_attention_num_buckets" in facts:
        return None
    scaling = facts.get("rope_scaling") or facts.get("rope_parameters")
    if isinstance(scaling, dict) and scaling.get("rope_type", scaling.get("type")) != "default":
        return None
    for key in ("max_position_embeddings", "max_seq_len", "n_positions"):
        value = facts.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _first_text(value: object) -> str | None:
    return _text(value[0]) if isinstance(value, list) and value else None
