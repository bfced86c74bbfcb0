"""From sources to frozen configurations: the one pipeline behind ``serve`` and ``explain``."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

from lmi_core.config.artefacts.archives import Archives
from lmi_core.config.artefacts.cache import download_root, noted_directory
from lmi_core.config.artefacts.custom_code import check_downloaded
from lmi_core.config.artefacts.entry_point import check_formatter, find_handler
from lmi_core.config.artefacts.model_files import ModelFiles, read_model_files
from lmi_core.config.artefacts.model_source import ModelSource, find_source
from lmi_core.config.artefacts.own_adapter import find_own_adapter
from lmi_core.config.artefacts.own_files import refuse_others_files
from lmi_core.config.artefacts.unpack import Limits
from lmi_core.config.checks import Subject, check
from lmi_core.config.model_config import ModelConfig
from lmi_core.config.paths import is_file
from lmi_core.config.problem import Problem, Problems
from lmi_core.config.rows import Row, model_rows, server_rows
from lmi_core.config.sources.command_line import Invocation, parse_command_line
from lmi_core.config.sources.environment import is_tgi, read_environment
from lmi_core.config.sources.load_models import ModelEntry
from lmi_core.config.sources.merge import Values, merge
from lmi_core.config.sources.models import (
    HUB_ONLY,
    Listed,
    list_entry,
    list_models,
)
from lmi_core.config.sources.origin import PROPERTIES, Rank, Setting
from lmi_core.config.sources.properties import read_properties, read_server_file
from lmi_core.config.sources.rewrites import rewrite
from lmi_core.config.system import WrittenFor, written_for
from lmi_core.config.table import BY_KEY
from lmi_core.config.table.capabilities import BACKENDS
from lmi_core.config.table.effect import effect_of_value
from lmi_core.config.targets.custom_code_settings import custom_code_settings
from lmi_core.config.targets.dispatch import Decision, dispatch
from lmi_core.config.targets.engine_settings import (
    check_engine,
    engine_settings,
    ignore_for_device,
    quantise_as_trtllm,
    refuse_for_device,
    refuse_other_quantisations,
    runs_in_engine,
)
from lmi_core.config.targets.handler_environment import withheld, withheld_rows
from lmi_core.config.targets.host import Host, detect_host
from lmi_core.config.targets.library_settings import (
    ignore_stored_quantisation,
    is_library,
    library_settings,
)
from lmi_core.config.targets.lora_settings import LoraSettings, lora_settings
from lmi_core.config.targets.placement import place
from lmi_core.config.targets.server_config import ServerConfig, server_config
from lmi_core.config.targets.speculation_settings import speculation_settings
from lmi_core.config.tgi_checks import check_tgi, check_tgi_server
from lmi_core.settings.placement import Placement
from lmi_core.settings.speculation_config import SpeculationConfig

_NAMES = frozenset({"option.model_id", "option.revision", "option.modelName"})
"""Keys that say which model a server started with."""


@dataclass(frozen=True, slots=True)
class Report:
    """All that is known about a configuration, whether it can be used or not."""

    server: ServerConfig
    server_rows: tuple[Row, ...]
    models: tuple[ModelConfig, ...]
    rows: tuple[tuple[Row, ...], ...]
    problems: tuple[Problem, ...]
    errors: tuple[Problem, ...]
    warnings: tuple[Problem, ...]


@dataclass(frozen=True, slots=True)
class Deployment:
    """A configuration that can be used: the server's and each model's."""

    server: ServerConfig
    models: tuple[ModelConfig, ...]
    warnings: tuple[str, ...]


def resolve(
    argv: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    host: Host | None = None,
    *,
    default_model: Path | None = None,
) -> Deployment:
    """Resolve a command line and environment; raises ConfigError with every fault at once.

    ``default_model`` is served where no model is named.
    """
    problems = Problems()
    report = examine(argv, environ, host, problems, default_model=default_model, fetches=True)
    problems.raise_errors()
    return Deployment(report.server, report.models, tuple(map(str, report.warnings)))


def examine(
    argv: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    host: Host | None = None,
    problems: Problems | None = None,
    *,
    default_model: Path | None = None,
    fetches: bool = False,
) -> Report:
    """Resolve as far as possible and report everything, faults included, without raising.

    ``fetches``: have models that come as archives, whose configuration is in them.
    """
    environ = os.environ if environ is None else environ
    host = detect_host(environ) if host is None else host
    problems = Problems() if problems is None else problems
    invocation = parse_command_line(argv, problems)
    return _Examination(invocation, environ, host, problems, default_model, fetches).run()


def resolve_entry(
    entry: ModelEntry,
    arguments: Mapping[str, str],
    argv: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    host: Host | None = None,
    check: Callable[[ModelConfig], None] | None = None,
) -> tuple[ModelConfig, tuple[str, ...]]:
    """Resolve one model that a running server adds, and the warnings about it.

    ``arguments`` are keys given with the entry; ``argv`` and ``environ`` are the server's own,
    which hold for every model. Raises ConfigError with every fault at once, and what ``check``
    raises of the model; then nothing is left of an archive that was unpacked for it.
    """
    environ = os.environ if environ is None else environ
    host = detect_host(environ) if host is None else host
    problems = Problems()
    invocation = parse_command_line(argv, problems)
    examination = _Examination(invocation, environ, host, problems, None, True)
    try:
        model = examination.add(entry, arguments)
        problems.raise_errors()
        assert model is not None, "a model that isn't listed is an error"
        if check is not None:
            check(model)
    except BaseException:
        examination.archives.discard()
        raise
    return model, tuple(map(str, problems.warnings))


class _Examination:
    def __init__(
        self,
        invocation: Invocation,
        environ: Mapping[str, str],
        host: Host,
        problems: Problems,
        default_model: Path | None,
        fetches: bool,
    ) -> None:
        self.fetches = fetches
        self.default_model = default_model
        self.invocation = invocation
        self.environ = environ
        self.host = host
        self.problems = problems
        self.shared: list[Setting] = []
        self.tgi = invocation.tgi or (not invocation.models and is_tgi(environ))

    def run(self) -> Report:
        server, shared = self._read_sources()
        listed = list_models(
            self.invocation,
            server,
            shared,
            self.environ,
            self.archives,
            self.problems,
            default_model=self.default_model,
        )
        examined = [self._model(model) for model in listed]
        self._check_names([model for model, _ in examined], listed)
        if not self.server.allow_custom_code:
            for model, _ in examined:
                check_downloaded(model, self.problems)
        check_tgi_server(server, self.problems)
        rows = server_rows(server, self.problems)
        return Report(
            self.server,
            rows,
            tuple(model for model, _ in examined),
            tuple(lines for _, lines in examined),
            tuple(self.problems.items),
            self.problems.errors,
            self.problems.warnings,
        )

    def add(self, entry: ModelEntry, arguments: Mapping[str, str]) -> ModelConfig | None:
        """Examine one more model; what names the server's own models doesn't count for it."""
        self._read_sources()
        self.shared = [setting for setting in self.shared if setting.key not in _NAMES]
        listed = list_entry(entry, self.archives, self.problems)
        if listed is None:
            return None
        own = (Setting(k, text, Rank.ENDPOINT, entry.where) for k, text in arguments.items())
        model, _ = self._model(replace(listed, settings=(*listed.settings, *own)))
        return model

    def _read_sources(self) -> tuple[Values, Values]:
        """Read every source but the models' own files: the server's values, and the shared ones."""
        settings = [
            *read_server_file(self.invocation.config_file, self.environ, self.problems),
            *read_environment(self.environ, self.problems, tgi=self.tgi),
            *self.invocation.settings,
        ]
        server_settings, self.shared = _split(settings)
        strict = self.invocation.strict
        server = merge(server_settings, self.problems, strict=strict)
        shared = merge(self.shared, self.problems, strict=strict)
        self.server = server_config(server, self.problems, tgi=self.tgi)
        features = re.split("[, ]+", str(server.get("features") or "").lower())
        self.features = tuple(filter(None, features))
        self.archives = Archives(
            download_root(self.server, self.environ),
            self.server.model_url_pattern,
            offline=self.server.offline,
            fetches=self.fetches,
            limits=Limits(self.server.max_archive_bytes, self.server.max_archive_bytes),
        )
        return server, shared

    def _check_names(self, models: Sequence[ModelConfig], listed: Sequence[Listed]) -> None:
        """Requests name the model they are for, so that each needs a name of its own."""
        seen: set[tuple[str, str | None]] = set()
        for model, source in zip(models, listed, strict=True):
            if (model.name, model.version) in seen:
                where = model.where("option.modelName")
                self.problems.error(
                    source.entry.where if where == "default" else where,
                    f"two models are named {model.name!r}; give each its own name "
                    "(NAME=PATH in load_models, or option.modelName in its serving.properties)",
                )
            seen.add((model.name, model.version))

    def _model(
        self, listed: Listed, *, prefer_native: bool | None = None
    ) -> tuple[ModelConfig, tuple[Row, ...]]:
        values = self._values(listed)
        rewrite(values, self.problems)
        source = find_source(values, listed, self.problems)
        here = noted_directory(source, self.server, self.environ, self.problems)
        directory = here or listed.directory
        own_adapter = find_own_adapter(source, directory, self.problems)
        if own_adapter is not None:
            source = own_adapter.base
            directory = noted_directory(source, self.server, self.environ, self.problems)
        files = read_model_files(directory, self.problems)
        refuse_others_files(values, listed, directory)
        handler = find_handler(values, listed.directory, self.problems)
        check_formatter(handler, values, self.problems)
        written = written_for(
            values,
            files,
            handler,
            tgi=self.tgi and listed.directory is None,
            on_neuron=self.host.is_neuron,
            features=self.features,
        )
        subject = Subject(values, written, files, self.problems)
        check(subject)
        if written.system == "tgi":
            check_tgi(subject, self.host)
        decision = dispatch(
            written,
            values,
            files,
            self.host,
            self.problems,
            prefer_native=self.invocation.prefer_native if prefer_native is None else prefer_native,
        )
        if decision.missing:
            instead = self._instead(listed, decision)
            if isinstance(instead, tuple):
                return instead
            key = decision.key
            self.problems.error(values.where(key) if key else "", decision.refusal(instead), key)
        placement = place(
            values,
            self.host,
            decision.backend,
            written.system,
            Problems() if decision.missing else self.problems,
            mpi_mode=written.mpi_mode,
            is_demo=listed.directory is not None and listed.directory is self.default_model,
        )
        if runs_in_engine(decision.backend):
            ignore_for_device(values, placement, self.problems)
        if decision.backend == "lmi":
            if written.system == "trtllm":
                quantise_as_trtllm(values, files, placement)
            refuse_other_quantisations(values, files)
            refuse_for_device(values, placement)
        elif decision.backend in ("trtllm", "neuron"):
            ignore_stored_quantisation(values, files)
        lora = lora_settings(
            values,
            decision.backend,
            written.system,
            listed.directory,
            directory,
            self.problems,
            own_adapter,
        )
        speculation = None
        if decision.backend == "lmi":
            speculation = speculation_settings(values, self.problems)
        rows = model_rows(values, decision.backend, written.system, self.problems)
        rows += () if lora is None else lora.rows(directory)
        if files.requirements is not None and handler is None:
            why = "the lmi engine runs no code of the model"
            if decision.backend != "lmi":
                why = "what the model's code needs must be installed beside the server"
            self.problems.warn(str(files.requirements), f"is not installed: {why}")
        model = self._config(
            listed, values, source, files, written, decision, placement, lora, speculation
        )
        code = model.custom_code
        return model, rows + withheld_rows(() if code is None else code.withheld)

    def _instead(
        self, listed: Listed, decision: Decision
    ) -> tuple[ModelConfig, tuple[Row, ...]] | str:
        """The model on our engine, if that honours every key that is set, in place of a library
        that isn't installed; else the way out."""
        if not decision.stand_in or self.invocation.strict:
            native = "; --prefer-native serves it with the lmi engine"
            return native if decision.stand_in else ""
        before, self.problems = self.problems, Problems()
        try:
            model, rows = self._model(listed, prefer_native=True)
            trial = self.problems
        finally:
            self.problems = before
        errors = [str(error) for error in trial.errors if error not in before.items]
        if errors:
            return f"; the lmi engine could serve it, but for this: {'; '.join(errors)}"
        lacking = [*model.passed_on]
        lacking += [k for k, v in model.values.items() if effect_of_value(v, "lmi").is_missing]
        if lacking:
            return f"; --prefer-native serves it with the lmi engine, without {', '.join(lacking)}"
        for problem in trial.items:
            self.problems.add(problem)
        title = BACKENDS[decision.backend].title
        note = f"{title} is not installed, and the lmi engine honours every key that is set"
        self.problems.warn(
            model.where(decision.key) if decision.key else "",
            f"{note}: it serves the model; {decision.missing}, or refuse such models by --strict",
            decision.key,
        )
        return replace(model, reason=f"{decision.reason}; {note}"), rows

    def _again(self, listed: Listed) -> ModelConfig:
        self.problems = Problems()
        model, _ = self._model(listed)
        self.problems.raise_errors()
        return model

    def _values(self, listed: Listed) -> Values:
        own = list(listed.settings)
        if listed.directory is not None:
            path = listed.directory / PROPERTIES
            if is_file(path):
                own += self._own(path)
        shared = [s for s in self.shared if s.where not in HUB_ONLY]
        return merge((*shared, *own), self.problems, strict=self.invocation.strict)

    def _own(self, path: Path) -> list[Setting]:
        settings = []
        for setting in read_properties(path, Rank.FILE, self.problems):
            option = BY_KEY.get(setting.key)
            if option is not None and option.scope == "server":
                self.problems.warn(
                    setting.where,
                    f"{setting.key} is a key of the server; it has no effect in {PROPERTIES}, set "
                    f"{option.variable}",
                    setting.key,
                )
            else:
                settings.append(setting)
        return settings

    def _config(
        self,
        listed: Listed,
        values: Values,
        source: ModelSource,
        files: ModelFiles,
        written: WrittenFor,
        decision: Decision,
        placement: Placement,
        lora: LoraSettings | None,
        speculation: SpeculationConfig | None,
    ) -> ModelConfig:
        engine = library = custom_code = None
        backend, system = decision.backend, written.system
        name = str(values.get("option.modelName") or listed.entry.name)
        if runs_in_engine(backend):
            engine = engine_settings(
                values, backend, name, system, placement, self.problems, speculation
            )
        if engine is not None:
            check_engine(engine, backend, values, files, self.problems)
        if is_library(backend):
            library = library_settings(values, backend, name, system, placement)
        handler = written.handler
        if handler is not None and listed.directory is not None:
            custom_code = custom_code_settings(
                handler,
                values,
                listed.directory,
                self.host,
                self.problems,
                name=name,
                withheld=withheld(values, self.environ, tgi=self.tgi),
            )
        formatter = values.get("option.output_formatter")
        if handler is not None and handler.output_formatter is not None:
            formatter = None
        max_input = values.get("option.max_input_tokens") or values.get("option.max_input_len")
        return ModelConfig(
            name=name,
            version=listed.entry.version,
            source=source,
            directory=listed.directory,
            archive_url=listed.entry.url if listed.is_downloaded else None,
            system=system,
            backend=backend,
            reason=decision.reason,
            entry_point=written.entry_point,
            handler=written.handler,
            mpi_mode=written.mpi_mode,
            placement=placement,
            files=files,
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
            again=partial(self._again, listed),
        )


def _split(settings: Sequence[Setting]) -> tuple[list[Setting], list[Setting]]:
    """Part the settings into those of server keys and the rest."""
    of_server = {key for key, option in BY_KEY.items() if option.scope == "server"}
    server = [setting for setting in settings if setting.key in of_server]
    return server, [setting for setting in settings if setting.key not in of_server]
