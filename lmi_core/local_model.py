"""One model for this process, from the arguments and variables that ``lmi serve`` takes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lmi_core.config.resolve import resolve
from lmi_core.config.sources.command_line import split_arguments
from lmi_core.config.targets.launch import Launch, prepare_model
from lmi_core.errors import UserError
from lmi_core.settings.engine_config import EngineConfig
from lmi_core.text.chat import ChatTemplate

if TYPE_CHECKING:
    from lmi_core.models.found_model import FoundModel


@dataclass(frozen=True, slots=True)
class LocalModel:
    """The engine's configuration, the files fetched, and the chat template; None: it has none."""

    config: EngineConfig
    template: ChatTemplate | None
    found: FoundModel | None = None
    """What was read of its files, for one engine."""

    @property
    def asked(self) -> EngineConfig | FoundModel:
        """What an engine loads."""
        return self.found or self.config


def parse_arguments(
    parser: argparse.ArgumentParser, argv: Sequence[str], *, num_words: int
) -> tuple[argparse.Namespace, list[str]]:
    """``parser``'s own arguments, and those of the model.

    Flags that ``parser`` doesn't know are the model's, and all words after the first ``num_words``.
    """
    own = {
        flag: action.nargs != 0
        for action in parser._actions  # there is no public list of them
        for flag in action.option_strings
    }
    flags, words, model = split_arguments(argv, own)
    own_words = ["--", *words[:num_words]] if words[:num_words] else []
    return parser.parse_args([*flags, *own_words]), [*model, *words[num_words:]]


def open_local_model(argv: Sequence[str], default_model: Path) -> LocalModel:
    """Resolve what names and configures a model, and fetch its files; blocking.

    Raises ConfigError with every fault at once, UserError for what our engine doesn't run.
    """
    deployment = resolve(argv, default_model=default_model)
    if len(deployment.models) != 1:
        names = ", ".join(model.name for model in deployment.models)
        raise UserError(f"give one model; the configuration names {names}")
    (model,) = deployment.models
    launch = prepare_model(model, deployment.server)
    if not isinstance(launch, Launch) or not isinstance(launch.engine, EngineConfig):
        raise UserError(
            f"{model.name} runs on {model.backend}, not on our own engine: lmi serve it, and give "
            "--url"
        )
    named, config_path = (
        model.get("option.chat_template"),
        model.get("option.tokenizer_config_path"),
    )
    template = ChatTemplate.load(
        launch.engine.model,
        template=None if named is None else str(named),
        config_path=None if config_path is None else Path(str(config_path)),
    )
    return LocalModel(launch.engine, template, launch.found)
