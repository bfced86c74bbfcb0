"""What the routes for embeddings and scores have in common: their calls and the collected results.

A vector is written when it comes, so that an answer with many of them is only joined at the end.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import msgspec
import numpy as np

from lmi_core.engine.outputs import TokenEvent
from lmi_core.engine.pooling_params import PoolingParams
from lmi_core.engine.request import GenerationRequest
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.errors import EngineError, UserError
from lmi_core.models.pooling import PoolingSpec
from lmi_core.weights.formats import FloatArray
from lmi_server.dialects.base import Renderer
from lmi_server.models.stand_in import DecodingModel

Input = str | list[int]
Inputs = str | list[str | int | list[int]]
"""A text, token ids, or a list of texts or of token ids."""
Format = Literal["float", "base64"]
MAX_INPUTS = 2048
"""Of one call, as OpenAI has it."""


def pooling_of(model: DecodingModel) -> PoolingSpec | None:
    """What the model's prompts are pooled to; None: it generates."""
    return model.info.runner.pooling


def inputs_of(value: Inputs, name: str) -> list[Input]:
    """The inputs of a body, one by one; UserError naming the one at fault."""
    if isinstance(value, str):
        return [value]
    check_number(len(value), name)
    if all(isinstance(item, int) for item in value):
        return [[item for item in value if isinstance(item, int)]]
    inputs: list[Input] = []
    for i, item in enumerate(value):
        if isinstance(item, int) or type(item) is not type(value[0]):
            raise UserError(
                f"{name} must be a text, token ids, or a list of either; found both at {name}[{i}]",
                field=name,
            )
        inputs.append(item)
    return inputs


def check_number(number: int, name: str) -> None:
    """Raise UserError for no inputs, or too many of them."""
    if not number:
        raise EmptyInputError(f"{name} must not be empty", field=name)
    if number > MAX_INPUTS:
        raise UserError(
            f"{name} has {number} entries; at most {MAX_INPUTS} may be sent", field=name
        )


_NO_SAMPLING = SamplingParams()
"""Of each of thousands of inputs: making these anew took most of what a call of them did."""


class EmptyInputError(UserError):
    """Nothing was sent."""


def embedding_requests(
    request_id: str,
    inputs: Sequence[Input],
    params: PoolingParams,
    adapter: str = "",
    *,
    max_queue_s: float | None = None,
) -> tuple[GenerationRequest, ...]:
    return tuple(
        GenerationRequest(
            request_id=f"{request_id}-{i}",
            prompt=each if isinstance(each, str) else None,
            prompt_token_ids=None if isinstance(each, str) else tuple(each),
            params=_NO_SAMPLING,
            adapter=adapter,
            max_queue_s=max_queue_s,
            pooling=params,
        )
        for i, each in enumerate(inputs)
    )


def pair_requests(
    request_id: str,
    pairs: Sequence[tuple[str, str]],
    params: PoolingParams,
    adapter: str = "",
    *,
    max_queue_s: float | None = None,
) -> tuple[GenerationRequest, ...]:
    """To score pairs of texts, a query and a document each."""
    return tuple(
        GenerationRequest(
            request_id=f"{request_id}-{i}",
            prompt=query,
            params=_NO_SAMPLING,
            adapter=adapter,
            max_queue_s=max_queue_s,
            pooling=replace(params, text_pair=document),
        )
        for i, (query, document) in enumerate(pairs)
    )


def written(vector: FloatArray, format: Format = "float") -> bytes:
    """A vector [n] as JSON: an array of numbers, or a string of little-endian fp32."""
    if format == "float":
        return msgspec.json.encode(vector.tolist())
    data = base64.b64encode(vector.astype("<f4", copy=False).tobytes())
    return b'"' + data + b'"'


class PooledRenderer(Renderer):
    """Collects what a call's inputs are pooled to."""

    streams = False
    content_type = "application/json"

    def __init__(self, num_inputs: int) -> None:
        self.num_tokens = 0
        self._results: list[bytes | float | None] = [None] * num_inputs

    def feed(self, index: int, events: Sequence[TokenEvent]) -> bytes:
        for event in events:
            if event.pooled is None:
                raise EngineError("the request was aborted")
            self.num_tokens += event.num_prompt_tokens
            self._results[index] = self.result(event.pooled)
        return b""

    def result(self, pooled: FloatArray) -> bytes | float:
        """What is kept of an input's vector; by itself its score."""
        return float(pooled[0])

    @property
    def parts(self) -> list[bytes]:
        """The written vectors, in the order of inputs."""
        return [part for part in self._results if isinstance(part, bytes)]

    @property
    def scores(self) -> list[float]:
        return [score for score in self._results if isinstance(score, float)]

    @property
    def ranking(self) -> list[tuple[int, float]]:
        """Numbers of documents and their scores, best first, equal ones in the order of sending."""
        scores = np.array(self.scores)
        return [(int(i), self.scores[i]) for i in np.argsort(-scores, kind="stable")]

    def error(self, error: Exception) -> bytes:
        raise error


class VectorListRenderer(PooledRenderer):
    """A JSON array of vectors, or, ``single``, the one vector by itself."""

    def __init__(self, num_inputs: int, *, single: bool = False) -> None:
        super().__init__(num_inputs)
        self._single = single

    def result(self, pooled: FloatArray) -> bytes:
        return written(pooled)

    def finish(self) -> bytes:
        return self.parts[0] if self._single else b"[" + b",".join(self.parts) + b"]"
