"""The request schema of TGI, with errors in its HTTP library's words (router/src/lib.rs)."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from lmi_core.errors import UserError
from lmi_server.dialects.base import HttpError
from lmi_server.dialects.decode import check_depth, malformed_reason
from lmi_server.dialects.grammar_fields import RESPONSE_FORMAT
from lmi_server.dialects.tgi.grammar import check_shape
from lmi_server.dialects.unknown_fields import log_ignored, shape, unknown_fields

T = TypeVar("T")

U32 = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
U64 = Annotated[int, msgspec.Meta(ge=0)]
"""``check_u64`` checks the upper bound, which the schema library can't express."""
I32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]

_TYPE_NAMES = {
    "str": "string",
    "int": "integer",
    "float": "floating point",
    "bool": "boolean",
    "array": "sequence",
    "object": "map",
}
_PATH = re.compile(r"^(?P<reason>.*?)(?: - at `\$\.?(?P<path>.*)`)?$", re.DOTALL)
_WRONG_TYPE = re.compile(r"^Expected `(?P<expected>[^`]*)`, got `(?P<got>[^`]*)`$")
_MISSING = re.compile(r"^Object missing required field `(?P<name>[^`]*)`$")


class GenerateParameters(msgspec.Struct, frozen=True, kw_only=True):
    """Null is allowed where the type says so and nowhere else; unknown fields are ignored."""

    best_of: U64 | None = None
    temperature: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    top_k: I32 | None = None
    top_p: float | None = None
    typical_p: float | None = None
    do_sample: bool = False
    max_new_tokens: U32 | UnsetType | None = UNSET
    """Null: as many as fit; absent: what the release says."""
    return_full_text: bool | None = None
    stop: list[str] = []
    truncate: U64 | None = None
    watermark: bool = False
    details: bool = False
    decoder_input_details: bool = False
    seed: U64 | None = None
    top_n_tokens: U32 | None = None
    grammar: dict[str, Any] | None = None
    adapter_id: str | None = None
    max_queue_s: float | None = None
    min_new_tokens: U32 = 0
    no_repeat_ngram_size: U32 = 0
    bad_words: list[str] = []
    logit_bias: dict[str, float] = {}
    """These five are ours: TGI has no such parameters."""

    def __post_init__(self) -> None:
        check_u64(best_of=self.best_of, truncate=self.truncate, seed=self.seed)
        check_shape(self.grammar)


_WITHIN = shape(
    parameters=shape(*GenerateParameters.__struct_fields__, grammar=shape("type", "value")),
    response_format=shape("value", **RESPONSE_FORMAT),
    stream_options=shape("include_usage", "include_obfuscation"),
    tool_choice=shape("type", function=shape("name", "arguments")),
)
"""What the objects in a body may have."""


class GenerateBody(msgspec.Struct, frozen=True):
    """Of ``/generate`` and ``/generate_stream``, which ignore a field ``stream``."""

    inputs: str
    parameters: GenerateParameters | UnsetType = UNSET


class CompatBody(msgspec.Struct, frozen=True):
    """Of ``/``, whose field ``stream`` chooses between the two."""

    inputs: str
    parameters: GenerateParameters | UnsetType = UNSET
    stream: bool = False


def body_decoder(kind: type[T]) -> Callable[[bytes], T]:
    """A function from a body to a struct; HttpError 400 for bad JSON, 422 for a wrong shape."""
    decoder = msgspec.json.Decoder(kind)

    def decode(body: bytes) -> T:
        try:
            check_depth(body)
            decoded = decoder.decode(body)
            log_unknown(body, decoded)
        except msgspec.ValidationError as error:
            raise wrong_shape(_reason(str(error))) from None
        except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
            raise _malformed(error, body) from None
        _refuse_duplicates(body, decoded)
        return decoded

    return decode


def log_unknown(body: bytes, decoded: object) -> None:
    """Name fields that TGI's own server would drop without a word."""
    known = ("stream", *getattr(decoded, "__struct_fields__", ()))
    try:
        names = unknown_fields(body, known, _WITHIN)
    except UserError:
        body.decode()  # its own error says it in TGI's way
        raise
    log_ignored("a request's", names)


def _refuse_duplicates(body: bytes, decoded: object) -> None:
    """TGI takes no field twice; the schema library would take the last."""
    for struct in (decoded, getattr(decoded, "parameters", UNSET)):
        names = getattr(struct, "__struct_fields__", ())
        if any(body.count(b'"%s"' % name.encode()) > 1 for name in names):
            break
    else:
        return
    try:
        top = json.loads(body, object_pairs_hook=list, parse_int=len, strict=False)
    except ValueError:  # the schema library skips the field that has it
        return
    _refuse_duplicate_of(decoded, top)
    parameters = dict(top).get("parameters")
    if parameters is not None and hasattr(decoded, "parameters"):
        _refuse_duplicate_of(decoded.parameters, parameters, path="parameters: ")


def _refuse_duplicate_of(struct: object, pairs: list[tuple[str, object]], path: str = "") -> None:
    fields = getattr(struct, "__struct_fields__", ())
    counts = Counter(name for name, _ in pairs if name in fields)
    for name, count in counts.items():
        if count > 1:
            raise wrong_shape(f"{path}duplicate field `{name}`")


def decode_any(body: bytes) -> Any:
    """JSON of any shape; HttpError 400 when it isn't JSON."""
    try:
        check_depth(body)
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise _malformed(error, body) from None


def wrong_shape(reason: str) -> HttpError:
    """The error for JSON that isn't what a route takes."""
    return HttpError(
        422,
        "UnprocessableEntity",
        f"Failed to deserialize the JSON body into the target type: {reason}",
    )


def check_u64(**values: int | None) -> None:
    for name, value in values.items():
        if value is not None and value >= 2**64:
            raise ValueError(f"invalid value of `{name}`: integer `{value}`, expected u64")


def _malformed(error: Exception, body: bytes) -> HttpError:
    is_deep = isinstance(error, RecursionError)
    reason = "recursion limit exceeded" if is_deep else malformed_reason(error, body)
    return HttpError(400, "BadRequest", f"Failed to parse the request body as JSON: {reason}")


def _reason(text: str) -> str:
    """``path: reason`` in the words of the JSON library that TGI uses."""
    match = _PATH.match(text)
    reason, path = (match["reason"], match["path"] or "") if match else (text, "")
    if wrong_type := _WRONG_TYPE.match(reason):
        expected = " or ".join(_type_name(name) for name in wrong_type["expected"].split(" | "))
        reason = f"invalid type: {_type_name(wrong_type['got'])}, expected {expected}"
    elif missing := _MISSING.match(reason):
        reason = f"missing field `{missing['name']}`"
    return f"{path}: {reason}" if path else reason


def _type_name(name: str) -> str:
    return _TYPE_NAMES.get(name, name)
