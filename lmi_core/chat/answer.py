"""Where answers come from: an engine in this process, or any server with OpenAI's chat route."""

from __future__ import annotations

import http.client
import json
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, Self

from lmi_core.engine.engine import Engine
from lmi_core.engine.outputs import FinishReason
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.errors import EngineError, LmiError, UserError
from lmi_core.http_url import HttpUrl, key_header, refused_key
from lmi_core.progress import TerminalProgress
from lmi_core.text.chat import ChatTemplate

Messages = Sequence[Mapping[str, str]]

_USUAL = SamplingParams()
_MALFORMED = (ValueError, KeyError, TypeError, AttributeError)
"""What comes of reading JSON that has another form."""
_EXTENSIONS = ("top_k", "min_p", "repetition_penalty")
"""Parameters that OpenAI's protocol lacks; sent as open servers name them, where they were set."""


class Piece(NamedTuple):
    """Text that can be shown, and how many tokens of the answer there are by now."""

    text: str
    num_tokens: int
    is_cut_off: bool = False
    """The answer would have gone on."""


class AnswerSource(ABC):
    """Entering makes it ready. Closing the generator of an answer ends it where it is made."""

    @property
    @abstractmethod
    def name(self) -> str: ...

    @abstractmethod
    def answer(self, messages: Messages, params: SamplingParams) -> Generator[Piece, None, None]:
        """Raises LmiError."""

    @abstractmethod
    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        del kind, error, traceback  # nothing to be closed


@dataclass(slots=True)
class LocalSource(AnswerSource):
    """A model of our own engine; entering loads it."""

    engine: Engine
    template: ChatTemplate
    progress: TerminalProgress
    """Whose line is wiped when the model is there."""

    @property
    def name(self) -> str:
        return self.engine.config.served_model_name

    def __enter__(self) -> Self:
        self.engine.__enter__()
        self.progress.finish()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.engine.__exit__(kind, error, traceback)

    def answer(self, messages: Messages, params: SamplingParams) -> Generator[Piece, None, None]:
        prompt = self.template.render(messages)
        events = self.engine.generate_sync(prompt, params, add_special_tokens=False)
        with closing(events):
            for event in events:
                is_cut_off = event.finish_reason is FinishReason.LENGTH
                yield Piece(event.text, event.num_generated_tokens, is_cut_off)


@dataclass(slots=True)
class RemoteSource(AnswerSource):
    """A server; the key is that of ``OPENAI_API_KEY`` where there is one."""

    url: HttpUrl
    model: str = ""
    timeout_s: float = 600.0

    @property
    def name(self) -> str:
        return self.model or str(self.url)

    def __enter__(self) -> Self:
        if not self.model:
            self.model = self._first_model()
        return self

    def _first_model(self) -> str:
        """Of those that the server lists; empty: none."""
        with closing(self.ask("GET", "/v1/models")) as answer:
            try:
                models = json.load(answer)["data"]
                return str(models[0]["id"]) if models else ""
            except (OSError, http.client.HTTPException, *_MALFORMED) as error:
                raise UserError(
                    f"{self.url}/v1/models isn't answered as OpenAI's servers do: {error}",
                    field="--url",
                ) from None

    def answer(self, messages: Messages, params: SamplingParams) -> Generator[Piece, None, None]:
        body = {
            "model": self.model,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": params.temperature,
            "top_p": params.top_p,
            **({"max_tokens": params.max_new_tokens} if params.max_new_tokens else {}),
            **({"seed": params.seed} if params.seed is not None else {}),
            **{
                name: getattr(params, name)
                for name in _EXTENSIONS
                if getattr(params, name) != getattr(_USUAL, name)
            },
        }
        with closing(self.ask("POST", "/v1/chat/completions", body)) as lines:
            yield from self._pieces(lines)

    def _pieces(self, lines: http.client.HTTPResponse) -> Generator[Piece, None, None]:
        """Raises EngineError for a stream of another form, or that isn't ended as one is."""
        is_ended, num_tokens = False, 0
        try:
            for line in lines:
                data = line.removeprefix(b"data:").strip()
                if data == line.strip() or data == b"[DONE]":
                    is_ended |= data == b"[DONE]"
                    continue
                frame = json.loads(data)
                if "error" in frame:
                    raise EngineError(_message(frame))
                choices = frame.get("choices") or ()
                text = "".join((c.get("delta") or {}).get("content") or "" for c in choices)
                ends = [c["finish_reason"] for c in choices if c.get("finish_reason")]
                is_ended |= bool(ends)  # not every server says that it is done
                counted = (frame.get("usage") or {}).get("completion_tokens")
                num_tokens = counted or num_tokens + bool(text)
                yield Piece(text, num_tokens, "length" in ends)
        except (OSError, http.client.HTTPException, *_MALFORMED) as error:
            raise EngineError(f"{self.url} broke off its answer: {error}") from None
        if not is_ended:
            raise EngineError(f"{self.url} broke off its answer")

    def ask(self, method: str, path: str, body: object = None) -> http.client.HTTPResponse:
        """The answer, to be closed. Raises LmiError for a server that refuses, or isn't there."""
        kind = http.client.HTTPSConnection if self.url.is_https else http.client.HTTPConnection
        connection = kind(self.url.host, self.url.port, timeout=self.timeout_s)
        headers = {"Content-Type": "application/json", "Connection": "close", **key_header()}
        data = None if body is None else json.dumps(body)
        try:
            connection.request(method, self.url.path + path, data, headers)
            answer = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise UserError(f"{self.url} can't be reached: {error}", field="--url") from None
        if answer.status != 200:
            with closing(answer):
                raise _refusal(answer, f"{self.url}{path}")
        return answer


def _refusal(answer: http.client.HTTPResponse, url: str) -> LmiError:
    if answer.status == 401:
        return refused_key(url)
    text = answer.read(10_000).decode(errors="replace")
    try:
        text = _message(json.loads(text))
    except ValueError:
        text = text[:200]
    kind = UserError if answer.status < 500 else EngineError
    return kind(f"{url} answered {answer.status}: {text}")


def _message(answer: Any) -> str:
    """What a server's error object says, in any of the protocols' forms."""
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    if isinstance(error, dict):
        error = error.get("message", error)
    return str(error)
