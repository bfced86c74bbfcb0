"""How long to wait before a process that failed is started again."""

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0


def pause_s(num_failures_in_a_row: int) -> float:
    """Nothing after the first failure, then twice as long each time."""
    if num_failures_in_a_row <= 1:
        return 0.0
    exponent = min(num_failures_in_a_row - 2, 16)
    return min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0**exponent)
