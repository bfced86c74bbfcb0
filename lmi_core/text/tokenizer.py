"""A model directory's tokenizer: text to ids off the event loop, ids to text piece by piece."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers

from lmi_core.errors import ModelError, UserError
from lmi_core.files import check_readable, read_json
from lmi_core.sandbox.pool import Limits, shared_pool
from lmi_core.text.added_tokens import AddedTokens
from lmi_core.text.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from lmi_core.text.framed_text import FramedText, Truncate, WholeText, kept_places
from lmi_core.text.older_tokenizer import OLDER_FILES, has_older_tokenizer, older_tokenizer
from lmi_core.text.prompt_errors import not_unicode, prompt_too_long
from lmi_core.text.shortest_encoding import max_token_chars
from lmi_core.text.token_bytes import TokenBytes, byte_rule

_FilesState = tuple[tuple[str, int, int, int], ...]
_INLINE_CHARS = 2048
"""Longer texts go to a thread, without the GIL: this many cost under half a millisecond."""
_THREAD_CHARS = 256 * 1024
"""Longer ones go to a child, whose time and memory are bounded: a character takes up to 150 bytes
while it is encoded."""
_BYTES_PER_CHAR = 192
MAX_SPAN_CHARS = _THREAD_CHARS
_MAX_MEMORY_BYTES = 4 << 30
_MAX_RESULT_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """A token and the characters of the text that it stands for; none for added tokens."""

    token_id: int
    start: int
    stop: int


class Tokenizer:
    """Wraps ``tokenizer.json`` and ``tokenizer_config.json`` of a model directory."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        config: Mapping[str, Any],
        directory: Path | None = None,
    ) -> None:
        """``config``: the content of tokenizer_config.json, possibly empty. ``directory``: where
        both were read, from which a child reads them again.

        Raises ModelError when it adds a token that there isn't.
        """
        self._backend = backend
        self._backend.no_truncation()
        self._backend.no_padding()
        self.config = config
        self.directory = directory
        self._files: _FilesState | None = None
        """Of ``directory``, when they were read."""
        added = backend.get_added_tokens_decoder()
        self.special_tokens = {token.content: i for i, token in added.items() if token.special}
        self.special_ids = frozenset(self.special_tokens.values())
        self._added = AddedTokens(config, self.token_id)
        decoder = backend.decoder
        rule = byte_rule(None if decoder is None else json.loads(decoder.__getstate__()))
        self._token_bytes = rule and TokenBytes(backend.id_to_token, rule)
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="lmi-encode")
        self._max_token_chars: int | None = None
        self._knows_max = False

    def __reduce__(self) -> tuple[Any, ...]:
        """For children, which keep the tokenizers that they have read."""
        if self.directory is not None and self._files == _files_state(self.directory):
            return _read_tokenizer, (str(self.directory), self._files)
        return _made_tokenizer, (self._backend.to_str(), json.dumps(dict(self.config)))

    @classmethod
    def load(cls, directory: Path, *, vocab_size: int | None = None) -> Tokenizer:
        """Read a model directory's tokenizer; ``vocab_size`` counts the model's embeddings.

        Raises ModelError when files are missing or malformed, or ids don't fit the vocabulary.
        """
        files = _files_state(directory)
        config = read_json(directory / "tokenizer_config.json")
        path = directory / "tokenizer.json"
        content = None
        if not path.exists():
            if not has_older_tokenizer(directory):
                raise ModelError(_missing_tokenizer(directory), field="tokenizer.json")
            content, config = older_tokenizer(directory, config)
        else:
            check_readable(path)
        try:
            if content is None:
                backend = tokenizers.Tokenizer.from_file(str(path))
            else:
                backend = tokenizers.Tokenizer.from_str(content)
        except Exception as error:  # the library raises nothing more specific
            raise ModelError(
                f"{path} is not a tokenizer: {error}", field="tokenizer.json"
            ) from None
        if vocab_size is not None:
            largest = max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
            if largest >= vocab_size:
                raise ModelError(
                    f"{path} has token ids up to {largest}, but the model's vocabulary has "
                    f"{vocab_size} entries: the tokenizer belongs to another model",
                    field="tokenizer.json",
                )
        tokenizer = cls(backend, config, directory)
        tokenizer._files = files
        return tokenizer

    @property
    def bos_token_id(self) -> int | None:
        """The token that the configuration names as the first of a text."""
        return self._added.bos_id

    @property
    def eos_token_id(self) -> int | None:
        """The token that the configuration names as the last of a text."""
        return self._added.eos_id

    def close(self) -> None:
        """Release the encoding threads. Idempotent."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    @property
    def num_tokens(self) -> int:
        """Tokens of the vocabulary, added ones included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def tokens(self) -> dict[int, str]:
        """Every token by its id, as the vocabulary spells it."""
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        return {token_id: token for token, token_id in vocabulary.items()}

    def token_id(self, token: str) -> int | None:
        """The id of a token given as the vocabulary spells it."""
        return self._backend.token_to_id(token)

    async def encode(
        self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        """Token ids of ``text``, without blocking the event loop when it is long.

        Raises UserError above ``max_tokens`` or when it isn't a text of valid Unicode.
        """
        if not isinstance(text, str):
            raise UserError(f"{text!r:.80} isn't a text", field="prompt")
        if len(text) <= _INLINE_CHARS:
            return self.encode_now(
                text, add_special_tokens=add_special_tokens, max_tokens=max_tokens
            )
        if max_tokens is not None and len(text) > max_tokens:
            if not self._knows_max:
                await asyncio.get_running_loop().run_in_executor(self._threads, self._find_max)
            self.refuse_longer(text, max_tokens)
        if len(text) > _THREAD_CHARS:
            return await self._encode_in_child(text, add_special_tokens, max_tokens)
        loop = asyncio.get_running_loop()
        encoding = await loop.run_in_executor(self._threads, self._encode, text, add_special_tokens)
        return self._ids(encoding, add_special_tokens, max_tokens)

    def refuse_longer(self, text: str, max_tokens: int | None) -> None:
        """Raise UserError for a text that must have more tokens, where that is known; looks at the
        vocabulary when it is called first."""
        self._find_max()
        if self._max_token_chars is not None and max_tokens is not None:
            at_least = -(-len(text) // self._max_token_chars) - 1  # a leading BOS may be taken off
            if at_least > max_tokens:
                raise prompt_too_long(at_least, max_tokens, is_least=True)

    def content(self) -> dict[str, Any]:
        """What tokenizer.json says."""
        return json.loads(self._backend.to_str())  # type: ignore[no-any-return]

    def _find_max(self) -> None:
        if not self._knows_max:
            self._max_token_chars = max_token_chars(self.content())
            self._knows_max = True

    async def _encode_in_child(
        self, text: str, add_special_tokens: bool, max_tokens: int | None
    ) -> list[int]:
        try:
            data = text.encode()
        except UnicodeEncodeError:
            raise UserError(not_unicode(text), field="prompt") from None
        limits = encode_limits(len(text))
        ids = await shared_pool().run(
            _encode_bytes,
            self,
            data,
            add_special_tokens,
            max_tokens,
            limits=limits,
            num_bytes=len(data),
        )
        return ids.tolist()  # type: ignore[no-any-return]

    def encode_now(
        self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        """As ``encode``, in the calling thread."""
        return self._ids(self._encode(text, add_special_tokens), add_special_tokens, max_tokens)

    async def spans(self, text: str, *, add_special_tokens: bool = True) -> list[TokenSpan]:
        """A text's tokens with their places in it, without blocking when it is long."""
        if len(text) <= _INLINE_CHARS:
            return self._spans(text, add_special_tokens)
        if len(text) > MAX_SPAN_CHARS:
            raise UserError(
                f"the text has {len(text)} characters; at most {MAX_SPAN_CHARS} are tokenized with "
                "the place of each token",
                field="inputs",
            )
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._spans, text, add_special_tokens)

    async def encode_whole(
        self, framed: FramedText, max_tokens: int, truncate: Truncate = ""
    ) -> WholeText:
        """Token ids of a text, or a pair of texts, with what is added to it.

        ``truncate``: the side on which more than ``max_tokens`` are cut, the longer text first,
        but none that were added; "": UserError for them.
        """
        text, pair = framed.text, framed.pair
        num_chars = len(text) + len(pair or "")
        if num_chars > _THREAD_CHARS:
            raise UserError(
                f"the input has {num_chars} characters; at most {_THREAD_CHARS} are taken: shorten "
                "it",
                field="prompt",
            )
        encode = partial(self._encode_whole, framed, max_tokens, truncate)
        if num_chars <= _INLINE_CHARS:
            return encode()
        return await asyncio.get_running_loop().run_in_executor(self._threads, encode)

    def _encode_whole(self, framed: FramedText, max_tokens: int, truncate: Truncate) -> WholeText:
        text, pair, frame = framed.text, framed.pair, framed.frame
        try:
            [encoding] = self._backend.encode_batch(
                [text if pair is None else (text, pair)], add_special_tokens=frame is None
            )
        except TypeError:  # what the library makes of a lone surrogate
            raise UserError(not_unicode(text + (pair or "")), field="prompt") from None
        if frame is None:
            complete = self._added.complete
        else:
            before, after = (self.encode_now(part, add_special_tokens=False) for part in frame)
            complete = lambda ids: [*before, *ids, *after]  # noqa: E731
        ids = complete(encoding.ids)
        num_over = len(ids) - max_tokens
        types: list[int] = encoding.type_ids
        if num_over > 0:
            if not truncate:
                raise prompt_too_long(len(ids), max_tokens, room=0)
            kept = kept_places(encoding.sequence_ids, num_over, truncate)
            ids = complete([encoding.ids[place] for place in kept])
            types = [types[place] for place in kept]
        return WholeText(ids, types.index(1) if 1 in types else -1)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence."""
        try:
            return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        except TypeError:
            raise UserError(f"token ids are ints, not {token_ids!r:.80}", field="prompt") from None

    def token_text(self, token_id: int) -> str:
        """The text of one token on its own; incomplete characters become U+FFFD."""
        if self._token_bytes is not None:
            return self._token_bytes[token_id].decode(errors="replace")
        return self._backend.decode([token_id], skip_special_tokens=False)

    def bytes_of(self, token_id: int) -> bytes:
        """Of one token; those of its text on its own where it depends on its neighbours."""
        if self._token_bytes is not None:
            return self._token_bytes[token_id]
        return self.token_text(token_id).encode()

    @property
    def token_bytes(self) -> Mapping[int, bytes] | None:
        """The bytes of each token, none for an id that there isn't; None if a token's text depends
        on its neighbours."""
        return self._token_bytes

    def detokenizer(
        self,
        *,
        skip_special_tokens: bool = True,
        kept: Sequence[str] = (),
        context: Sequence[int] = (),
    ) -> Detokenizer:
        """A decoder for one choice; ``kept`` are special tokens that aren't skipped, ``context``
        the tokens before its first one."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        if kept:
            skipped -= {self.token_id(token) for token in kept}
        if self._token_bytes is not None:
            return ByteDetokenizer(self._token_bytes, skipped)
        return WindowDetokenizer(
            lambda ids: self._backend.decode(list(ids), skip_special_tokens=False), skipped, context
        )

    def _encode(self, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
        # A batch of one: unlike a single encode, it works without the GIL.
        try:
            [encoding] = self._backend.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
        except TypeError:  # what the library makes of a lone surrogate
            raise UserError(not_unicode(text), field="prompt") from None
        return encoding

    def _spans(self, text: str, add_special_tokens: bool) -> list[TokenSpan]:
        try:
            [encoding] = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
        except TypeError:  # what the library makes of a lone surrogate
            raise UserError(not_unicode(text), field="prompt") from None
        ids: list[int] = encoding.ids
        places: list[tuple[int, int]] = encoding.offsets
        wanted = self._added.complete(ids) if add_special_tokens else ids
        if wanted[1 : len(ids) + 1] == ids and wanted[: len(ids)] != ids:
            places = [(0, 0), *places]
        elif wanted[: len(ids) - 1] == ids[1:] and wanted[: len(ids)] != ids:
            places = places[1:]
        places = [*places, *[(0, 0)] * (len(wanted) - len(places))]
        return [TokenSpan(i, *place) for i, place in zip(wanted, places, strict=True)]

    def _ids(
        self, encoding: tokenizers.Encoding, add_special_tokens: bool, max_tokens: int | None
    ) -> list[int]:
        if max_tokens is not None and len(encoding) > max_tokens:
            raise prompt_too_long(len(encoding), max_tokens)
        ids: list[int] = encoding.ids
        return self._added.complete(ids) if add_special_tokens else ids


def encode_limits(num_chars: int) -> Limits:
    """What a text may take to be encoded in a child."""
    return Limits(
        what=f"tokenizing a prompt of {num_chars} characters",
        field="prompt",
        memory_bytes=min((512 << 20) + _BYTES_PER_CHAR * num_chars, _MAX_MEMORY_BYTES),
        result_bytes=_MAX_RESULT_BYTES,
    )


def _encode_bytes(
    tokenizer: Tokenizer, data: bytes, add_special_tokens: bool, max_tokens: int | None
) -> npt.NDArray[np.uint32]:
    """In a child."""
    ids = tokenizer.encode_now(
        data.decode(), add_special_tokens=add_special_tokens, max_tokens=max_tokens
    )
    return np.array(ids, np.uint32)


def _files_state(directory: Path) -> _FilesState:
    """Differs where another model has taken the place of the files."""
    state = []
    for name in ("tokenizer.json", "tokenizer_config.json", *OLDER_FILES):
        with suppress(OSError):
            status = (directory / name).stat()
            state.append((name, status.st_ino, status.st_mtime_ns, status.st_size))
    return tuple(state)


@lru_cache(maxsize=4)
def _read_tokenizer(directory: str, files: _FilesState) -> Tokenizer:
    return Tokenizer.load(Path(directory))


@lru_cache(maxsize=4)
def _made_tokenizer(backend: str, config: str) -> Tokenizer:
    return Tokenizer(tokenizers.Tokenizer.from_str(backend), json.loads(config))


def _missing_tokenizer(directory: Path) -> str:
    return (
        f"{directory} has no tokenizer.json, and neither tokenizer.model nor qwen.tiktoken; fetch "
        "it from where the model came from"
    )
