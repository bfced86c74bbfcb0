"""The TGI protocol: what a call to text-generation-inference asks of the engine.

Calls are decoded at once, but checked in two steps with the server's own admission between them,
and the second one needs the tokenizer; so this isn't a ``Protocol``: its dialect drives it.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType

from lmi_core.engine.request import GenerationRequest
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.engine.stats import EngineInfo
from lmi_core.text.tokenizer import Tokenizer
from lmi_server.protocols.base import HttpError, Plan, Renderer
from lmi_server.protocols.tgi_events import Answer, JsonRenderer, SseRenderer, Timing
from lmi_server.protocols.tgi_options import TgiOptions
from lmi_server.protocols.tgi_schema import (
    CompatBody,
    GenerateBody,
    GenerateParameters,
    body_decoder,
)
from lmi_server.protocols.tgi_validation import (
    Limits,
    Prompt,
    check_best_of,
    check_inputs,
    check_lengths,
    check_parameters,
    refuse_unavailable,
)

log = logging.getLogger(__name__)

_decode_generate = body_decoder(GenerateBody)
_decode_compat = body_decoder(CompatBody)


class Model(Protocol):
    """What checking a call needs of an engine."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def tokenizer(self) -> Tokenizer: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A decoded call."""

    inputs: str
    parameters: GenerateParameters
    streams: bool
    as_list: bool = False
    add_special_tokens: bool = True


def check_content_type(content_type: str) -> None:
    """HttpError 415 unless it is JSON."""
    kind = content_type.partition(";")[0].strip().lower()
    is_suffixed = kind.startswith("application/") and kind.endswith("+json")
    if kind != "application/json" and not is_suffixed:
        raise HttpError(
            415,
            "UnsupportedMediaType",
            "Expected request with `Content-Type: application/json`",
        )


def decode_generate(body: bytes, *, streams: bool) -> Generation:
    """A body of ``/generate`` or ``/generate_stream``; HttpError when its shape is wrong."""
    decoded = _decode_generate(body)
    parameters = _parameters(decoded.parameters)
    return Generation(inputs=decoded.inputs, parameters=parameters, streams=streams)


def decode_compat(body: bytes) -> Generation:
    """A body of ``/``."""
    return compat_generation(_decode_compat(body))


def compat_generation(body: CompatBody) -> Generation:
    """``/`` puts the prompt in front of the text unless told otherwise."""
    parameters = _parameters(body.parameters)
    if parameters.return_full_text is None:
        parameters = msgspec.structs.replace(parameters, return_full_text=True)
    return Generation(
        inputs=body.inputs, parameters=parameters, streams=body.stream, as_list=not body.stream
    )


class TgiProtocol:
    """Holds configuration only and serves any number of calls."""

    def __init__(self, options: TgiOptions, model: Model) -> None:
        """``model`` is asked when a call comes, not before."""
        self.options = options
        self._model = model

    @property
    def limits(self) -> Limits:
        info = self._model.info
        max_input = self.options.max_input_tokens or info.max_prompt_tokens
        return Limits(
            max_input=min(max_input, info.max_prompt_tokens), max_total=info.max_total_tokens
        )

    def num_sequences(self, generation: Generation) -> int:
        """The checks that come before admission; how many sequences the call runs."""
        return check_best_of(generation.parameters, self.options, streams=generation.streams)

    async def plan(self, generation: Generation, *, request_id: str, started_s: float) -> Plan:
        """The remaining checks, and what to run; UserError names the parameter at fault.

        ``started_s``: when the call came, by ``time.perf_counter``.
        """
        prompt = await self._check(generation)
        timing = Timing(started_s=started_s, validated_s=time.perf_counter())
        answer = self._answer(generation, prompt, timing)
        renderer: Renderer = SseRenderer(answer) if generation.streams else JsonRenderer(answer)
        params = _sampling_params(generation, answer)
        if generation.parameters.adapter_id is not None:
            log.warning("request %s: adapter_id is ignored, there are no adapters", request_id)
        return Plan(
            requests=tuple(
                GenerationRequest(
                    request_id=request_id if not i else f"{request_id}-{i}",
                    prompt_token_ids=prompt.token_ids,
                    params=params,
                    echo=answer.prefill,
                )
                for i in range(answer.num_sequences)
            ),
            renderer=renderer,
            headers=self.headers(generation),
        )

    def headers(self, generation: Generation) -> dict[str, str]:
        """Response headers that are known from the start."""
        headers = {
            "x-compute-type": self.options.compute_type,
            "x-compute-characters": str(len(generation.inputs)),
        }
        if generation.streams:
            headers |= {"cache-control": "no-cache", "x-accel-buffering": "no"}
        return headers

    async def _check(self, generation: Generation) -> Prompt:
        parameters, limits = generation.parameters, self.limits
        check_parameters(parameters, self.options)
        check_inputs(generation.inputs, parameters, limits)
        token_ids = await self._model.tokenizer.encode(
            generation.inputs, add_special_tokens=generation.add_special_tokens
        )
        prompt = check_lengths(token_ids, parameters, limits, self.options.version)
        refuse_unavailable(parameters)
        return prompt

    def _answer(self, generation: Generation, prompt: Prompt, timing: Timing) -> Answer:
        parameters, options = generation.parameters, self.options
        details = parameters.details or (
            parameters.decoder_input_details and not generation.streams
        )
        return Answer(
            tokenizer=self._model.tokenizer,
            timing=timing,
            max_new_tokens=prompt.max_new_tokens,
            num_prompt_tokens=len(prompt.token_ids),
            prefix=generation.inputs if parameters.return_full_text else "",
            details=details,
            prefill=parameters.decoder_input_details
            and (options.version < 3 or options.enable_prefill_logprobs),
            top_tokens=bool(parameters.top_n_tokens) and (details or generation.streams),
            num_sequences=max(1, parameters.best_of or 1),
            as_list=generation.as_list,
            version=options.version,
        )


def _parameters(given: GenerateParameters | UnsetType) -> GenerateParameters:
    """Without any parameters the text is sampled; with some, only if they say so."""
    return GenerateParameters(do_sample=True) if given is UNSET else given


def _sampling_params(generation: Generation, answer: Answer) -> SamplingParams:
    p = generation.parameters
    temperature = 1.0 if p.temperature is None else p.temperature
    samples = p.do_sample or temperature != 1.0 or p.top_k is not None or p.top_p is not None
    shows_tokens = answer.details or generation.streams or answer.num_sequences > 1
    top = (p.top_n_tokens or 0) if answer.top_tokens else 0
    return SamplingParams(
        max_new_tokens=answer.max_new_tokens,
        temperature=temperature if samples else 0.0,
        top_k=p.top_k or 0,
        top_p=1.0 if p.top_p is None else p.top_p,
        repetition_penalty=1.0 if p.repetition_penalty is None else p.repetition_penalty,
        frequency_penalty=p.frequency_penalty or 0.0,
        seed=p.seed if samples else None,
        stop=tuple(p.stop),
        include_stop=True,
        logprobs=top if shows_tokens else None,
        prompt_logprobs=0 if answer.prefill else None,
    )
