"""Models as an engine of the CPU loads them."""

from __future__ import annotations

from pathlib import Path

from lmi_core.models.found_model import find_model
from lmi_core.models.loader import LoadedModel, load_weights
from lmi_core.models.tensor_reader import Progress
from lmi_core.models.weights import WeightPacker
from lmi_core.ops.cpu import NativeWeights
from lmi_core.settings.engine_config import DType, EngineConfig, Quantization
from lmi_core.settings.lora_config import LoraConfig


def load_model(
    path: Path,
    dtype: DType = "auto",
    *,
    quantize: Quantization | None = None,
    packer: WeightPacker | None = None,
    progress: Progress | None = None,
    takes_adapters: bool = False,
) -> LoadedModel:
    """The model in directory ``path``, with an engine's defaults; ``packer``: None: the CPU's."""
    lora = LoraConfig() if takes_adapters else None
    config = EngineConfig(model=path, dtype=dtype, quantize=quantize, lora=lora)
    return load_weights(find_model(config), packer or NativeWeights(), progress)
