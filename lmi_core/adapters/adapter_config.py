"""PEFT's ``adapter_config.json``: ranks and scales of modules, and what isn't served."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmi_core.errors import ModelError
from lmi_core.files import read_json_object
from lmi_core.weights.hf_config import HfConfig, positive_number

FILE_NAME = "adapter_config.json"
_REFUSED = {
    "use_dora": "DoRA's magnitudes",
    "use_qalora": "QA-LoRA's pooled inputs",
    "lora_bias": "biases of B",
    "modules_to_save": "whole modules beside the adapter",
    "layer_replication": "repeated layers",
    "trainable_token_indices": "embeddings of single tokens",
    "target_parameters": "adapters of parameters that aren't linear layers",
    "alora_invocation_tokens": "adapters that begin at certain tokens",
    "arrow_config": "routing between adapters",
}
"""Settings that change more than the products with A and B, by what they are about."""
_INITIALISATIONS_OF_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """What the file says of a module's rank and scale. Patterns are keyed by regular expressions
    for the end of a module's name, the first match counts."""

    path: Path
    rank: int
    alpha: float
    uses_rank_stabilisation: bool
    """The scale is alpha / sqrt(rank), not alpha / rank."""
    ranks: dict[re.Pattern[str], int]
    alphas: dict[re.Pattern[str], float]

    def rank_of(self, module: str) -> int:
        return next((rank for key, rank in self.ranks.items() if key.match(module)), self.rank)

    def scale_of(self, module: str) -> float:
        """What B A x is multiplied by."""
        alpha = next((a for key, a in self.alphas.items() if key.match(module)), self.alpha)
        rank = self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.uses_rank_stabilisation else rank)


def read_adapter_config(directory: Path) -> AdapterConfig:
    """Read and check an adapter's configuration; raises ModelError naming the key.

    ``fan_in_fan_out`` says how the base model stores its own matrices, which ours are not touched
    by; ``target_modules`` what was trained, which the tensors show.
    """
    path = directory / FILE_NAME
    if not path.is_file():
        raise ModelError(
            f"{directory} has no {FILE_NAME}: give the directory of a PEFT adapter",
            field=FILE_NAME,
        )
    config = HfConfig(path, read_json_object(path))
    _check(config)
    return AdapterConfig(
        path=path,
        rank=config.integer("r", 8),
        alpha=config.number("lora_alpha", 8),
        uses_rank_stabilisation=config.boolean("use_rslora"),
        ranks=_pattern(config, "rank_pattern", _rank),
        alphas=_pattern(config, "alpha_pattern", positive_number),
    )


def _check(config: HfConfig) -> None:
    kind = config.string("peft_type", "LORA")
    if kind != "LORA":
        raise config.error("peft_type", f"is {kind!r}; only LORA adapters are served")
    bias = config.string("bias", "none")
    if bias != "none":
        raise config.error("bias", f"is {bias!r}: trained biases aren't served, only 'none'")
    for key, what in _REFUSED.items():
        if config.values.get(key):
            raise config.error(key, f"is {config.values[key]!r:.80}: {what} aren't served")
    start = str(config.values.get("init_lora_weights")).lower()
    if start.startswith(_INITIALISATIONS_OF_THE_BASE):
        raise config.error(
            "init_lora_weights",
            f"is {start!r}, which changed the base model's weights too: convert the adapter to one "
            "for the original weights (PEFT's path_initial_model_for_weight_conversion)",
        )


def _pattern(config: HfConfig, key: str, read: Any) -> dict[re.Pattern[str], Any]:
    values = config.values.get(key) or {}
    if not isinstance(values, dict):
        raise config.error(key, f"is {values!r:.80}, but must map names of modules to numbers")
    patterns = {}
    for expression, value in values.items():
        try:
            pattern = re.compile(rf"(.*\.)?({expression})$")
        except re.error as error:
            raise config.error(key, f"has {expression!r}, no regular expression: {error}") from None
        patterns[pattern] = read(config, f"{key} of {expression!r}", value)
    return patterns


def _rank(config: HfConfig, key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise config.error(key, f"is {value!r}, but must be an integer >= 1")
    return value
