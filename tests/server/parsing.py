"""A model as parsing knows it, without files or an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from lmi_server.http.options import ServerOptions
from lmi_server.models.stand_in import StandIn


class _Tokenizer:
    """Any number is a token's, whose text is the number in brackets."""

    num_tokens = 1 << 64

    def __init__(self, token_id: Callable[[str], int | None]) -> None:
        self.token_id = token_id

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(f"<{i}>" for i in token_ids)


def model_of(
    model_name: str = "m", token_id: Callable[[str], int | None] = lambda _: None, **options: Any
) -> StandIn:
    """``token_id``: of the names of special tokens; ``options``: ``ServerOptions``'."""
    return StandIn(
        options=ServerOptions(model_name=model_name, **options),
        known_tokenizer=cast(Any, _Tokenizer(token_id)),
    )
