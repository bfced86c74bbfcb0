"""Rules on settings that several parts ask about, each in its own words or all in these."""

from __future__ import annotations

from lmi_core.errors import UserError

BLOCK_MULTIPLE = 16
"""Of tokens in a KV block: what attention kernels read at once."""


def is_too_long(max_model_len: int | None, num_positions: int | None) -> bool:
    """Whether more tokens are asked for than a model has positions; None: nothing is, or nobody
    knows."""
    if max_model_len is None or num_positions is None:
        return False
    return max_model_len > num_positions


def check_max_model_len(max_model_len: int | None, num_positions: int | None) -> None:
    """Raise UserError if it is too long."""
    if is_too_long(max_model_len, num_positions):
        raise UserError(
            f"max_model_len={max_model_len} is longer than the model's {num_positions} positions",
            field="max_model_len",
        )
