"""Several sequences of one call: how many, and which is the best: whose tokens are likeliest on
average."""

from __future__ import annotations

from dataclasses import dataclass

from lmi_core.engine.outputs import TokenEvent
from lmi_core.errors import UserError

MAX_SEQUENCES = 1024
"""Of one call: each of its prompts has that many choices."""


def check_num_sequences(num_prompts: int, num_candidates: int, field: str) -> None:
    """Raise UserError for more of them than one call may ask for, before any is made."""
    if num_prompts * num_candidates > MAX_SEQUENCES:
        raise UserError(
            f"{field} has {num_prompts} prompts, each with {num_candidates} sequences (n, "
            f"best_of); at most {MAX_SEQUENCES} sequences fit into one request",
            field=field,
        )


@dataclass(slots=True)
class Likelihood:
    """Log-probabilities of a sequence's tokens, the one that ends it included."""

    logprob: float = 0.0
    """Of the whole sequence."""
    num_tokens: int = 0

    def add(self, event: TokenEvent) -> None:
        if event.token_id >= 0:
            self.logprob += event.logprob or 0.0
            self.num_tokens += 1

    @property
    def mean_logprob(self) -> float:
        """Per token, so that a sequence doesn't lose by being long."""
        return self.logprob / max(1, self.num_tokens)
