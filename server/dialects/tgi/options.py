"""Configuration of the TGI protocol."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class TgiOptions:
    """The launcher's flags of the same names, and which releases are spoken like."""

    version: Literal[2, 3] = 2
    """2: as release 2.4 answers; 3: as 3.3 does."""
    max_concurrent_requests: int = 128
    """Generations at once, waiting ones included; one more is refused as overloaded."""
    max_best_of: int = 2
    max_stop_sequences: int = 4
    max_top_n_tokens: int = 5
    max_client_batch_size: int = 4
    """Most prompts in one completion request."""
    max_input_tokens: int | None = None
    """Longest prompt; None: what the engine takes."""
    disable_grammar_support: bool = False
    ignores_watermark: bool = False
    """A watermark that is asked for isn't made, and reported."""
    watermark_gamma: float = 0.5
    watermark_delta: float = 2.0
    enable_prefill_logprobs: bool = False
    """Release 3 reports no prompt tokens without it; release 2 always does."""
    model_id: str = "model"
    """As configured: a hub id or a directory."""
    model_sha: str | None = None
    compute_type: str = "cpu"
    """Value of the header x-compute-type."""

    @property
    def release(self) -> str:
        """The release whose behaviour this is, for clients that look at it."""
        return "3.3.7" if self.version >= 3 else "2.4.0"
