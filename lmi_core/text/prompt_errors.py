"""What is wrong with a prompt as a text, in words that clients know."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from lmi_core.errors import ContextLengthError, UserError


def check_token_ids(token_ids: Sequence[int], vocab_size: int, *, field: str = "prompt") -> None:
    """Raise UserError naming the first id that the model doesn't have."""
    try:
        operator.index(sum(token_ids))  # a float among them makes it one
        if len(token_ids) == 0 or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
            return
    except TypeError:
        raise UserError(f"token ids are ints, not {token_ids!r:.80}", field=field) from None
    wrong = next(i for i in token_ids if not 0 <= i < vocab_size)
    raise UserError(
        f"token id {wrong} is out of vocabulary; allowed are 0 to {vocab_size - 1}", field=field
    )


def empty_prompt() -> UserError:
    """The error for a prompt without a token."""
    return UserError(
        "the prompt is empty: it must be provided and non-empty, of at least one token",
        field="prompt",
    )


def prompt_too_long(
    num_tokens: int, max_tokens: int, *, is_least: bool = False, room: int = 1
) -> ContextLengthError:
    """The error for a prompt that leaves no room for a single new token, or, with ``room`` 0, for
    itself.

    Clients know it by its first words, OpenAI's, and then try a shorter prompt or another model.
    """
    if not room:
        return ContextLengthError(
            f"This model's maximum context length is {max_tokens} tokens, but the input has "
            f"{'at least ' if is_least else ''}{num_tokens} tokens: shorten it, or ask for it to "
            "be truncated",
            field="prompt",
        )
    return ContextLengthError(
        f"This model's maximum context length is {max_tokens + 1} tokens, but the prompt has "
        f"{'at least ' if is_least else ''}{num_tokens} tokens; at most {max_tokens} fit and leave "
        "room for one new token: shorten it, or raise max_model_len if the model allows",
        field="prompt",
    )


def not_unicode(text: str) -> str:
    """The place at which a text that a tokenizer refused isn't valid Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"the prompt isn't valid Unicode at character {error.start}: {error.reason}"
    return "the prompt can't be tokenized"
