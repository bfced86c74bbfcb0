"""The tokens that tokenizer_config.json puts around every prompt."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from lmi_core.errors import ModelError

_log = logging.getLogger(__name__)


class AddedTokens:
    """bos and eos as the configuration names them, and whether prompts get them."""

    def __init__(self, config: Mapping[str, Any], id_of: Callable[[str], int | None]) -> None:
        """``id_of``: the id of a token as the vocabulary spells it, if there is one.

        Raises ModelError when a token is to be added that there isn't.
        """
        self._config = config
        self._id_of = id_of
        self.bos_id = self._named("bos")
        self.eos_id = self._named("eos")

    def complete(self, ids: list[int]) -> list[int]:
        """Apply add_bos_token and add_eos_token, which override what tokenizer.json adds."""
        bos, eos = self.bos_id, self.eos_id
        wants_bos = self._config.get("add_bos_token")
        if wants_bos is not None and bos is not None:
            has_bos = bool(ids) and ids[0] == bos
            if wants_bos and not has_bos:
                ids = [bos, *ids]
            elif not wants_bos and has_bos:
                ids = ids[1:]
        wants_eos = self._config.get("add_eos_token")
        if wants_eos and eos is not None and (not ids or ids[-1] != eos):
            ids = [*ids, eos]
        return ids

    def _named(self, which: str) -> int | None:
        name, is_added = f"{which}_token", self._config.get(f"add_{which}_token")
        if name not in self._config or (self._config[name] is None and not is_added):
            return None
        named = self._config[name]
        token = named.get("content") if isinstance(named, Mapping) else named
        if not isinstance(token, str):
            raise ModelError(
                f"tokenizer_config.json has {str(named)[:80]!r} as {name}; it must be a token, or "
                "an object with the token as its content"
                + (f", since add_{name} is true" if is_added else ", or null"),
                field="tokenizer_config.json",
            )
        token_id = self._id_of(token)
        if token_id is None:
            message = f"tokenizer_config.json names {token[:80]!r} as {name}, "
            if is_added:
                raise ModelError(
                    f"{message}to be added to every prompt, but tokenizer.json has no such token",
                    field="tokenizer_config.json",
                )
            _log.warning("%sbut tokenizer.json has no such token; it has no effect", message)
        return token_id
