"""vLLM's asynchronous engine as a source of tokens."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from lmi_core.backends.library_error import reason_of
from lmi_core.backends.library_grammar import grammar_arguments
from lmi_core.backends.token_source import (
    SampledToken,
    ScoredToken,
    TokenBatch,
    most_likely,
    refuse_typical_p,
)
from lmi_core.backends.vllm_adapters import VllmAdapters
from lmi_core.engine.outputs import FinishReason
from lmi_core.engine.request import GenerationRequest
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.errors import (
    ConfigError,
    EngineError,
    LmiError,
    MissingExtraError,
    ModelError,
    UserError,
)
from lmi_core.settings.library_config import LibraryConfig

_BANNED = -1e9


class VllmSource:
    """Implements ``TokenSource``; the engine itself runs in processes of vLLM's own."""

    def __init__(self, config: LibraryConfig) -> None:
        self._config = config
        self._engine: Any = None
        self._adapters = VllmAdapters()
        self.vocab_size = 0
        self.max_model_len = 0
        self.eos_token_ids: tuple[int, ...] = ()
        self.dtype = ""

    @property
    def healthy(self) -> bool:
        return self._engine is not None and not self._engine.errored

    async def start(self) -> None:
        """Raises MissingExtraError without vLLM, ConfigError for arguments that it doesn't have or
        take, ModelError when it can't load the model."""
        try:
            arg_utils = await asyncio.to_thread(importlib.import_module, "vllm.engine.arg_utils")
            engines = await asyncio.to_thread(importlib.import_module, "vllm.v1.engine.async_llm")
        except ImportError as error:
            if error.name is not None and error.name.split(".")[0] != "vllm":
                raise EngineError(f"vLLM is installed, but can't be imported: {error}") from error
            raise MissingExtraError("serving a model with vLLM", "vllm") from None
        arguments = self._arguments(arg_utils.AsyncEngineArgs)
        try:
            # Made outside an event loop, it belongs to the one that its first request comes from.
            self._engine = await asyncio.to_thread(engines.AsyncLLM.from_engine_args, arguments)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"vLLM refuses the configuration: {reason_of(error)}") from error
        except Exception as error:  # its processes may fail of anything
            message = f"vLLM can't load {self._config.model}: {reason_of(error)}"
            raise ModelError(message) from error
        self._read(self._engine.model_config)

    async def stop(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.shutdown()

    async def load_adapter(self, name: str, path: Path) -> None:
        await self._adapters.load(self._engine, name, path)

    async def unload_adapter(self, name: str) -> None:
        await self._adapters.unload(self._engine, name)

    async def generate(
        self, request: GenerationRequest, request_id: str, prompt_ids: list[int], seed: int
    ) -> AsyncGenerator[TokenBatch, None]:
        params = request.params
        self._check(params)
        prompt: dict[str, object] = {"prompt_token_ids": prompt_ids}
        if request.cache_salt:
            prompt["cache_salt"] = request.cache_salt
        arguments = sampling_arguments(params, seed, self.eos_token_ids)
        errors = importlib.import_module("vllm.exceptions")
        refusal = getattr(errors, "VLLMClientError", ValueError)  # 0.26 and before raise that
        try:
            outputs = self._engine.generate(
                prompt,
                _sampling_params(params, arguments),
                request_id,
                lora_request=self._adapters.find(request.adapter),
                priority=request.priority,
            )
            async with aclosing(outputs):
                async for output in outputs:
                    yield self._batch(output, params, prompt_ids)
        except LmiError:
            raise
        except (refusal, TypeError, ValueError) as error:
            raise UserError(f"vLLM refuses the request: {error}") from error
        except Exception as error:  # they have no base of their own before 0.27
            raise EngineError(f"vLLM failed ({type(error).__name__}): {error}") from error

    def _check(self, params: SamplingParams) -> None:
        """Raise UserError for what the engine would ignore."""

    def _arguments(self, kind: type) -> Any:
        known = {field.name for field in dataclasses.fields(kind)}
        arguments = {
            "model": str(self._config.model),
            "served_model_name": self._config.served_model_name,
            "enable_log_requests": False,
            "disable_log_stats": True,
            **self._config.arguments,
        }
        unknown = sorted(self._config.arguments.keys() - known)
        if unknown:
            raise ConfigError(
                f"the installed vLLM has no engine argument {', '.join(unknown)}; leave "
                f"{', '.join(f'option.{name}' for name in unknown)} out",
                field=f"option.{unknown[0]}",
            )
        try:
            return kind(**{key: value for key, value in arguments.items() if key in known})
        except (TypeError, ValueError) as error:
            raise ConfigError(f"vLLM refuses the configuration: {reason_of(error)}") from error

    def _read(self, model: Any) -> None:
        self.vocab_size = int(model.get_vocab_size())
        self.max_model_len = int(model.max_model_len)
        self.dtype = str(model.dtype).removeprefix("torch.")
        ids = model.try_get_generation_config().get("eos_token_id")
        if ids is None:
            ids = getattr(model.hf_text_config, "eos_token_id", None)
        self.eos_token_ids = () if ids is None else (ids,) if isinstance(ids, int) else tuple(ids)

    def _batch(self, output: Any, params: SamplingParams, prompt_ids: list[int]) -> TokenBatch:
        batch = TokenBatch(num_cached_tokens=output.num_cached_tokens or 0)
        if params.prompt_logprobs is not None and output.prompt_logprobs:
            batch.prompt = _scored(prompt_ids, output.prompt_logprobs, params.prompt_logprobs)
        for choice in output.outputs:
            reason = self._reason(choice, params)
            last = len(choice.token_ids) - 1
            for i, token_id in enumerate(choice.token_ids):
                found = choice.logprobs[i] if choice.logprobs else None
                batch.tokens.append(
                    SampledToken(
                        choice.index,
                        token_id,
                        None if found is None else found[token_id].logprob,
                        () if found is None else most_likely(found, params.logprobs or 0),
                        reason if i == last else None,
                    )
                )
        return batch

    def _reason(self, choice: Any, params: SamplingParams) -> FinishReason | None:
        match choice.finish_reason:
            case None:
                return None
            case "stop":
                is_own = choice.stop_reason in params.stop_token_ids
                return FinishReason.STOP if is_own else FinishReason.EOS
            case "length":
                return FinishReason.LENGTH
            case "abort":
                return FinishReason.ABORT
        raise EngineError(f"vLLM ended a request with {choice.finish_reason!r}")


def sampling_arguments(
    params: SamplingParams, seed: int, eos_token_ids: Sequence[int] = ()
) -> dict[str, Any]:
    """Our parameters by vLLM's names. Stop texts are looked for here, in our detokenizer's text.

    ``output_kind`` and grammars need vLLM's own types and are added later.
    """
    refuse_typical_p(params, "vLLM")
    arguments: dict[str, Any] = {
        "n": params.n,
        "max_tokens": params.max_new_tokens,
        "min_tokens": params.min_new_tokens,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "seed": seed if params.temperature > 0 else None,
        "stop_token_ids": list(params.stop_token_ids),
        "ignore_eos": params.ignore_eos,
        "logprobs": params.logprobs,
        "prompt_logprobs": params.prompt_logprobs,
        "detokenize": False,
    }
    biases = dict(params.logit_bias) | dict.fromkeys(params.banned_token_ids, _BANNED)
    if biases:
        arguments["logit_bias"] = biases
    if params.allowed_token_ids is not None:
        arguments["allowed_token_ids"] = list(params.allowed_token_ids)
    if not params.ignore_eos:
        # vLLM itself ends at one id only, the tokenizer's.
        more = [i for i in eos_token_ids if i not in params.stop_token_ids]
        arguments["stop_token_ids"] += more
    return arguments


def _sampling_params(params: SamplingParams, arguments: Mapping[str, Any]) -> Any:
    module = importlib.import_module("vllm.sampling_params")
    more: dict[str, Any] = {"output_kind": module.RequestOutputKind.DELTA}
    if params.grammar is not None:
        rule = grammar_arguments(params.grammar, "vLLM", lambda texts: {"choice": texts})
        more["structured_outputs"] = module.StructuredOutputsParams(**rule)
    return module.SamplingParams(**arguments, **more)


def _scored(
    prompt_ids: list[int], found: Sequence[Mapping[int, Any] | None], num_top: int
) -> tuple[ScoredToken, ...]:
    return tuple(
        ScoredToken(token_id, None) if scores is None else ScoredToken.of(token_id, scores, num_top)
        for token_id, scores in zip(prompt_ids, found, strict=True)
    )
