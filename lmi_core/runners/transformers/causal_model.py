"""A Transformers model for text generation, loaded, and what its forward call takes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lmi_core.errors import ModelError
from lmi_core.settings.engine_config import check_max_model_len

if TYPE_CHECKING:
    import torch

    from lmi_core.runners.transformers.peft_adapters import PeftAdapters

_LENGTHS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_sequence_length",
    "n_ctx",
    "seq_length",
)
DEFAULT_LENGTH = 4096
_CACHE_NAMES = ("past_key_values", "cache_params", "cache")
"""The last is that of Transformers from 5.24 on, for what had the other two before."""


class CausalModel:
    """Calls a model and reports its sizes; ``cache_name`` is what it calls its cache."""

    def __init__(self, model: Any, device: torch.device) -> None:
        self._model = model
        self.device = device
        self._takes = frozenset(inspect.signature(model.forward).parameters)
        self.adapters: PeftAdapters | None = None
        """None: there are none, and none can be loaded."""
        self.adapter_names: Mapping[int, str] = {}
        """By row, of the step that runs."""
        self.quantize = ""
        """What bitsandbytes has made of its linear layers."""
        name = next((name for name in _CACHE_NAMES if name in self._takes), None)
        if name is None:
            raise ModelError(
                f"{type(model).__name__} has none of {', '.join(_CACHE_NAMES)}: it can't go on "
                "from tokens that it has seen, and is not served",
                field="option.model_id",
            )
        self.cache_name = name
        self.is_mergeable = name != "cache_params" and self._has_plain_cache()
        """Whether the caches of several sequences can be one batch's, padded on the left."""

    def __call__(
        self,
        token_ids: torch.Tensor,
        cache: Any,
        num_logits: int,
        *,
        mask: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Any]:
        """Logits [batch, ``num_logits``, vocabulary] of the last of ``token_ids`` [batch, width],
        and the cache, which now holds them too.

        ``mask`` [batch, cached + width] is 0 at padding; ``positions`` are those of ``token_ids``.
        """
        inputs: dict[str, Any] = {self.cache_name: cache, "use_cache": True, "return_dict": True}
        for key, value in (
            ("attention_mask", mask),
            ("position_ids", positions),
            ("logits_to_keep", num_logits),
        ):
            if value is not None and key in self._takes:
                inputs[key] = value
        output = self._model(input_ids=token_ids, **inputs)
        return output.logits[:, -num_logits:], getattr(output, self.cache_name)

    def begin(self, rows: Sequence[int]) -> None:
        """Say whose tokens the next call has: ``rows`` in the order of its batch."""
        if self.adapters is not None:
            self.adapters.use(rows, self.adapter_names)

    def token_bytes(self) -> int:
        """What the cache holds for a token; it runs one."""
        import torch

        ids = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        _, cache = self(ids, None, 1)
        return sum(_num_bytes(layer) for layer in getattr(cache, "layers", ()))

    @property
    def vocab_size(self) -> int:
        head = self._model.get_output_embeddings()
        if head is not None and getattr(head, "weight", None) is not None:
            return int(head.weight.shape[0])
        return int(self._text_config.vocab_size)

    @property
    def dtype(self) -> str:
        return str(self._model.dtype).removeprefix("torch.")

    @property
    def num_bytes(self) -> int:
        """Of the weights."""
        return int(self._model.get_memory_footprint())

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self._ids("eos_token_id")

    @property
    def forced_end_ids(self) -> tuple[int, ...]:
        """Of which one ends a text that is as long as it may be; empty: any token may."""
        return self._ids("forced_eos_token_id")

    def _ids(self, name: str) -> tuple[int, ...]:
        for config in (self._model.generation_config, self._text_config):
            ids = getattr(config, name, None)
            if ids is not None:
                return (ids,) if isinstance(ids, int) else tuple(ids)
        return ()

    @property
    def max_positions(self) -> int | None:
        """The longest sequence; None if the configuration doesn't say."""
        for name in _LENGTHS:
            length = getattr(self._text_config, name, None)
            if isinstance(length, int) and length > 0:
                return length
        return None

    def max_model_len(self, wanted: int | None) -> int:
        """The longest sequence to be served; UserError if ``wanted`` is more than there is."""
        limit = self.max_positions
        check_max_model_len(wanted, limit)
        return wanted or limit or DEFAULT_LENGTH

    @property
    def _text_config(self) -> Any:
        return self._model.config.get_text_config(decoder=True)

    def _has_plain_cache(self) -> bool:
        """Whether each layer's cache is keys and values of every token, and nothing else."""
        from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

        if getattr(self._model, "_is_stateful", False) or "position_ids" not in self._takes:
            return False
        layers = DynamicCache(config=self._model.config).layers
        return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)


def _num_bytes(layer: Any) -> int:
    tensors = (getattr(layer, "keys", None), getattr(layer, "values", None))
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)
