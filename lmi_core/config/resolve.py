"""From sources to frozen configurations: the one pipeline behind ``serve`` and ``explain``."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lmi_core.config.artefacts.archives import Archives
from lmi_core.config.artefacts.cache import download_root
from lmi_core.config.artefacts.unpack import Limits
from lmi_core.config.model_config import ModelConfig
from lmi_core.config.problem import Problem, Problems
from lmi_core.config.resolve_model import Surroundings, resolve_model
from lmi_core.config.rows import Row, server_rows
from lmi_core.config.sources.command_line import Invocation, parse_command_line
from lmi_core.config.sources.environment import is_tgi, read_environment
from lmi_core.config.sources.load_models import ModelEntry
from lmi_core.config.sources.merge import Values, merge
from lmi_core.config.sources.models import (
    Listed,
    list_entry,
    list_models,
)
from lmi_core.config.sources.origin import Precedence, Setting
from lmi_core.config.sources.properties import read_server_file
from lmi_core.config.system import FEATURES
from lmi_core.config.table import BY_KEY
from lmi_core.config.targets.host import Host, detect_host
from lmi_core.config.targets.server_config import ServerConfig, server_config
from lmi_core.config.tgi_checks import check_tgi_server
from lmi_core.settings.field_checks import is_utf8

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
        """Read every source but the models' own files."""
        self.invocation = invocation
        self.environ = environ
        self.problems = problems
        tgi = invocation.tgi or (not invocation.models and is_tgi(environ))
        settings = [
            *read_server_file(invocation.config_file, environ, problems),
            *read_environment(environ, problems, tgi=tgi),
            *invocation.settings,
        ]
        own, shared = _split(settings)
        self.server_values = merge(own, problems, strict=invocation.strict)
        self.shared_values = merge(shared, problems, strict=invocation.strict)
        server = server_config(self.server_values, problems, tgi=tgi)
        self.around = Surroundings(
            invocation=invocation,
            environ=environ,
            host=host,
            server=server,
            shared=tuple(shared),
            features=_features(self.server_values, problems),
            default_model=default_model,
            tgi=tgi,
        )
        self.archives = Archives(
            download_root(server, environ),
            server.model_url_pattern,
            offline=server.offline,
            fetches=fetches,
            limits=Limits(server.max_archive_bytes, server.max_archive_bytes),
        )

    def run(self) -> Report:
        around, problems = self.around, self.problems
        listed = list_models(
            self.invocation,
            self.server_values,
            self.shared_values,
            self.environ,
            self.archives,
            problems,
            default_model=around.default_model,
        )
        examined = [resolve_model(model, around, problems) for model in listed]
        self._check_names([model for model, _ in examined], listed)
        if not around.server.allow_custom_code:
            for model, _ in examined:
                _check_downloaded(model, problems)
        check_tgi_server(self.server_values, problems)
        rows = server_rows(self.server_values, problems)
        return Report(
            around.server,
            rows,
            tuple(model for model, _ in examined),
            tuple(lines for _, lines in examined),
            tuple(problems.items),
            problems.errors,
            problems.warnings,
        )

    def add(self, entry: ModelEntry, arguments: Mapping[str, str]) -> ModelConfig | None:
        """Examine one more model; what names the server's own models doesn't count for it."""
        listed = list_entry(entry, self.archives, self.problems)
        if listed is None:
            return None
        shared = tuple(setting for setting in self.around.shared if setting.key not in _NAMES)
        own = (Setting(k, text, Precedence.ENDPOINT, entry.where) for k, text in arguments.items())
        listed = replace(listed, settings=(*listed.settings, *own))
        model, _ = resolve_model(listed, replace(self.around, shared=shared), self.problems)
        return model

    def _check_names(self, models: Sequence[ModelConfig], listed: Sequence[Listed]) -> None:
        """Requests name the model they are for, so that each needs a name of its own, which answers
        can hold."""
        seen: set[tuple[str, str | None]] = set()
        for model, source in zip(models, listed, strict=True):
            where = model.where("option.modelName")
            where = source.entry.where if where == "default" else where
            if not is_utf8(model.name):
                self.problems.error(
                    where, f"the model's name {model.name!r} isn't valid UTF-8; give it another"
                )
            if (model.name, model.version) in seen:
                self.problems.error(
                    where,
                    f"two models are named {model.name!r}; give each its own name "
                    "(NAME=PATH in load_models, or option.modelName in its serving.properties)",
                )
            seen.add((model.name, model.version))


def _features(server: Values, problems: Problems) -> tuple[str, ...]:
    """The libraries of the container, of which some decide who serves models."""
    features = re.split("[, ]+", str(server.get("features") or "").lower())
    for name in filter(None, features):
        if name not in FEATURES:
            problems.warn(
                server.where("features"),
                f"{name[:40]!r} is none of {', '.join(FEATURES)}; it has no effect",
                "features",
            )
    return tuple(filter(None, features))


def _check_downloaded(model: ModelConfig, problems: Problems) -> None:
    """Note code that came from another machine with its model."""
    if model.archive_url is not None and model.code is not None:
        problems.error(
            model.archive_url[:200],
            f"the model {model.name} was downloaded with code of its own ({model.code}), which "
            "runs only with --allow-custom-code (SERVING_ALLOW_CUSTOM_CODE)",
        )


def _split(settings: Sequence[Setting]) -> tuple[list[Setting], list[Setting]]:
    """Part the settings into those of server keys and the rest."""
    of_server = {key for key, option in BY_KEY.items() if option.scope == "server"}
    server = [setting for setting in settings if setting.key in of_server]
    return server, [setting for setting in settings if setting.key not in of_server]
