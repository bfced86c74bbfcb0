"""The frozen configuration of a model that Transformers computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lmi_core.settings.engine_config import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersConfig(EngineConfig):
    """The engine's configuration, with a Transformers model in the place of the native one.

    Of the engine's fields, those about kernels, quantisation and rotary embeddings don't count.
    """

    torch_dtype: str = "auto"
    """torch's name of a data type; auto: the checkpoint's."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model, inside the server."""
    device_map: str | None = None
    """Spread the layers over devices (needs accelerate); None: all on ``device``."""
    bitsandbytes: Literal["int8", "nf4", "fp4"] | None = None
    """What bitsandbytes makes of the linear layers' weights at load; None: nothing."""
    attn_implementation: str | None = None
    """Transformers' name of an attention implementation; None: the best that it has."""
    max_sparsity: float = 0.33
    """Largest share of padding in the batches of a step."""
    max_splits: int = 3
    """Most padded batches, each with a forward call of its own."""
