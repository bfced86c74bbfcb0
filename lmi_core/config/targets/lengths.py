"""The length of a sequence where prompt and answer are bounded apart."""

from __future__ import annotations

from lmi_core.config.sources.merge import Values
from lmi_core.config.table import BY_KEY

_KEYS = ("option.max_input_len", "option.max_output_len")


def sum_of_lengths(values: Values) -> int | None:
    """TensorRT-LLM's two bounds together, the default for the one not given; None without both."""
    given = [values.get(key) for key in _KEYS]
    if given == [None, None]:
        return None
    lengths = [
        BY_KEY[key].default if value is None else value
        for key, value in zip(_KEYS, given, strict=True)
    ]
    return sum(length for length in lengths if isinstance(length, int))
