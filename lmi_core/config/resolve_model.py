"""One model's way from what is written to its frozen configuration, stage by stage."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

from lmi_core.config.artefacts.cache import noted_directory
from lmi_core.config.artefacts.entry_point import check_formatter, find_handler
from lmi_core.config.artefacts.model_files import ModelFiles, read_model_files
from lmi_core.config.artefacts.model_source import ModelSource, find_source
from lmi_core.config.artefacts.own_adapter import OwnAdapter, find_own_adapter
from lmi_core.config.artefacts.own_files import refuse_others_files
from lmi_core.config.checks import Subject, check
from lmi_core.config.model_config import ModelConfig
from lmi_core.config.problem import Problems
from lmi_core.config.rows import Row, model_rows
from lmi_core.config.sources.command_line import Invocation
from lmi_core.config.sources.merge import Values, merge
from lmi_core.config.sources.models import HUB_ONLY, Listed
from lmi_core.config.sources.origin import PROPERTIES, Precedence, Setting
from lmi_core.config.sources.properties import read_properties
from lmi_core.config.sources.rewrites import rewrite
from lmi_core.config.system import WrittenFor, written_for
from lmi_core.config.table import BY_KEY
from lmi_core.config.table.capabilities import BACKENDS
from lmi_core.config.table.effect import effect_of_value
from lmi_core.config.targets.custom_code_settings import custom_code_settings
from lmi_core.config.targets.dispatch import Decision, dispatch
from lmi_core.config.targets.engine_settings import EngineSettings, engine_settings, settle_keys
from lmi_core.config.targets.handler_environment import withheld, withheld_rows
from lmi_core.config.targets.host import Host
from lmi_core.config.targets.library_settings import (
    ignore_stored_quantisation,
    is_library,
    library_settings,
)
from lmi_core.config.targets.lora_settings import LoraSettings, lora_settings
from lmi_core.config.targets.placement import place
from lmi_core.config.targets.server_config import ServerConfig
from lmi_core.config.targets.speculation_settings import speculation_settings
from lmi_core.config.tgi_checks import check_tgi
from lmi_core.settings.custom_code_config import CustomCodeConfig
from lmi_core.settings.placement import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What is the same for all models of a server."""

    invocation: Invocation
    environ: Mapping[str, str]
    host: Host
    server: ServerConfig
    shared: tuple[Setting, ...]
    """Settings that hold for every model."""
    features: tuple[str, ...]
    """SERVING_FEATURES: the libraries of the container that the configuration was made for."""
    default_model: Path | None
    tgi: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """What sources and files say about a model, before anything is decided."""

    values: Values
    source: ModelSource
    directory: Path | None
    """Where the model's files are, None if they aren't here."""
    files: ModelFiles
    own_adapter: OwnAdapter | None
    written: WrittenFor


def resolve_model(
    listed: Listed,
    around: Surroundings,
    problems: Problems,
    *,
    prefer_native: bool | None = None,
) -> tuple[ModelConfig, tuple[Row, ...]]:
    """A model's configuration as far as it can be resolved, and a row for each of its keys.

    ``prefer_native``: None for what the command line says.
    """
    found = _find(listed, around, problems)
    values, files, written = found.values, found.files, found.written
    subject = Subject(values, written, files, problems)
    check(subject)
    if written.system == "tgi":
        check_tgi(subject, around.host)
    native = around.invocation.prefer_native if prefer_native is None else prefer_native
    decision = dispatch(written, values, files, around.host, problems, prefer_native=native)
    if decision.missing:
        instead = _instead(listed, decision, around, problems)
        if isinstance(instead, tuple):
            return instead
        key = decision.key
        problems.error(values.where(key) if key else "", decision.refusal(instead), key)
    placement = _place(listed, found, decision, around, problems)
    backend, system = decision.backend, written.system
    own, here = listed.directory, found.directory
    lora = lora_settings(values, backend, system, own, here, problems, found.own_adapter)
    speculation = None
    if backend == "lmi":
        speculation = speculation_settings(values, own, problems)
    rows = model_rows(values, backend, system, problems)
    rows += () if lora is None else lora.rows(here)
    _warn_of_requirements(found, decision, problems)
    drafts, name = None if speculation is None else speculation.config, _name(listed, values)
    engine = engine_settings(values, backend, name, system, placement, files, problems, drafts)
    code = _custom_code(listed, found, around, problems)
    model = _config(listed, found, decision, placement, engine, code, lora)
    model = replace(model, speculation=speculation, again=partial(_again, listed, around))
    return model, rows + withheld_rows(() if code is None else code.withheld)


def _find(listed: Listed, around: Surroundings, problems: Problems) -> _Found:
    values = _values(listed, around, problems)
    rewrite(values, problems)
    source = find_source(values, listed, problems)
    if source.kind in ("local", "s3"):
        values.ignored["option.revision"] = "only models of a hub have revisions"
    here = noted_directory(source, around.server, around.environ, problems)
    directory = here or listed.directory
    own_adapter = find_own_adapter(source, directory, problems)
    if own_adapter is not None:
        source = own_adapter.base
        directory = noted_directory(source, around.server, around.environ, problems)
    files = read_model_files(directory, problems)
    refuse_others_files(values, listed, directory)
    handler = find_handler(values, listed.directory, problems)
    check_formatter(handler, values, problems)
    written = written_for(
        values,
        files,
        handler,
        tgi=around.tgi and listed.directory is None,
        on_neuron=around.host.is_neuron,
        features=around.features,
    )
    return _Found(
        values=values,
        source=source,
        directory=directory,
        files=files,
        own_adapter=own_adapter,
        written=written,
    )


def _values(listed: Listed, around: Surroundings, problems: Problems) -> Values:
    own = list(listed.settings)
    if listed.directory is not None:
        path = listed.directory / PROPERTIES
        if os.path.lexists(path):
            own += _own_settings(path, problems)
    shared = [setting for setting in around.shared if setting.where not in HUB_ONLY]
    return merge((*shared, *own), problems, strict=around.invocation.strict)


def _own_settings(path: Path, problems: Problems) -> list[Setting]:
    """The settings of a model's own file, without keys of the server."""
    settings = []
    for setting in read_properties(path, Precedence.FILE, problems):
        option = BY_KEY.get(setting.key)
        if option is not None and option.scope == "server":
            problems.warn(
                setting.where,
                f"{setting.key} is a key of the server; it has no effect in {PROPERTIES}, set "
                f"{option.variable}",
                setting.key,
            )
        else:
            settings.append(setting)
    return settings


def _instead(
    listed: Listed, decision: Decision, around: Surroundings, problems: Problems
) -> tuple[ModelConfig, tuple[Row, ...]] | str:
    """The model on our engine, if that honours every key that is set, in place of a library that
    isn't installed; else the way out."""
    if not decision.stand_in or around.invocation.strict:
        native = "; --prefer-native serves it with the lmi engine"
        return native if decision.stand_in else ""
    trial = Problems()
    model, rows = resolve_model(listed, around, trial, prefer_native=True)
    errors = [str(error) for error in trial.errors if error not in problems.items]
    if errors:
        return f"; the lmi engine could serve it, but for this: {'; '.join(errors)}"
    lacking = [*model.passed_on]
    lacking += [k for k, v in model.values.items() if effect_of_value(v, "lmi").is_missing]
    if lacking:
        return f"; --prefer-native serves it with the lmi engine, without {', '.join(lacking)}"
    for problem in trial.items:
        problems.add(problem)
    title = BACKENDS[decision.backend].title
    note = f"{title} is not installed, and the lmi engine honours every key that is set"
    problems.warn(
        model.where(decision.key) if decision.key else "",
        f"{note}: it serves the model; {decision.missing}, or refuse such models by --strict",
        decision.key,
    )
    return replace(model, reason=f"{decision.reason}; {note}"), rows


def _place(
    listed: Listed, found: _Found, decision: Decision, around: Surroundings, problems: Problems
) -> Placement:
    """Where the model runs; what its devices and backend make of other keys is settled, too."""
    values, files, written = found.values, found.files, found.written
    placement = place(
        values,
        around.host,
        decision.backend,
        written.system,
        Problems() if decision.missing else problems,
        mpi_mode=written.mpi_mode,
        is_demo=listed.directory is not None and listed.directory is around.default_model,
    )
    environ = around.environ
    settle_keys(values, decision.backend, written.system, placement, files, environ, problems)
    if decision.backend in ("trtllm", "neuron"):
        ignore_stored_quantisation(values, files)
    return placement


def _warn_of_requirements(found: _Found, decision: Decision, problems: Problems) -> None:
    if found.files.requirements is None or found.written.handler is not None:
        return
    why = "the lmi engine runs no code of the model"
    if decision.backend != "lmi":
        why = "what the model's code needs must be installed beside the server"
    problems.warn(str(found.files.requirements), f"is not installed: {why}")


def _custom_code(
    listed: Listed, found: _Found, around: Surroundings, problems: Problems
) -> CustomCodeConfig | None:
    handler, values = found.written.handler, found.values
    if handler is None or listed.directory is None:
        return None
    return custom_code_settings(
        handler,
        values,
        listed.directory,
        around.host,
        problems,
        name=_name(listed, values),
        withheld=withheld(values, around.environ, tgi=around.tgi),
    )


def _name(listed: Listed, values: Values) -> str:
    return str(values.get("option.modelName") or listed.entry.name)


def _config(
    listed: Listed,
    found: _Found,
    decision: Decision,
    placement: Placement,
    engine: EngineSettings | None,
    custom_code: CustomCodeConfig | None,
    lora: LoraSettings | None,
) -> ModelConfig:
    values, written, backend = found.values, found.written, decision.backend
    name = _name(listed, values)
    library = None
    if is_library(backend):
        library = library_settings(values, backend, name, written.system, placement)
    handler = written.handler
    formatter = values.get("option.output_formatter")
    if handler is not None and handler.output_formatter is not None:
        formatter = None
    max_input = values.get("option.max_input_tokens") or values.get("option.max_input_len")
    return ModelConfig(
        name=name,
        version=listed.entry.version,
        source=found.source,
        directory=listed.directory,
        archive_url=listed.entry.url if listed.is_downloaded else None,
        system=written.system,
        backend=backend,
        reason=decision.reason,
        entry_point=written.entry_point,
        handler=handler,
        mpi_mode=written.mpi_mode,
        placement=placement,
        files=found.files,
        output_formatter=formatter if isinstance(formatter, str) else None,
        tgi_compat=values.get("option.tgi_compat") is True,
        lmi_compat=str(release) if (release := values.get("option.lmi_compat")) else None,
        trust_remote_code=values.get("option.trust_remote_code") is True,
        max_input_tokens=max_input if isinstance(max_input, int) else None,
        engine=engine,
        custom_code=custom_code,
        library=library,
        lora=lora,
        passed_on=MappingProxyType({k: s.text for k, s in values.unknown.items()}),
        values=MappingProxyType(dict(values.known)),
    )


def _again(listed: Listed, around: Surroundings) -> ModelConfig:
    problems = Problems()
    model, _ = resolve_model(listed, around, problems)
    problems.raise_errors()
    return model
