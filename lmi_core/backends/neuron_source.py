"""vLLM on Neuron devices, by its plugin vLLM Neuron, as of Neuron SDK 2.32.

The plugin samples on the host with vLLM's own sampler, unless its ``on_device_sampling_config`` is
set: then the device does, which knows fewer parameters but grammars, too.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from lmi_core.backends.vllm_source import VllmSource
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.errors import MissingExtraError, UserError
from lmi_core.settings.library_config import LibraryConfig

_HOST_ONLY = (
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_new_tokens",
    "logit_bias",
    "banned_token_ids",
    "allowed_token_ids",
    "logprobs",
)
"""What only vLLM's sampler applies."""
_USUAL = SamplingParams()


class NeuronSource(VllmSource):
    """As ``VllmSource``; what the device would ignore is refused."""

    def __init__(self, config: LibraryConfig) -> None:
        super().__init__(config)
        self._neuron_config = _neuron_config(config.arguments)

    async def start(self) -> None:
        """As ``VllmSource.start``; raises MissingExtraError without the plugin, too."""
        if importlib.util.find_spec("vllm_neuron") is None:
            raise MissingExtraError("serving a model on Neuron devices", "neuron")
        await super().start()

    def _check(self, params: SamplingParams) -> None:
        if params.prompt_logprobs is not None:
            raise UserError(
                "prompt_logprobs: vLLM Neuron doesn't score prompts; leave it out",
                field="prompt_logprobs",
            )
        samples_on_device = self._neuron_config.get("on_device_sampling_config") is not None
        enforces = samples_on_device and self._neuron_config.get("enable_structured_outputs")
        if params.grammar is not None and not enforces:
            raise UserError(
                f"{params.grammar.field}: vLLM Neuron enforces grammars only where "
                "option.additional_config has neuron_config with on_device_sampling_config and "
                "enable_structured_outputs=true",
                field=params.grammar.field,
            )
        if not samples_on_device:
            return
        for name in _HOST_ONLY:
            if getattr(params, name) != getattr(_USUAL, name):
                name = {"banned_token_ids": "suppress_tokens"}.get(name, name)
                raise UserError(
                    f"{name}: vLLM Neuron, which samples on the device here, has none; leave "
                    "on_device_sampling_config out of option.additional_config to use it",
                    field=name,
                )


def _neuron_config(arguments: Mapping[str, object]) -> Mapping[str, Any]:
    additional = arguments.get("additional_config")
    inner = additional.get("neuron_config") if isinstance(additional, dict) else None
    return inner if isinstance(inner, dict) else {}
