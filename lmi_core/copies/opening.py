"""Requests on their way to a copy: what any of them needs to know."""

from __future__ import annotations

import itertools
from dataclasses import replace

from lmi_core.copies.adapters import SharedAdapters
from lmi_core.copies.dispatch import HashBlocks
from lmi_core.copies.open_request import OpenRequest
from lmi_core.copies.router import Entry
from lmi_core.engine.intake import derived_seed
from lmi_core.engine.request import GenerationRequest
from lmi_core.engine.stream import EventStream
from lmi_core.text.framed_text import WholeText

_EXPECTED_TOKENS = 256
"""Of the output of a choice that doesn't say how long it may be."""


class Opening:
    """Gives requests seeds, hashes of their blocks and places in the queue. ``hash_blocks``: None:
    prefixes aren't cached; ``seed``: of the engines; ``max_total_tokens``: of a prompt and a text.
    """

    def __init__(
        self,
        hash_blocks: HashBlocks | None,
        adapters: SharedAdapters,
        *,
        seed: int,
        max_total_tokens: int,
    ) -> None:
        self.num_prompt_tokens = 0
        """Of every choice of the open requests."""
        self._hash_blocks = hash_blocks
        self._adapters = adapters
        self._seed = seed
        self._max_total_tokens = max_total_tokens
        self._numbers = itertools.count()

    def open(
        self,
        request: GenerationRequest,
        prompt: WholeText,
        stream: EventStream,
        arrival_s: float,
    ) -> OpenRequest:
        """Hold a request's adapter until its end, and return what copies are given of it."""
        number, params, prompt_ids = next(self._numbers), request.params, prompt.ids
        if params.seed is None:
            params = replace(params, seed=derived_seed(self._seed, number))
        adapter = self._adapters.find(request.adapter)
        prefix_seed = request.prefix_seed(b"" if adapter is None else adapter.prefix_seed)
        hashes: list[bytes] = []
        if self._hash_blocks is not None:
            hashes = self._hash_blocks(prompt_ids, b"", prefix_seed)
        num_tokens = params.num_sequences * len(prompt_ids)
        self.num_prompt_tokens += num_tokens
        if adapter is not None:
            adapter.acquire()

        def on_end() -> None:
            self.num_prompt_tokens -= num_tokens
            if adapter is not None:
                adapter.release()

        return OpenRequest(
            replace(request, prompt=None, prompt_token_ids=tuple(prompt_ids), params=params),
            self._entry(number, request, len(prompt_ids), hashes),
            stream,
            arrival_s=arrival_s,
            prefix_seed=prefix_seed,
            hashes=hashes,
            num_first=prompt.num_first,
            on_end=on_end,
        )

    def _entry(
        self, number: int, request: GenerationRequest, num_prompt: int, hashes: list[bytes]
    ) -> Entry:
        params = request.params
        room = self._max_total_tokens - num_prompt
        num_output = min(params.max_new_tokens or _EXPECTED_TOKENS, room)
        return Entry(
            number,
            priority=request.priority,
            tenant=request.tenant,
            num_seqs=params.num_sequences,
            num_prompt_tokens=num_prompt,
            num_output_tokens=params.n * num_output,
            hashes=hashes,
            session=request.session,
        )
