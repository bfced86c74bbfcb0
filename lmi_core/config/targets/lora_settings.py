"""What a configuration says of LoRA adapters (DJL-Serving's and TGI's documentation)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lmi_core.config.artefacts.adapter_directories import (
    FOLDER,
    adapters_beside,
    check_adapter_code,
)
from lmi_core.config.artefacts.model_source import ModelSource, locate
from lmi_core.config.artefacts.own_adapter import OwnAdapter
from lmi_core.config.problem import Problems
from lmi_core.config.rows import Row
from lmi_core.config.sources.merge import Values
from lmi_core.config.table import BY_KEY
from lmi_core.config.table.capabilities import BACKENDS
from lmi_core.config.table.common import DTYPES
from lmi_core.config.table.option import Outcome
from lmi_core.errors import UserError
from lmi_core.settings.lora_config import LoraConfig

_ENABLE = "option.enable_lora"
_FOLDER = "option.adapters"
_NAMED = "option.lora_adapters"
_RANK = "option.max_lora_rank"
_ITEM = re.compile(r"(?P<name>[^=@]+)(=(?P<place>[^=@]+))?(@(?P<revision>[^=@]+))?")


@dataclass(frozen=True, slots=True)
class NamedAdapter:
    """An adapter that is named in the configuration, and where its files are."""

    name: str
    source: ModelSource


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    """LoRA is enabled; adapters beside the model are found when its files are here."""

    max_rank: int
    directory: Path | None
    """That of the model's serving.properties."""
    folder: str = FOLDER
    """Where adapters lie beside the model."""
    named: tuple[NamedAdapter, ...] = ()
    own: OwnAdapter | None = None
    """Of a model that is an adapter alone; it is among ``named``."""

    def config(self, model: Path | None, named: Sequence[tuple[str, Path]] = ()) -> LoraConfig:
        """The engine's part; ``model`` is where the model's files are, ``named`` where those of
        the named adapters are by now. Raises UserError for adapters that can't be served."""
        adapters = (*adapters_beside(self.directory, model, folder=self.folder), *named)
        for _, path in adapters:
            check_adapter_code(path)
        default = "" if self.own is None else self.own.name
        return LoraConfig(max_rank=self.max_rank, adapters=adapters, default=default)

    def rows(self, model: Path | None) -> tuple[Row, ...]:
        """What an explanation says of adapters beside the model."""
        beside = tuple(
            Row(f"adapters/{name}", "", str(path.parent), Outcome.MAPPED, f"registered as {name}")
            for name, path in adapters_beside(self.directory, model, folder=self.folder)
        )
        if self.own is None:
            return beside
        place = f"{self.own.source.location}/adapter_config.json"
        text = f"the base model's files; adapter {self.own.name} answers what names no other"
        base = self.own.base.location
        return (Row("base_model_name_or_path", base, place, Outcome.MAPPED, text), *beside)


def lora_settings(
    values: Values,
    backend: str,
    system: str,
    directory: Path | None,
    model: Path | None,
    problems: Problems,
    own: OwnAdapter | None = None,
) -> LoraSettings | None:
    """Return what ``backend`` is told, or None where LoRA is off or ``backend`` has none.

    ``directory`` is that of the model's serving.properties, ``model`` where its files are, if they
    are here, ``own`` what it is served with where it is an adapter alone. Faults go to
    ``problems``.
    """
    named, folder = _named(values, directory, problems), _folder(values, problems)
    if values.get(_ENABLE) is not True and not named and own is None:
        _mention(adapters_beside(directory, model, folder=folder), backend, problems)
        return None
    if values.get(_ENABLE) is False and named:
        problems.error(
            values.where(_NAMED),
            f"{_NAMED} names adapters, but {_ENABLE}=false ({values.where(_ENABLE)}); remove one",
            _NAMED,
        )
    if "lora" not in BACKENDS[backend].capabilities:
        if own is not None:
            problems.error(
                own.source.location,
                f"is a LoRA adapter, which {BACKENDS[backend].title} applies to no model here: "
                "merge it into its base model",
            )
        return None
    if backend == "lmi":
        _check_dtype(values)
    default_rank = BY_KEY[_RANK].default_for(system)
    assert isinstance(default_rank, int)
    if own is not None:
        named = (*named, NamedAdapter(own.name, own.source))
        default_rank = max(default_rank, own.rank)
    max_rank = values.get(_RANK) or default_rank
    assert isinstance(max_rank, int)
    settings = LoraSettings(
        max_rank=max_rank, directory=directory, folder=folder, named=named, own=own
    )
    try:
        settings.config(model, [(adapter.name, Path()) for adapter in named])
    except UserError as error:
        problems.error(values.where(_NAMED if _NAMED in values.known else _ENABLE), str(error))
    return settings


def _folder(values: Values, problems: Problems) -> str:
    """The directory within the model's that adapters lie in."""
    folder = Path(str(values.get(_FOLDER) or FOLDER))
    if folder.is_absolute() or ".." in folder.parts:
        problems.error(
            values.where(_FOLDER),
            f"{_FOLDER}={str(folder)[:200]} leaves the model's directory: name one within it, or "
            f"list adapters from elsewhere in {_NAMED}",
            _FOLDER,
        )
    return str(folder)


def _named(values: Values, directory: Path | None, problems: Problems) -> tuple[NamedAdapter, ...]:
    """TGI's list: each ``id``, ``id=place``, ``id@revision`` or ``id=place@revision``."""
    items = values.get(_NAMED)
    is_own = items is not None and values.known[_NAMED].setting.is_of_model
    here = None if is_own else Path()
    found = []
    for item in items if isinstance(items, tuple) else ():
        where = values.where(_NAMED)
        match = _ITEM.fullmatch(item)
        if match is None:
            problems.error(
                where,
                f"LoRA adapter {item[:80]!r} is not id, id=path, id@revision or id=path@revision",
                _NAMED,
            )
            continue
        source = locate(match["place"] or match["name"], match["revision"], here, directory)
        if source is None:
            problems.error(
                where,
                f"LoRA adapter {item[:200]!r} is in neither a directory, a hub repository, nor "
                "under an s3:// prefix",
                _NAMED,
            )
            continue
        if match["revision"] and source.kind != "hub":
            problems.warn(
                where,
                f"the revision of LoRA adapter {item[:200]!r} has no effect: it is not on the hub",
                _NAMED,
            )
        found.append(NamedAdapter(match["name"], source))
    return tuple(found)


def _mention(beside: list[tuple[str, Path]], backend: str, problems: Problems) -> None:
    """Warn of adapters that will not be loaded."""
    if beside and "lora" in BACKENDS[backend].capabilities:
        names = ", ".join(name for name, _ in beside)
        problems.warn(
            str(beside[0][1].parent),
            f"holds adapters that are not loaded ({names}): set {_ENABLE}=true",
        )


def _check_dtype(values: Values) -> None:
    """Adapters have the activations' type, so that another one is refused."""
    wanted, dtype = values.get("option.lora_dtype"), values.get("option.dtype")
    if wanted in (None, "auto") or dtype in (None, "auto", "int8"):
        return
    if DTYPES[str(wanted)] != DTYPES[str(dtype)]:
        values.refused["option.lora_dtype"] = (
            f"adapters have the type of the activations, which option.dtype={dtype} chooses: "
            "leave it out"
        )
