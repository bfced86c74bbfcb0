"""What a protocol hands to the engine."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from lmi_core.engine.pooling_params import PoolingParams
from lmi_core.engine.sampling_params import SamplingParams

BACKGROUND = 1 << 20
"""Added to the priority of what runs only where nobody waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A decoded, protocol-neutral request. Exactly one of ``prompt`` and ``prompt_token_ids``."""

    request_id: str
    prompt: str | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    add_special_tokens: bool = True
    """Whether the tokenizer adds its own (BOS); off for prompts made by a chat template."""
    params: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    """Lower runs first; equal priorities run in arrival order, or by their tenants' shares."""
    max_queue_s: float | None = None
    """Seconds from its arrival that it may wait for its first step, 0: at once, or once its prefix
    came from a disk, or never; inf: as long as it takes; None: the engine's own."""
    tenant: str = ""
    """Whose it is: where several wait, rows are shared among tenants, not among requests."""
    adapter: str = ""
    """Name of the LoRA adapter to compute it with; "": the base model alone."""
    cache_salt: str = ""
    """Requests share cached prefixes only with those of the same salt."""
    session: str = ""
    """What its blocks are kept for once it has ended; "": they are cached as all are."""
    pooling: PoolingParams | None = None
    """Wanted is the prompt's vector or score; None: tokens that continue it."""
    echo: bool = False
    """Emit the prompt's tokens (their log-probabilities if asked) as the first event."""

    def completed(self, *, vocab_size: int, max_queue_s: float | None) -> GenerationRequest:
        """With the engine's own limit where it says none, and numbers in the place of -1."""
        most_s = max_queue_s if self.max_queue_s is None else self.max_queue_s
        return replace(self, params=self.params.counted(vocab_size), max_queue_s=most_s)

    def prefix_seed(self, adapter_seed: bytes) -> bytes:
        """What its blocks' hashes begin with: ``adapter_seed`` (b"": the base model's) and its
        salt, which may be any text."""
        return adapter_seed + self.cache_salt.encode(errors="surrogatepass")

    def behind_first(self) -> GenerationRequest:
        """As one of a call that has begun with another: it waits as long as it takes."""
        return replace(self, max_queue_s=math.inf)
