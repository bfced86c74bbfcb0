"""TensorRT-LLM's LLM API as a source of tokens: its PyTorch backend, as release 1.3 has it."""

from __future__ import annotations

import asyncio
import importlib
import re
from collections.abc import AsyncGenerator
from typing import Any

from lmi_core.backends.library_error import reason_of
from lmi_core.backends.token_source import TokenBatch
from lmi_core.backends.trtllm_choices import TrtllmChoices
from lmi_core.backends.trtllm_sampling import (
    guided_decoding,
    request_priority,
    sampling_arguments,
)
from lmi_core.engine.request import GenerationRequest
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.errors import ConfigError, EngineError, MissingExtraError, ModelError, UserError
from lmi_core.settings.library_config import LibraryConfig
from lmi_core.weights.hf_config import HfConfig, read_hf_config

_FIRST_RELEASE = (1, 3)
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


class TrtllmSource:
    """Implements ``TokenSource``; the engine itself runs in processes of TensorRT-LLM's own.

    Seeds are passed on, but its sampler repeats itself only for a request that runs alone.
    """

    def __init__(self, config: LibraryConfig) -> None:
        self._config = config
        self._library: Any = None
        self._llm: Any = None
        self._has_failed = False
        self.vocab_size = 0
        self.max_model_len = 0
        self.eos_token_ids: tuple[int, ...] = ()
        self.dtype = ""

    @property
    def healthy(self) -> bool:
        return self._llm is not None and not self._has_failed

    async def start(self) -> None:
        """Raises MissingExtraError without TensorRT-LLM, ConfigError for a release that is too old
        and for arguments that it doesn't have or take, ModelError when it can't load the model."""
        self._read(read_hf_config(self._config.model))
        self._library = await asyncio.to_thread(_import_library)
        try:
            self._llm = await asyncio.to_thread(self._load)
        except (TypeError, ValueError) as error:
            message = f"TensorRT-LLM refuses the configuration: {reason_of(error)}"
            raise ConfigError(message) from error
        except Exception as error:  # its processes may fail of anything
            message = f"TensorRT-LLM can't load {self._config.model}: {reason_of(error)}"
            raise ModelError(message) from error

    async def stop(self) -> None:
        llm, self._llm = self._llm, None
        if llm is not None:
            await asyncio.to_thread(llm.shutdown)

    async def generate(
        self, request: GenerationRequest, request_id: str, prompt_ids: list[int], seed: int
    ) -> AsyncGenerator[TokenBatch, None]:
        params = request.params
        arguments = sampling_arguments(params, seed, self.eos_token_ids, len(prompt_ids))
        rule = None if params.grammar is None else guided_decoding(params.grammar)
        choices = TrtllmChoices(params, self.eos_token_ids, prompt_ids)
        try:
            result = self._llm.generate_async(
                prompt_ids,
                sampling_params=self._sampling_params(params, arguments, rule),
                streaming=True,
                cache_salt=request.cache_salt or None,
                priority=request_priority(request.priority),
            )
            try:
                async for grown in result:
                    yield choices.take(grown)
            finally:
                if not result.finished:
                    result.abort()
        except EngineError:
            raise
        except (self._library.RequestError, TypeError, ValueError) as error:
            raise UserError(f"TensorRT-LLM refuses the request: {reason_of(error)}") from error
        except Exception as error:  # what its processes fail of has no base of its own
            self._has_failed = True
            message = f"TensorRT-LLM failed ({type(error).__name__}): {reason_of(error)}"
            raise EngineError(message) from error

    def _load(self) -> Any:
        library = self._library
        arguments: dict[str, Any] = {
            "guided_decoding_backend": "xgrammar",
            "max_seq_len": self.max_model_len,
            **self._config.arguments,
        }
        for name, kind in (
            ("kv_cache_config", "KvCacheConfig"),
            ("scheduler_config", "SchedulerConfig"),
        ):
            fields = arguments.get(name)
            if isinstance(fields, dict):
                arguments[name] = getattr(library, kind)(**fields)
        return library.LLM(str(self._config.model), **arguments)

    def _read(self, config: HfConfig) -> None:
        nested = config.values.get("text_config")
        if isinstance(nested, dict):
            config = HfConfig(config.path, nested, config.eos_token_ids)
        self.vocab_size = config.integer("vocab_size")
        self.eos_token_ids = config.eos_token_ids
        self.max_model_len = self._length(config)
        dtype = self._config.arguments.get("dtype", "auto")
        stored = config.values.get("dtype") or config.values.get("torch_dtype") or "auto"
        self.dtype = str(stored if dtype == "auto" else dtype)

    def _length(self, config: HfConfig) -> int:
        wanted = self._config.arguments.get("max_seq_len")
        if isinstance(wanted, int):
            return wanted
        name = next((name for name in _LENGTHS if name in config.values), None)
        if name is None:
            raise config.error(
                _LENGTHS[0], "is missing: write option.max_model_len, the longest sequence"
            )
        return config.integer(name)

    def _sampling_params(
        self, params: SamplingParams, arguments: dict[str, Any], rule: dict[str, Any] | None
    ) -> Any:
        if params.logit_bias:
            torch: Any = importlib.import_module("torch")
            bias = torch.zeros(self.vocab_size, dtype=torch.float32)
            for token_id, value in params.logit_bias:
                bias[token_id] += value
            arguments["embedding_bias"] = bias
        if rule is not None:
            arguments["guided_decoding"] = self._library.GuidedDecodingParams(**rule)
        return self._library.SamplingParams(**arguments)


def _import_library() -> Any:
    """``tensorrt_llm.llmapi``, of a release that samples as requests ask."""
    try:
        package = importlib.import_module("tensorrt_llm")
        library = importlib.import_module("tensorrt_llm.llmapi")
    except ImportError as error:
        if error.name is not None and error.name.split(".")[0] != "tensorrt_llm":
            message = f"TensorRT-LLM is installed, but can't be imported: {error}"
            raise EngineError(message) from error
        raise MissingExtraError("serving a model with TensorRT-LLM", "trtllm") from None
    version = str(package.__version__)
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or (int(found[1]), int(found[2])) < _FIRST_RELEASE:
        raise ConfigError(
            f"TensorRT-LLM {version} is installed; 1.3 or newer is needed, as older ones ignore "
            "penalties and bans: pip install 'lmi-core[trtllm]'"
        )
    return library
