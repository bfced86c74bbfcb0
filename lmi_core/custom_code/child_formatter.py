"""Calls of a custom output formatter: tokens in, the text to send out."""

from __future__ import annotations

import importlib
import inspect
import json
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any

from lmi_core.custom_code.child_input import InputFormatter
from lmi_core.custom_code.frame import Frame

Write = Callable[..., None]


class Formatter:
    """Keeps the output of every stream and calls the function once per token.

    It takes a ``RequestOutput``, or in its older forms (token, first_token, last_token, details,
    generated_text[, id]).
    """

    def __init__(
        self,
        djl: ModuleType,
        function: Callable[..., Any],
        write: Write,
        reader: InputFormatter | None = None,
    ) -> None:
        """``reader`` has what the model's input formatter returned."""
        self._io = importlib.import_module(f"{djl.__name__}.request_io")
        self._function = function
        self._write = write
        self._reader = reader
        self._num_arguments = _num_arguments(function)
        self._outputs: dict[int, Any] = {}

    def answer(self, frame: Frame) -> None:
        """Format a frame's tokens and write the text."""
        head = frame.head
        stream_id = head["stream"]
        pieces: list[bytes] = []
        try:
            output = self._outputs.get(stream_id)
            if output is None:
                output = self._outputs[stream_id] = self._new_output(stream_id, head["input"])
            for token in head["tokens"]:
                pieces.append(self._format(output, token))
        except Exception as error:
            traceback.print_exc()
            self.forget(stream_id)
            failed = {"kind": "failed", "id": head["id"], "error": str(error)}
            self._write(failed, b"".join(pieces))
            return
        if output.finished:
            self.forget(stream_id)
        self._write({"kind": "text", "id": head["id"]}, b"".join(pieces))

    def forget(self, stream_id: int) -> None:
        """Drop a stream that won't go on."""
        self._outputs.pop(stream_id, None)

    def _new_output(self, stream_id: int, given: dict[str, Any]) -> Any:
        asked = None if self._reader is None else self._reader.kept(given["input"])
        if asked is None:
            asked = self._io.TextInput(input_text=given["text"], parameters=given["parameters"])
        asked.request_id, asked.output_formatter = stream_id, self._function
        return self._io.TextGenerationOutput(
            request_id=stream_id, input=asked, sequences={0: self._io.Sequence()}
        )

    def _format(self, output: Any, token: dict[str, Any]) -> bytes:
        sequence = output.sequences[0]
        sequence.tokens.append(self._token(token))
        if token["top"]:
            sequence.top_tokens.append([self._token(top) for top in token["top"]])
        sequence.cumulative_log_prob += token["log_prob"] or 0.0
        sequence.finish_reason = token["finish_reason"]
        output.finished = token["finish_reason"] is not None
        if self._num_arguments == 1:
            return _as_bytes(self._function(output))
        return _as_bytes(self._function(*self._older_arguments(output)))

    def _token(self, token: dict[str, Any]) -> Any:
        special = True if token.get("special") else None
        return self._io.Token(token["id"], token["text"], token["log_prob"], special)

    def _older_arguments(self, output: Any) -> list[Any]:
        sequence = output.sequences[0]
        token, is_first, is_last = sequence.get_next_token()
        details: dict[str, Any] = {}
        if output.input.parameters.get("details"):
            details = {"finish_reason": sequence.finish_reason} if is_last else details
            details["generated_tokens"] = len(sequence.tokens)
            details["inputs"] = output.input.input_text
            details["tokens"] = [each.as_dict() for each in sequence.tokens]
        text = "".join(each.text for each in sequence.tokens)
        arguments = [token, is_first, is_last, details, text, output.request_id]
        return arguments[: self._num_arguments]


def _num_arguments(function: Callable[..., Any]) -> int:
    """1 for a function of the output, 5 or 6 for the older forms; TypeError for others."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    positional = [parameter for parameter in parameters if parameter.kind in kinds]
    num_required = sum(parameter.default is parameter.empty for parameter in positional)
    if num_required <= 1 <= len(positional):
        return 1
    for num_arguments in (6, 5):
        if num_required <= num_arguments <= len(positional):
            return num_arguments
    raise TypeError(
        f"an output formatter takes the RequestOutput, or (token, first_token, last_token, "
        f"details, generated_text, id); this one takes {num_required} arguments"
    )


def _as_bytes(result: Any) -> bytes:
    if result is None:
        return b""
    if isinstance(result, bytes):
        return result
    if isinstance(result, dict):
        result = json.dumps(result, ensure_ascii=False) + "\n"
    return str(result).encode("utf-8", "replace")
