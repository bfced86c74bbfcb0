"""Calls of a custom input formatter: a request in, the body that the model understands out."""

from __future__ import annotations

import importlib
import inspect
import json
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any

from lmi_core.custom_code.frame import Frame

Write = Callable[..., None]


class InputFormatter:
    """Calls the function once per request and keeps what it returned until the request ends.

    It takes the ``Input`` and returns a ``RequestInput``, or takes the decoded body and returns
    the body to go on with. ``configs`` and ``tokenizer`` are given to a function that has a place
    for them.
    """

    def __init__(
        self,
        djl: ModuleType,
        function: Callable[..., Any],
        write: Write,
        properties: dict[str, str],
    ) -> None:
        self._djl = djl
        self._decode = importlib.import_module(f"{djl.__name__}.encode_decode").decode
        self._function = function
        self._write = write
        self._takes_body = _takes_body(function)
        self._extra = _accepted(function, {"configs": properties, "tokenizer": None})
        self._kept: dict[int, Any] = {}

    def answer(self, frame: Frame) -> None:
        """Call the function with a frame's request and write the body that comes of it."""
        number = frame.head["id"]
        content = self._djl.inputs.PairList(zip(frame.head["keys"], frame.blobs, strict=True))
        inputs = self._djl.Input(frame.head["properties"], content)
        try:
            given = inputs
            if self._takes_body:
                given = self._decode(inputs, inputs.get_property("content-type"))
            result = self._function(given, **self._extra)
            body = json.dumps(_body(result), ensure_ascii=False).encode()
        except Exception as error:
            traceback.print_exc()
            text = str(error) or type(error).__name__
            self._write({"kind": "failed", "id": number, "error": text})
            return
        self._kept[number] = result
        self._write({"kind": "body", "id": number}, body)

    def kept(self, number: int | None) -> Any:
        """The ``RequestInput`` that the function returned for a request, or None."""
        result = None if number is None else self._kept.get(number)
        return None if isinstance(result, dict) else result

    def forget(self, number: int) -> None:
        """Drop a request that has ended."""
        self._kept.pop(number, None)


def _takes_body(function: Callable[..., Any]) -> bool:
    """Whether the first parameter is said to be a dict, by its annotation or its usual name."""
    first = next(iter(inspect.signature(function).parameters.values()), None)
    if first is None:
        raise TypeError("an input formatter takes the Input; this one takes nothing")
    annotation = first.annotation
    if annotation is first.empty:
        return first.name == "decoded_payload"
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    return text.rpartition(".")[2].lower().startswith("dict")


def _accepted(function: Callable[..., Any], extra: dict[str, Any]) -> dict[str, Any]:
    """Those of the arguments that the function can be given by name."""
    parameters = inspect.signature(function).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return extra
    return {name: value for name, value in extra.items() if name in list(parameters)[1:]}


def _body(result: Any) -> dict[str, Any]:
    """A result as a body of LMI's; by its parts, since an installed package has its own classes."""
    if isinstance(result, dict):
        return result
    if not hasattr(result, "input_text") or not isinstance(result.parameters, dict):
        raise TypeError(f"it must return a TextInput or a dict, and returned {type(result)}")
    if getattr(result, "input_ids", None):
        raise ValueError("input_ids can't be used; set input_text")
    parameters = dict(result.parameters)
    body = {"inputs": result.input_text, "parameters": parameters}
    if "stream" in parameters:
        body["stream"] = parameters.pop("stream")
    name = getattr(result, "output_formatter", None)
    if isinstance(name, str):
        parameters.setdefault("output_formatter", name)
    if getattr(result, "adapters", None):
        body["adapters"] = result.adapters
    return body
