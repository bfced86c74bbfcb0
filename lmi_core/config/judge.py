"""Whether a model can be served: the one judge of ``explain``, ``serve`` and the management API."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lmi_core.config.artefacts.cache import readable_directory
from lmi_core.config.artefacts.fetch import check_source
from lmi_core.config.artefacts.hub import find_in_cache, hub_cache
from lmi_core.config.artefacts.local import check_adapter
from lmi_core.config.artefacts.model_source import ModelSource
from lmi_core.config.model_config import ModelConfig
from lmi_core.config.problem import Problem, Problems
from lmi_core.config.secure_mode import check_secure
from lmi_core.config.targets.engine_settings import fields_of
from lmi_core.config.targets.placed_subject import DEGREE
from lmi_core.config.targets.placement_on_cpu import COPY_KEYS
from lmi_core.config.targets.rotary_settings import ROTARY_KEYS
from lmi_core.config.targets.server_config import ServerConfig
from lmi_core.errors import MissingExtraError, UserError
from lmi_core.settings.placement import VISIBLE
from lmi_core.weights.checkpoint import weight_files

if TYPE_CHECKING:
    from lmi_core.models.found_model import FoundModel

_Check = Callable[[], "tuple[str, ...] | FoundModel | None"]
"""Raises UserError for what can't be served; what it returns are warnings, or a model that has
some."""


ONLY_CHATS = "chats are refused, everything else works"
"""Where a chat template is broken."""


class Verdict(NamedTuple):
    """On a model: what speaks against it, with warnings, and what was read of its files."""

    problems: tuple[Problem, ...]
    found: FoundModel | None = None
    """For our engine, to load; None: its files aren't here, or have faults."""


def judge(model: ModelConfig, server: ServerConfig, environ: Mapping[str, str]) -> Verdict:
    """Return everything that speaks against serving ``model``, by what is on this machine, and
    warnings of what is served otherwise than its files say.

    That is its files' settings and headers, packages and the memory that it may use; devices are
    judged where they are chosen (``targets/placement.py``).
    Damage inside of tensors shows later, while they are loaded: a NaN or an infinity among weights
    or scales is refused by its tensor's name.
    """
    problems, found = Problems(), None
    for check in _checks(model, server, environ):
        try:
            result = check()
            if isinstance(result, tuple | None):
                notes = result or ()
            else:
                found, notes = result, result.notes
            for note in notes:
                problems.warn(str(model.source.location), note)
        except UserError as error:
            key = _key_of(model, error.field)
            problems.error("" if key is None else model.where(key), str(error), key)
        except OSError as error:
            problems.error(str(error.filename or ""), f"can't be read: {error.strerror or error}")
    return Verdict(tuple(problems.items), found)


def _key_of(model: ModelConfig, field: str | None) -> str | None:
    """The key that was written for what is at fault: itself, or what sets that field."""
    if field is None or field in model.values:
        return field
    given = sorted(model.values.values(), key=lambda value: value.setting.precedence)
    keys = [value.option.key for value in given if field in fields_of(value, model.backend)]
    return keys[-1] if keys else None


def judge_server(server: ServerConfig) -> tuple[Problem, ...]:
    """The same of the server as a whole."""
    problems = Problems()
    try:
        server.tls_context()
    except UserError as error:
        problems.error("", str(error), error.field)
    return problems.errors


def _checks(
    model: ModelConfig, server: ServerConfig, environ: Mapping[str, str]
) -> Iterator[_Check]:
    yield lambda: check_secure(model, _directories(model, server, environ), environ)
    yield lambda: _check_code(model)
    if model.backend == "handler":
        return
    directory = _whole(model.source, server, environ)
    if directory is None or model.backend != "lmi":  # the lmi engine's is read below
        yield lambda: check_source(model.source, server, environ)
    named = () if model.lora is None else model.lora.named
    for adapter in named:
        yield lambda adapter=adapter: check_source(adapter.source, server, environ, check_adapter)  # type: ignore[misc]
    if model.draft is not None:
        draft = model.draft.source
        yield lambda: check_source(draft, server, environ)
    yield lambda: _check_device(model)
    yield lambda: _check_copies(model)
    yield lambda: _check_template(model, directory)
    if directory is None:
        return
    yield lambda: _check_sampling(model, directory)
    if model.backend == "lmi":
        yield lambda: _check_native(model, directory, server, environ)
    else:
        yield lambda: _check_tokenizer(model, directory)
    if model.backend == "transformers":
        yield lambda: _check_transformers(model, directory)


def _whole(source: ModelSource, server: ServerConfig, environ: Mapping[str, str]) -> Path | None:
    """Where a model's files are, if all of them are here."""
    if source.kind == "hub" and not source.file:
        cache = server.hub_cache or hub_cache(environ)
        return find_in_cache(source.location, source.revision, cache)
    directory = readable_directory(source, server, environ)
    if directory is None or not (directory / "config.json").is_file():
        return None
    return directory if weight_files(directory) else None


def _directories(
    model: ModelConfig, server: ServerConfig, environ: Mapping[str, str]
) -> Iterator[Path]:
    """Of a model's files, its adapters', its draft model's and its code's, those that are here."""
    named = () if model.lora is None else model.lora.named
    sources = [model.source, *(adapter.source for adapter in named)]
    if model.draft is not None:
        sources.append(model.draft.source)
    for source in sources:
        if (directory := readable_directory(source, server, environ)) is not None:
            yield directory
    if model.custom_code is not None:
        yield model.custom_code.model_dir


def _check_code(model: ModelConfig) -> None:
    """What the model's own code imports, unless its process has packages or an interpreter of its
    own."""
    code = model.custom_code_config()
    if code is None or code.python is not None or "PYTHONPATH" in code.env:
        return
    if not (code.model_dir / "requirements.txt").is_file():
        from lmi_core.config.artefacts.handler_imports import check_installed

        check_installed(code.path, code.model_dir)


def _check_copies(model: ModelConfig) -> None:
    if (code := model.custom_code_config()) is not None:
        _refuse_copies(model, f"the formatters in {code.path.name}")
    if model.is_on_ray and importlib.util.find_spec("ray") is None:
        raise MissingExtraError("option.on=ray", "ray")


def _refuse_copies(model: ModelConfig, company: str) -> None:
    if model.num_processes is None:
        return
    placement = model.placement
    if placement.has_ranks and placement.num_copies == 1 and not model.is_on_ray:
        degree, ids = placement.tensor_parallel_degree, placement.device_ids
        alone = f" with {VISIBLE['cuda']}={ids[0][0]}" if ids else ""
        raise UserError(
            f"{degree} ranks ({DEGREE}={degree}) don't go with {company}: such a model is served "
            f"by one process in this version; write {DEGREE}=1{alone}",
            field=DEGREE,
        )
    given = [key for key in COPY_KEYS if key in model.values]
    key = "option.on" if model.is_on_ray else next(iter(given), COPY_KEYS[0])
    what, way = f" ({key}={model.get(key)})", f"leave out {key}"
    if placement.device_ids and COPY_KEYS[0] not in model.values:
        what, way = ", one on each GPU,", "start the server with CUDA_VISIBLE_DEVICES=0"
    raise UserError(
        f"{model.num_processes} copies{what} don't go with {company}: such a model is served by "
        f"one engine in this version; {way}",
        field=key,
    )


def _check_device(model: ModelConfig) -> None:
    """What placement doesn't judge."""
    if model.placement.device == "torch-cpu" and importlib.util.find_spec("torch") is None:
        raise MissingExtraError("device=torch-cpu", "cuda")
    spread = getattr(model.engine and model.engine.config, "device_map", None)
    if spread is not None and importlib.util.find_spec("accelerate") is None:
        raise MissingExtraError("spreading a model's layers over devices", "transformers")


def _check_template(model: ModelConfig, directory: Path | None) -> tuple[str, ...]:
    """That of the options, and the model's own; what is broken in it."""
    if directory is None and model.get("option.tokenizer_config_path") is None:
        return ()
    from lmi_core.text.chat import ChatTemplate

    files = directory or Path()
    config_path = model.file("option.tokenizer_config_path", files)
    template = ChatTemplate.load(
        files,
        template=None if directory is None else model.file("option.chat_template", files),
        config_path=None if config_path is None else Path(config_path),
    )
    faults = [] if template is None else template.faults()
    return tuple(f"{fault}; {ONLY_CHATS}" for fault in faults)


def _check_sampling(model: ModelConfig, directory: Path) -> tuple[str, ...]:
    from lmi_core.config.targets.sampling_defaults import sampling_note

    return sampling_note(model, directory)


def _check_native(
    model: ModelConfig, directory: Path, server: ServerConfig, environ: Mapping[str, str]
) -> FoundModel:
    from lmi_core.adapters.adapter import check_adapter_fits
    from lmi_core.models.draft_model import FIELD as DRAFT_FIELD
    from lmi_core.models.found_model import find_model
    from lmi_core.runners.cpu.cpu_model import find_cpu_model
    from lmi_core.runners.cpu.memory_needs import check_copies, check_memory
    from lmi_core.text.tokenizer import Tokenizer

    draft = None if model.draft is None else _whole(model.draft.source, server, environ)
    config = model.engine_config(directory, _whole_adapters(model, server, environ), draft)
    if draft is None and model.speculation is not None:
        config = replace(config, speculation=model.speculation.engine(None))
    try:
        is_here = config.device == "cpu" and not model.is_on_ray
        found = find_cpu_model(config) if is_here else find_model(config)
    except UserError as error:
        if error.field == DRAFT_FIELD and model.draft is not None:
            error.field = model.draft.key
        elif error.field is not None and error.field.startswith("rope_"):
            error.field = next(filter(model.values.__contains__, ROTARY_KEYS), error.field)
        raise
    if is_here:
        check_memory(found)
    if model.placement.num_copies > 1 and is_here:
        check_copies(found, model.placement.num_copies)
    found.quantized.check()
    if config.lora is not None:
        for _, path in config.lora.adapters:
            check_adapter_fits(path, found.spec, max_rank=config.lora.max_rank)
    tokenizer = Tokenizer.load(directory, vocab_size=found.spec.vocab_size)
    return replace(found, tokenizer=tokenizer)


def _whole_adapters(
    model: ModelConfig, server: ServerConfig, environ: Mapping[str, str]
) -> list[tuple[str, Path]]:
    """The named ones that are here."""
    found = []
    for adapter in () if model.lora is None else model.lora.named:
        path = readable_directory(adapter.source, server, environ)
        with contextlib.suppress(UserError):
            if path is not None:
                check_adapter(path)
                found.append((adapter.name, path))
    return found


def _check_tokenizer(model: ModelConfig, directory: Path) -> None:
    """Transformers converts what has another form; that shows only with it."""
    from lmi_core.text.tokenizer import Tokenizer

    if (directory / "tokenizer.json").exists() or model.backend != "transformers":
        Tokenizer.load(directory).close()


def _check_transformers(model: ModelConfig, directory: Path) -> None:
    from lmi_core.adapters.text_models import (
        check_bitsandbytes,
        check_peft,
        check_torch,
        objection_to,
    )
    from lmi_core.files import read_json_object
    from lmi_core.settings.transformers_config import TransformersConfig

    check_torch()
    config = read_json_object(directory / "config.json")
    engine = None if model.engine is None else model.engine.config
    if isinstance(engine, TransformersConfig) and engine.bitsandbytes is not None:
        check_bitsandbytes()
    if model.lora is not None:
        check_peft()
    reason = objection_to(config, trust_remote_code=model.trust_remote_code)
    if reason is not None:
        raise UserError(f"{directory}: {reason}", field="option.trust_remote_code")
