"""A model where bodies are decoded: itself, or in a child what stands in for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from lmi_core.engine.stats import EngineInfo
from lmi_core.errors import EngineError, UserError
from lmi_core.text.tokenizer import Tokenizer
from lmi_server.http.options import ServerOptions
from lmi_server.models.backend import Generates, Tokenizes
from lmi_server.models.loaded_model import LoadedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class StandIn:
    """What decoding needs of a model, in the child."""

    options: ServerOptions
    """The model's own; the server's are as they would be without any."""
    known_tokenizer: Tokenizer | None = None
    known_info: EngineInfo | None = None
    adapters: tuple[str, ...] = ()
    known_fingerprint: str | None = None

    def fingerprint(self) -> str | None:
        return self.known_fingerprint

    @property
    def info(self) -> EngineInfo:
        if self.known_info is None:
            raise EngineError("the model has no engine")
        return self.known_info

    @property
    def tokenizer(self) -> Tokenizer:
        if self.known_tokenizer is None:
            raise EngineError("the model has no tokenizer")
        return self.known_tokenizer

    @property
    def vocab_size(self) -> int:
        info = self.known_info
        return self.tokenizer.num_tokens if info is None else info.runner.vocab_size

    def adapter_names(self) -> tuple[str, ...]:
        return self.adapters

    def decode(self, token_ids: Sequence[int]) -> str:
        """As the engine does."""
        wrong = next((i for i in token_ids if not 0 <= i < self.vocab_size), None)
        if wrong is not None:
            raise UserError(
                f"there is no token id {wrong}; allowed are 0 to {self.vocab_size - 1}",
                field="prompt",
            )
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)


DecodingModel: TypeAlias = LoadedModel | StandIn


def stand_in_of(model: LoadedModel) -> StandIn:
    """A model that answers by code of its own has neither tokenizer nor engine."""
    backend, options = model.backend, model.options
    tokenizer = backend.tokenizer if isinstance(backend, Tokenizes) else None
    return StandIn(
        options=ServerOptions(
            model_name=options.model_name,
            lmi=options.lmi,
            tgi=options.tgi,
            sampling_defaults=options.sampling_defaults,
            chat_template=options.chat_template,
            has_lora=options.has_lora,
        ),
        known_tokenizer=tokenizer if isinstance(tokenizer, Tokenizer) else None,
        known_info=backend.info if isinstance(backend, Generates) else None,
        adapters=tuple(model.adapter_names()),
        known_fingerprint=model.fingerprint(),
    )
