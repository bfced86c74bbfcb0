"""The frozen configuration of a model that another library's engine serves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lmi_core.settings.lora_config import LoraConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryConfig:
    """What is ours, and the ``arguments`` that the library's engine is made with."""

    backend: str
    model: Path
    """Directory with the model and its tokenizer.json."""
    served_model_name: str = "model"
    arguments: Mapping[str, object] = field(default_factory=dict)
    """By the library's own names, without the model's."""
    max_num_seqs: int = 256
    max_queue_size: int = 1000
    """Requests beyond ``max_num_seqs`` before new ones are refused."""
    max_logprobs: int = 20
    lora: LoraConfig | None = None
    """Adapters; None: there are none, and none can be loaded."""
