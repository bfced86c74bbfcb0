"""The frozen configuration of one model: all that the engine and the adapters see."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from lmi_core.config.artefacts.handler import Handler
from lmi_core.config.artefacts.model_files import ModelFiles
from lmi_core.config.artefacts.model_source import ModelSource
from lmi_core.config.paths import first_file
from lmi_core.config.sources.merge import Value
from lmi_core.config.targets.engine_settings import EngineSettings
from lmi_core.config.targets.lora_settings import LoraSettings
from lmi_core.config.targets.speculation_settings import DraftSource, SpeculationSettings
from lmi_core.settings.custom_code_config import CustomCodeConfig
from lmi_core.settings.engine_config import EngineConfig
from lmi_core.settings.library_config import LibraryConfig
from lmi_core.settings.placement import Placement
from lmi_core.weights.gguf.directory import model_directory


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One model as resolved: names, source, backend and its settings, with provenance.

    ``values`` maps each given key to its typed value, place and what it overrides;
    ``engine`` is the configuration of our engine, also where Transformers computes the model,
    ``custom_code`` that of the model's own code, ``library`` that of another backend, all without
    the places of files, which may not be here yet;
    ``lora`` is None where no LoRA adapters are served;
    ``passed_on`` are the unknown keys, as text.
    """

    name: str
    version: str | None
    source: ModelSource
    directory: Path | None
    archive_url: str | None
    """Where the directory was downloaded from."""
    system: str
    backend: str
    reason: str
    entry_point: str
    handler: Handler | None
    mpi_mode: bool
    placement: Placement
    files: ModelFiles
    output_formatter: str | None
    tgi_compat: bool
    lmi_compat: str | None
    trust_remote_code: bool
    max_input_tokens: int | None
    engine: EngineSettings | None
    custom_code: CustomCodeConfig | None
    library: LibraryConfig | None
    lora: LoraSettings | None
    passed_on: Mapping[str, str]
    values: Mapping[str, Value]
    speculation: SpeculationSettings | None = None
    """What is drafted; None: nothing."""
    again: Callable[[], ModelConfig] | None = field(default=None, compare=False, repr=False)
    """Resolves the model once more, with what has been fetched since; raises ConfigError."""

    def engine_config(
        self,
        model: Path | None = None,
        adapters: Sequence[tuple[str, Path]] = (),
        draft: Path | None = None,
    ) -> EngineConfig:
        """Return our engine's configuration; ``model`` is where the files are by now, ``adapters``
        those that ``lora`` names, ``draft`` the draft model that ``speculation`` names.

        Raises ValueError if the model isn't local and ``model`` is not given.
        """
        if model is None:
            if self.source.kind != "local":
                raise ValueError(f"{self.source.location} must be fetched before it is loaded")
            model = model_directory(Path(self.source.location))
        assert self.engine is not None, "our engine drives it"
        lora = None if self.lora is None else self.lora.config(model, adapters)
        config = replace(self.engine.config, model=model, lora=lora)
        if self.speculation is None:
            return config
        named = self.speculation.draft
        if draft is None and named is not None and named.source.kind == "local":
            draft = model_directory(Path(named.source.location))
        return replace(config, speculation=self.speculation.engine(draft))

    @property
    def draft(self) -> DraftSource | None:
        """The draft model that is named, or None."""
        return None if self.speculation is None else self.speculation.draft

    @property
    def num_processes(self) -> int | None:
        """Copies of our engine in processes of their own, as one is that several ranks share, so
        that a lost rank takes no request along; None: it runs within the server."""
        if self.backend != "lmi":
            return None
        asked = "option.num_copies" in self.values or self.placement.num_copies > 1
        asked |= self.is_on_ray
        return self.placement.num_copies if asked or self.placement.has_ranks else None

    @property
    def is_on_ray(self) -> bool:
        """Whether its copies run on the nodes of a Ray cluster."""
        return self.placement.on == "ray"

    @property
    def code(self) -> str | None:
        """What of it would run Python code that came with it, or None."""
        if (own := self.custom_code) is not None:
            return f"{own.path.name}: {own.function or own.input_formatter or own.output_formatter}"
        return "option.trust_remote_code=true" if self.trust_remote_code else None

    def library_config(
        self, model: Path, adapters: Sequence[tuple[str, Path]] = ()
    ) -> LibraryConfig:
        """Return the configuration of another library's engine, for files in ``model``, with the
        adapters that ``lora`` names."""
        assert self.library is not None, "another library's engine serves it"
        if self.lora is None:
            return replace(self.library, model=model)
        lora = self.lora.config(model, adapters)
        arguments = {
            **self.library.arguments,
            "enable_lora": True,
            "max_lora_rank": lora.max_rank,
        }
        return replace(self.library, model=model, arguments=arguments, lora=lora)

    def get(self, key: str) -> object:
        """Return the value given for ``key``, or None."""
        value = self.values.get(key)
        return None if value is None else value.value

    def custom_code_config(
        self, *, packages: Path | None = None, model_id: str | None = None
    ) -> CustomCodeConfig | None:
        """Return the configuration of the model's own code, or None where it has none.

        ``packages`` is where its requirements are, ``model_id`` where its files are by now.
        """
        if self.custom_code is None:
            return None
        properties = self.custom_code.properties
        if model_id is not None:
            properties = {**properties, "model_id": model_id}
        return replace(self.custom_code, properties=properties, packages=packages)

    def file(self, key: str, files: Path) -> str | None:
        """Return the text given for ``key``, which names a file, or None; one that the model's own
        options name is in the model's directories, ``files`` that of its weights."""
        value = self.values.get(key)
        if value is None:
            return None
        text = str(value.value)
        if not value.setting.is_of_model or "{" in text:
            return text
        own = (files,) if self.directory is None else (files, self.directory)
        return str(first_file(text, own))

    def where(self, key: str) -> str:
        """Return where ``key`` was given, or "default"."""
        value = self.values.get(key)
        return "default" if value is None else value.setting.where
