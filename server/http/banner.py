"""What the server prints once it listens: what serves, in which memory, its routes if asked."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote

from lmi_core.copies.copies import Copies
from lmi_core.engine.stats import EngineInfo
from lmi_core.units import megabytes
from lmi_server.dialects.routes import Route
from lmi_server.models.backend import Generates
from lmi_server.models.model import ModelState, ServedModel

_EXAMPLE = '{"inputs": "Once upon a time", "parameters": {"max_new_tokens": 64}, "stream": true}'
_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


def banner(
    url: str,
    models: Sequence[ServedModel],
    management_url: str | None = None,
    *,
    scope: str = "",
) -> str:
    """The URL and what answers there. ``scope``: who else reaches the URL's port."""
    lines = [f"Listening on {url}{scope}"]
    if management_url is not None:
        lines.append(f"Management on {management_url}")
    for model in models:
        lines += _facts(model) if len(models) == 1 else [_summary(model)]
    return "\n".join([*lines, f"  ready    in {seconds_since_start():.2f} s"])


def route_list(routes: Sequence[Route], url: str, *, needs_key: bool = False) -> str:
    """A line per route and a ``curl`` command that works."""
    width = max((len(route.path) for route in routes), default=0)
    lines = [
        f"  {'any' if route.method == '*' else route.method:<6} {route.path:<{width}}  "
        f"{route.purpose}"
        for route in routes
    ]
    lines += ["Try:", f"  curl -N {url}/invocations -H 'Content-Type: application/json' \\"]
    if needs_key:
        lines += ["    -H 'Authorization: Bearer KEY' \\"]
    lines += [f"    -d '{_EXAMPLE}'"]
    return "\n".join(lines)


def _facts(model: ServedModel) -> list[str]:
    lines = [f"  model    {_title(model)}"]
    if (info := _info(model)) is None:
        return lines
    runner = info.runner
    formats = " and ".join(filter(None, (runner.dtype, runner.quantize)))
    kernels = runner.kernels or (runner.instruction_set and f"{runner.instruction_set} kernels")
    s = "" if runner.num_threads == 1 else "s"
    threads = f"{runner.num_threads} thread{s}" if runner.device == "cpu" else runner.device
    engine = ", ".join(
        filter(None, (model.recipe.engine, formats, kernels, _copies(model), threads))
    )
    num_tokens = runner.num_blocks * runner.block_size
    lines.append(f"  engine   {engine}")
    if runner.draft_model:
        lines.append(f"  drafts   by {runner.draft_model}")
    cache = f"; the KV cache ({runner.kv_dtype}) holds {num_tokens}" if num_tokens else ""
    lines.append(f"  context  {info.max_total_tokens} tokens{cache}")
    parts = {
        "weights": runner.weight_bytes,
        "KV up to": runner.kv_cache_bytes,
        "steps": runner.arena_bytes,
    }
    total = sum(parts.values())
    if total:
        listed = ", ".join(f"{name} {megabytes(count)}" for name, count in parts.items() if count)
        lines.append(f"  memory   {megabytes(total)}{_of_all(runner.device)}: {listed}")
    return lines


def _info(model: ServedModel) -> EngineInfo | None:
    """None: it isn't ready, or answers by code of its own."""
    if model.state is not ModelState.READY or model.loaded is None:
        return None
    backend = model.loaded.backend
    return backend.info if isinstance(backend, Generates) else None


def _copies(model: ServedModel) -> str:
    """How many processes serve it, where there are some."""
    backend = None if model.loaded is None else model.loaded.backend
    return f"{len(backend.copies)} copies" if isinstance(backend, Copies) else ""


def _summary(model: ServedModel) -> str:
    line = f"  model    {_title(model)}"
    if (info := _info(model)) is None:
        return line
    runner = info.runner
    num_bytes = runner.weight_bytes + runner.kv_cache_bytes + runner.arena_bytes
    named = (" ".join(filter(None, (model.recipe.engine, runner.dtype))), _copies(model))
    facts = f"{info.max_total_tokens} tokens, {megabytes(num_bytes)}"
    return f"{line}; {', '.join(filter(None, named))}, {facts}"


def _title(model: ServedModel) -> str:
    recipe = model.recipe
    source = recipe.url.rstrip("/")
    if source.startswith("file://"):
        source = unquote(source.removeprefix("file://"))
    if source.startswith(f"{Path.cwd()}{os.sep}"):
        source = os.path.relpath(source)
    state = "" if model.state is ModelState.READY else f", {model.state}"
    code = ", answered by its own code" if recipe.has_code else ""
    return f"{recipe.label}{f' from {source}' if source else ''}{code}{state}"


def _of_all(device: str) -> str:
    """The memory that there is for a model on the CPU."""
    if device != "cpu":
        return ""
    from lmi_core import _native

    return f" of {megabytes(_native.cpu_info()['memory_limit_bytes'])}"


def seconds_since_start() -> float:
    """How long ago this process was created."""
    # proc(5): the 22nd field, in ticks since boot; the second one may hold spaces and parentheses.
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


def scope_of(host: str) -> str:
    """What the banner adds about the address that is listened on."""
    return f" (and on every other address, {host})" if host in _ANY_ADDRESS and host else ""


def reachable_url(host: str, port: int, *, is_https: bool) -> str:
    """The URL by which this machine reaches a server that listens on ``host``."""
    host = _ANY_ADDRESS.get(host, host)
    scheme = "https" if is_https else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
