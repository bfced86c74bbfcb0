"""A Transformers model whose encoder reads the prompt once, for a decoder that begins anew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lmi_core.runners.transformers.causal_model import CausalModel
from lmi_core.runners.transformers.padded_caches import Chunk, PaddedCaches, Split, merge

if TYPE_CHECKING:
    from transformers import EncoderDecoderCache


class EncoderDecoderModel(CausalModel):
    """As ``CausalModel``, of an encoder and a decoder."""

    def __init__(self, model: Any, device: torch.device) -> None:
        super().__init__(model, device)
        self.first_ids = self._first_ids()
        """What every output begins with, which nobody is shown."""
        embedding = getattr(model.get_decoder(), "embed_positions", None)
        self._positions: torch.Tensor | None = None
        self.pads_outputs = embedding is None or hasattr(embedding, "offset")
        """Whether outputs of different lengths can be one batch, padded on the left: positions are
        relative, or learned and told."""
        if embedding is not None and self.pads_outputs:
            embedding.register_forward_hook(self._embed_positions)

    @torch.inference_mode()
    def encode(self, prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """The encoder's results [prompts, longest, hidden], and the mask [prompts, longest] of what
        isn't padding, which is on the right."""
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        width = int(lengths.max())
        padded = torch.tensor([[*prompt, *[0] * (width - len(prompt))] for prompt in prompts])
        mask = (torch.arange(width) < lengths.unsqueeze(1)).long().to(self.device)
        encoder = self._model.get_encoder()
        output = encoder(input_ids=padded.to(self.device), attention_mask=mask, return_dict=True)
        return output.last_hidden_state, mask

    def decode(
        self,
        token_ids: torch.Tensor,
        cache: EncoderDecoderCache,
        source_mask: torch.Tensor,
        *,
        encoded: torch.Tensor | None,
        mask: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """Logits [batch, 1, vocabulary] of the last of ``token_ids`` [batch, width].

        ``encoded`` is for the first call: its keys and values stay in ``cache``. ``mask`` [batch,
        cached + width] is 0 at padding; ``positions`` are those of ``token_ids``.
        """
        from transformers.modeling_outputs import BaseModelOutput

        if encoded is None:  # only its shape is asked for
            size = self._model.config.hidden_size
            encoded = torch.zeros(1, dtype=self._model.dtype, device=self.device)
            encoded = encoded.expand(*source_mask.shape, size)
        self._positions = positions
        output = self._model(
            encoder_outputs=BaseModelOutput(last_hidden_state=encoded),
            attention_mask=source_mask,
            decoder_input_ids=token_ids,
            decoder_attention_mask=mask,
            use_cache=True,
            return_dict=True,
            **{self.cache_name: cache},
        )
        logits: torch.Tensor = output.logits
        return logits[:, -1:]

    @property
    def max_positions(self) -> int | None:
        """None where they are relative."""
        is_relative = hasattr(self._model.config, "relative_attention_num_buckets")
        return None if is_relative else super().max_positions

    def token_bytes(self) -> int:
        """Of the keys and values of a token: a prompt's, or an output's."""
        caches = EncoderDecoderCaches(self, 1.0, 1)
        caches.run([Chunk(0, [0], 0, 1)])
        return caches.self_attention_bytes(0) // len(self.first_ids)

    def _first_ids(self) -> list[int]:
        """The decoder's start, and the token that some models force to come first."""
        for name in ("decoder_start_token_id", "bos_token_id"):
            for config in (self._model.generation_config, self._model.config):
                start = getattr(config, name, None)
                if isinstance(start, int):
                    forced = getattr(self._model.generation_config, "forced_bos_token_id", None)
                    return [start, forced] if isinstance(forced, int) else [start]
        return [0]

    def _embed_positions(self, module: Any, inputs: object, output: torch.Tensor) -> torch.Tensor:
        assert self._positions is not None
        return torch.nn.functional.embedding(self._positions + module.offset, module.weight)


@dataclass(slots=True)
class _EncodedSplit(Split):
    source_lengths: list[int]
    source_mask: torch.Tensor


class EncoderDecoderCaches(PaddedCaches):
    """Prompts are collected whole and encoded in batches; ``lengths`` are those of outputs."""

    _model: EncoderDecoderModel

    def __init__(self, model: EncoderDecoderModel, max_sparsity: float, max_splits: int) -> None:
        super().__init__(model, max_sparsity, max_splits)
        self._prompts: dict[int, list[int]] = {}
        """By row, as far as their chunks have come."""

    def drop(self, row: int) -> None:
        super().drop(row)
        self._prompts.pop(row, None)

    def run(self, chunks: Sequence[Chunk]) -> dict[int, torch.Tensor]:
        ready = []
        for chunk in chunks:
            if chunk.row not in self._splits:
                prompt = self._prompts.setdefault(chunk.row, [])
                prompt += chunk.token_ids
                chunk = chunk._replace(token_ids=prompt, start=0)
                if not chunk.num_logits:
                    continue
            ready.append(chunk)
        logits = super().run(ready)
        nothing = torch.empty(0, self._model.vocab_size, device=self._model.device)
        return {chunk.row: logits.get(chunk.row, nothing) for chunk in chunks}

    def self_attention_bytes(self, row: int) -> int:
        """Of the row's batch."""
        layers = self._splits[row].cache.self_attention_cache.layers
        return sum(tensor.nbytes for layer in layers for tensor in (layer.keys, layer.values))

    def _groups(self, prompts: dict[int, Chunk], decoding: dict[int, Chunk]) -> list[list[int]]:
        """Prompts and outputs apart, whose lengths have nothing to do with each other."""
        order, lengths = list(prompts), [len(chunk.token_ids) for chunk in prompts.values()]
        new = [[order[i] for i in group] for group in self._partition(lengths)]
        return [*self._decode_groups(decoding), *new]

    def _decode_groups(self, decoding: dict[int, Chunk]) -> list[list[int]]:
        if self._model.pads_outputs:
            return self._regrouped({row: self._output_len(c) for row, c in decoding.items()})
        by_length: dict[int, list[int]] = {}
        for row in sorted(decoding):
            by_length.setdefault(self._length(row), []).append(row)
        self._decoding = list(by_length.values())
        return self._decoding

    def _output_len(self, chunk: Chunk) -> int:
        """In the end, where that is known, else now."""
        split = self._splits[chunk.row]
        assert isinstance(split, _EncodedSplit)
        num_prompt = split.source_lengths[split.rows.index(chunk.row)]
        return chunk.final_len - num_prompt if chunk.final_len else self._length(chunk.row)

    def _prefill(self, chunks: list[Chunk], logits: dict[int, torch.Tensor]) -> None:
        from transformers import DynamicCache, EncoderDecoderCache

        self._model.begin([chunk.row for chunk in chunks])
        encoded, source_mask = self._model.encode([chunk.token_ids for chunk in chunks])
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        rows, sizes = [c.row for c in chunks], [len(c.token_ids) for c in chunks]
        split = _EncodedSplit(rows, [0] * len(rows), cache, sizes, source_mask)
        self._splits |= dict.fromkeys(rows, split)
        first = [chunk._replace(token_ids=self._first_ids(chunk.begin_id)) for chunk in chunks]
        for chunk in chunks:
            self._prompts.pop(chunk.row)
        self._decode(split, first, logits, encoded)

    def _first_ids(self, begin_id: int | None) -> list[int]:
        first_ids = self._model.first_ids
        if begin_id is None or len(first_ids) < 2:
            return first_ids
        return [*first_ids[:-1], begin_id]

    def _merged(self, rows: list[int], sources: list[tuple[Split, int]]) -> Split:
        from transformers import EncoderDecoderCache

        lengths, sizes = [], []
        own, read = [], []
        for split, i in sources:
            assert isinstance(split, _EncodedSplit)
            lengths.append(split.lengths[i])
            sizes.append(split.source_lengths[i])
            own.append((split.cache.self_attention_cache, i, lengths[-1]))
            read.append((split.cache.cross_attention_cache, i, sizes[-1]))
        caches = merge(own, max(lengths)), merge(read, max(sizes), is_left=False)
        sizes_column = torch.tensor(sizes).unsqueeze(1)
        mask = (torch.arange(max(sizes)) < sizes_column).long().to(self._model.device)
        return _EncodedSplit(rows, lengths, EncoderDecoderCache(*caches), sizes, mask)

    def _call(self, split: Split, chunks: list[Chunk], logits: dict[int, torch.Tensor]) -> None:
        self._decode(split, chunks, logits, None)

    def _decode(
        self,
        split: Split,
        chunks: list[Chunk],
        logits: dict[int, torch.Tensor],
        encoded: torch.Tensor | None,
    ) -> None:
        """Every chunk has as many tokens."""
        assert isinstance(split, _EncodedSplit)
        mask, positions = self._padding(split, chunks)
        self._model.begin(split.rows)
        values = self._model.decode(
            torch.tensor([chunk.token_ids for chunk in chunks], device=self._model.device),
            split.cache,
            split.source_mask,
            encoded=encoded,
            mask=mask,
            positions=positions,
        )
        logits |= {chunk.row: rows for chunk, rows in zip(chunks, values, strict=True)}
