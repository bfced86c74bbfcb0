"""Which of several sequences is the best: the one whose tokens are likeliest on average."""

from __future__ import annotations

from dataclasses import dataclass

from lmi_core.engine.outputs import TokenEvent


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
