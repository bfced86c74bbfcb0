"""``/invocations`` of a model that pools: DJL-Serving's bodies of text embedding, and those of
cross encoders."""

from __future__ import annotations

import msgspec

from lmi_core.engine.pooling_params import PoolingParams
from lmi_core.errors import UserError
from lmi_server.dialects.base import Call, ParsedCall
from lmi_server.dialects.decode import decode_json
from lmi_server.dialects.pooling import (
    Inputs,
    VectorListRenderer,
    check_number,
    embedding_requests,
    inputs_of,
    pair_requests,
)
from lmi_server.dialects.unknown_fields import report_fields, shape


class PairParameters(msgspec.Struct, frozen=True, kw_only=True):
    """``truncate``: inputs that are too long lose their last tokens."""

    truncate: bool | None = None
    max_queue_s: float | None = None


class EmbeddingParameters(PairParameters, frozen=True, kw_only=True):
    normalize: bool | None = None
    dimensions: int | None = None
    prompt_name: str | None = None


class EmbeddingBody(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to one text is its vector, to a list one of vectors."""

    inputs: Inputs
    parameters: EmbeddingParameters = EmbeddingParameters()


class PairBody(msgspec.Struct, frozen=True, kw_only=True):
    """A query with the texts that go with it, or a pair of texts; also a list of pairs."""

    query: str | None = None
    texts: list[str] | None = None
    text: str | None = None
    text_pair: str | None = None
    key: str | None = None
    value: str | None = None
    parameters: PairParameters = PairParameters()

    @property
    def pair(self) -> tuple[str, str]:
        first = self.key if self.text is None else self.text
        second = self.value if self.text_pair is None else self.text_pair
        if first is None or second is None:
            raise UserError("Missing text or text_pair in json", field="text_pair")
        return first, second


_EMBEDDING = msgspec.json.Decoder(EmbeddingBody)
_PAIRS = msgspec.json.Decoder(PairBody | list[PairBody])


def parse_embedding(call: Call) -> ParsedCall:
    body = decode_json(_EMBEDDING, call.body)
    inputs = inputs_of(body.inputs, "inputs")
    asked = body.parameters
    params = PoolingParams(
        normalize=asked.normalize,
        dimensions=asked.dimensions,
        prompt_name=asked.prompt_name,
        truncate="right" if asked.truncate else "",
    )
    single = isinstance(body.inputs, str) or isinstance(body.inputs[0], int)
    requests = embedding_requests(call.request_id, inputs, params, max_queue_s=asked.max_queue_s)
    renderer = VectorListRenderer(len(inputs), single=single)
    renderer.headers = _unknown(call, body)
    return ParsedCall(requests=requests, renderer=renderer, prompt_field="inputs")


def parse_pairs(call: Call) -> ParsedCall:
    body = decode_json(_PAIRS, call.body)
    single, asked, headers = False, PairParameters(), {}
    if isinstance(body, list):
        pairs = [each.pair for each in body]
    elif body.query is not None:
        if body.texts is None:
            raise UserError("Missing texts in json", field="texts")
        pairs = [(body.query, text) for text in body.texts]
    else:
        pairs, single = [body.pair], True
    if isinstance(body, PairBody):
        asked, headers = body.parameters, _unknown(call, body)
    check_number(len(pairs), "texts")
    params = PoolingParams(truncate="right" if asked.truncate else "")
    requests = pair_requests(call.request_id, pairs, params, max_queue_s=asked.max_queue_s)
    renderer = VectorListRenderer(len(pairs), single=single)
    renderer.headers = headers
    return ParsedCall(requests=requests, renderer=renderer, prompt_field="texts")


def _unknown(call: Call, body: EmbeddingBody | PairBody) -> dict[str, str]:
    within = shape(parameters=shape(*body.parameters.__struct_fields__))
    return report_fields(call, body.__struct_fields__, within)
