"""Which implementation of each op runs on a torch device.

``LMI_OPS`` forces one, for all ops or per op: ``LMI_OPS=torch``, ``LMI_OPS=attention:triton``,
``LMI_OPS=torch,attention:triton``. ``native`` are the CUDA kernels of csrc/cuda, which run unasked
on GPUs that they are proven on (``PROVEN``). ``flash`` is the flash-attn package, for prefills;
unasked it runs where it is allowed and measured faster (flash_choice.py). The CPU engine's own
kernels are not chosen here.

``launch`` is no op, but may be named like one: who launches the kernels, C++ (``native``, which
goes with all ops' being native) or Python.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from lmi_core.errors import MissingExtraError, UserError
from lmi_core.ops.kernels import library_file

_log = logging.getLogger(__name__)

VARIABLE = "LMI_OPS"
IMPLEMENTATIONS = {
    "linear": ("torch", "native"),
    "linear_packed": ("triton", "torch", "native"),
    "linear_quantized": ("triton", "torch", "native"),
    "rms_norm": ("triton", "torch", "native"),
    "norm": ("triton", "torch", "native"),
    "norm_heads": ("triton", "torch", "native"),
    "gated_activation": ("triton", "torch", "native"),
    "activation": ("triton", "torch", "native"),
    "soft_cap": ("triton", "torch", "native"),
    "clip": ("triton", "torch", "native"),
    "route": ("triton", "torch", "native"),
    "group_rows": ("triton", "torch", "native"),
    "grouped_linear": ("triton", "torch", "native"),
    "head_linear": ("triton", "torch", "native"),
    "rope_cache_write": ("triton", "torch", "native"),
    "attention": ("triton", "torch", "native", "flash"),
    "sample": ("torch", "native"),
}
"""What there is of each op, the preferred one first."""
_FILES = {
    "linear_packed": "linear",
    "rms_norm": "norm",
    "norm_heads": "norm",
    "gated_activation": "activation",
    "rope_cache_write": "rope",
    "sample": "sampling",
    "soft_cap": "activation",
    "clip": "activation",
    "route": "experts",
    "group_rows": "experts",
    "grouped_linear": "experts",
    "head_linear": "experts",
}
"""In which each package has an op, where that isn't called as the op is."""
LAUNCH = "launch"
PROVEN = ((9, 0),)
"""Compute capabilities of GPUs on which the native kernels run unasked. On an H100 they ran once:
all comparisons of ops, memcheck, captured steps and the step list's runner passed."""
_MODULES = {
    "flash": "lmi_core.ops.kernels.flash",
    "native": "lmi_core.ops.kernels.cuda.{file}",
    "torch": "lmi_core.ops.kernels.torch_ops.{file}",
    "triton": "lmi_core.ops.kernels.triton.{file}",
    "invariant": "lmi_core.ops.kernels.triton.invariant",
    "by row": "lmi_core.ops.kernels.torch_ops.{file}",
    "native tiles": "lmi_core.ops.kernels.cuda.{file}",  # NATIVE_TILES
}
"""``by row``: torch a row at a time, so that no row's result depends on the rows beside it, since a
library's sums may go another way for another shape. Whole forward passes run so, and ``sample``.
``native tiles``: few rows, and rows alone, by the kernel for many."""
_KNOWN = ("native", "triton", "torch", "flash")
_NATIVE_INVARIANT = (
    *("rms_norm", "norm", "norm_heads", "gated_activation", "activation", "soft_cap", "clip"),
    *("linear_packed", "linear_quantized", "rope_cache_write", "route", "group_rows"),
)
"""Ops of whose native kernels a row's bits don't depend on other rows: one algorithm for any number
of them, one order of sums (int4, never unpacked), or, with int8 weights, sums that are exact."""
NATIVE_TILES = "native tiles"
_TILED = {"linear": "in_tiles", "grouped_linear": "in_tiles", "attention": "prefills_all"}
"""Ops whose native kernels for many rows take any number, and the argument that asks for it."""
_INVARIANT = (
    *("linear", "linear_packed", "linear_quantized"),
    *("grouped_linear", "head_linear", "attention"),
)
"""Ops whose Triton kernels for any number of rows are not those that are fastest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """One function per op, as ``torch_ops`` documents it whatever implements it, and what was
    chosen."""

    chosen: Mapping[str, str]
    linear: Callable[..., Any]
    linear_packed: Callable[..., Any]
    linear_quantized: Callable[..., Any]
    rms_norm: Callable[..., Any]
    norm: Callable[..., Any]
    norm_heads: Callable[..., Any]
    gated_activation: Callable[..., Any]
    activation: Callable[..., Any]
    soft_cap: Callable[..., Any]
    clip: Callable[..., Any]
    route: Callable[..., Any]
    group_rows: Callable[..., Any]
    grouped_linear: Callable[..., Any]
    head_linear: Callable[..., Any]
    rope_cache_write: Callable[..., Any]
    attention: Callable[..., Any]
    sample: Callable[..., Any]

    @property
    def unpacks_weights(self) -> bool:
        """Whether ``linear_packed`` takes room to unpack weights into."""
        return self.chosen["linear_packed"] in ("native", "triton") and not self._is_tiled

    @property
    def is_row_by_row(self) -> bool:
        """Whether forward passes run a token row at a time."""
        return self.chosen["linear"] == "by row"

    def refuse_in_native(self, op: str, what: str = "") -> None:
        """Raise UserError where native kernels for any company were asked for, which ``op`` (of
        ``what``) has none of."""
        if self._is_tiled:
            raise no_native_invariant(op, what)

    @property
    def _is_tiled(self) -> bool:
        return self.chosen["attention"] == NATIVE_TILES


def select(device_type: str, forced: str | None = None) -> dict[str, str]:
    """Op -> implementation for a torch device; ``forced`` None: what ``LMI_OPS`` says.

    A name without an op applies to every op that has it; the others keep the best they have but
    native kernels, which run unasked only where there is no such name. Without a GPU, Triton is
    used only where forced. Raises UserError for unknown names, for what an op, named, doesn't have,
    for Triton where it can't run, and for native kernels that are asked for and aren't built. Where
    the device can't run native kernels, the next best runs, and the log says so.
    """
    forced = os.environ.get(VARIABLE, "") if forced is None else forced
    asked = _asked(forced)
    chosen = {op: usable(op, device_type)[0] for op in IMPLEMENTATIONS}
    launch = "torch"
    if not names_all(forced) and why_not_native(device_type) is None:
        launch = "native"
        chosen |= {op: "native" for op, names in IMPLEMENTATIONS.items() if "native" in names}
    if asked.pop(LAUNCH, launch) == "native":
        chosen[LAUNCH] = "native"
    chosen |= asked
    if "triton" in chosen.values():
        _check_triton(device_type)
    if "native" in chosen.values():
        _check_native(device_type, chosen)
    if "flash" in chosen.values():
        _check_flash(device_type)
    return chosen


def _asked(forced: str | None) -> dict[str, str]:
    """Op, or LAUNCH -> what is asked for; UserError for what there isn't."""
    asked: dict[str, str] = {}
    for item in (os.environ.get(VARIABLE, "") if forced is None else forced).split(","):
        op, _, name = item.strip().rpartition(":")
        if not name and not op:
            continue
        if name not in _KNOWN:
            raise UserError(f"{VARIABLE} has {item.strip()!r}; known are {', '.join(_KNOWN)}")
        if op == LAUNCH and name == "triton":
            raise UserError(f"{VARIABLE}: {LAUNCH} is by native or torch, not by triton")
        if not op:
            asked |= {op: name for op, names in IMPLEMENTATIONS.items() if name in names}
        if op in ("", LAUNCH):
            asked[LAUNCH] = name
        elif op not in IMPLEMENTATIONS:
            known = ", ".join((*IMPLEMENTATIONS, LAUNCH))
            raise UserError(f"{VARIABLE} names the op {op!r}; known are {known}")
        elif name not in IMPLEMENTATIONS[op]:
            known = ", ".join(IMPLEMENTATIONS[op])
            raise UserError(f"{VARIABLE}: {op} has no {name} implementation; it has {known}")
        else:
            asked[op] = name
    return asked


def names_all(forced: str) -> bool:
    """Whether ``forced``, as ``LMI_OPS``, has a name without an op."""
    return any(item.strip() in _KNOWN for item in forced.split(","))


def asks_cpp() -> bool:
    """Whether ``LMI_OPS`` has C++ launch steps, which else only follows from the GPU."""
    return _asked(None).get(LAUNCH) == "native"


def check(forced: str) -> None:
    """UserError for what ``LMI_OPS`` can't say; without torch."""
    _asked(forced)


def why_not_native(device_type: str) -> str | None:
    """Why native kernels don't run there unasked; None: they do."""
    if device_type != "cuda":
        return "they run on CUDA devices"
    if library_file.find() is None:
        return library_file.missing()
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    import torch

    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no GPU"
    capabilities = map(torch.cuda.get_device_capability, range(torch.cuda.device_count()))
    capability = next((one for one in capabilities if one not in PROVEN), None)
    if capability is not None:
        proven = ", ".join(f"{major}.{minor}" for major, minor in PROVEN)
        own = ".".join(map(str, capability))
        return f"they are proven on compute capability {proven}, and a GPU here has {own}"
    from lmi_core.ops.kernels.cuda import library

    try:
        return library.load().unusable_because(device_type)
    except UserError as error:
        return str(error)


def select_for(device_type: str, *, is_deterministic: bool) -> dict[str, str]:
    """``select_invariant`` if so, else ``select``, with what ``LMI_OPS`` says."""
    return (select_invariant if is_deterministic else select)(device_type)


def launched_from_python(chosen: Mapping[str, str]) -> dict[str, str]:
    """What was chosen, but for native code that launches it."""
    return {op: name for op, name in chosen.items() if op != LAUNCH}


def select_invariant(device_type: str, forced: str | None = None) -> dict[str, str]:
    """Op -> implementation with results that don't depend on a row's company: Triton kernels where
    Triton runs, else torch a row at a time. ``forced`` as ``select``, but for all ops at once;
    native kernels have that of some ops, and models with others are refused as they are loaded.

    Raises UserError for single ops, and for kernels that can't run."""
    wanted = (os.environ.get(VARIABLE, "") if forced is None else forced).strip()
    if wanted not in ("", "triton", "torch", "native"):
        raise UserError(
            f"{VARIABLE}={wanted} doesn't go with deterministic=true, for which one package has "
            f"all kernels: set {VARIABLE} to triton, torch or native, or unset it",
            field="deterministic",
        )
    if wanted == "native":
        return _native_invariant(device_type)
    if wanted == "triton":
        _check_triton(device_type)
    if wanted == "torch" or (not wanted and usable("attention", device_type)[0] != "triton"):
        return dict.fromkeys(IMPLEMENTATIONS, "by row")
    chosen = dict.fromkeys(IMPLEMENTATIONS, "triton")
    return chosen | dict.fromkeys(_INVARIANT, "invariant") | {"sample": "by row"}


def _native_invariant(device_type: str) -> dict[str, str]:
    from lmi_core.ops.kernels.cuda import library

    kernels = library.load()
    if (reason := kernels.unusable_because(device_type)) is not None:
        raise UserError(f"{VARIABLE}=native: no CUDA kernels run ({reason})", field="deterministic")
    kernels.choose_launches()
    chosen = dict.fromkeys(_TILED, NATIVE_TILES) | dict.fromkeys(_NATIVE_INVARIANT, "native")
    return chosen | {"head_linear": "torch", "sample": "by row"}  # no graph has head_linear then


def no_native_invariant(op: str, what: str = "") -> UserError:
    """The error of a model that needs ``op`` (of ``what``)."""
    return UserError(
        f"{VARIABLE}=native doesn't go with deterministic=true for this model: native kernels of "
        f"{op}{what and f' ({what})'} give a row other bits in other company, or there are none: "
        f"set {VARIABLE} to triton or torch, or unset it",
        field="deterministic",
    )


def by_row(reason: str) -> dict[str, str]:
    """Op -> torch a row at a time, for a model that has what no invariant kernel has."""
    _log.warning("every op runs in torch, row by row: no invariant kernel has %s", reason)
    return dict.fromkeys(IMPLEMENTATIONS, "by row")


def usable(op: str, device_type: str) -> list[str]:
    """The implementations of ``op`` but native ones that run there unasked, the best first."""
    can_triton = device_type == "cuda" and _has_triton()
    return [
        name for name in IMPLEMENTATIONS[op] if name == "torch" or (name == "triton" and can_triton)
    ]


def function(op: str, name: str) -> Callable[..., Any]:
    """An op's implementation of that name."""
    module = _MODULES[name].format(file=_FILES.get(op, op))
    found: Callable[..., Any] = getattr(importlib.import_module(module), op)
    return found


def load(chosen: Mapping[str, str]) -> Kernels:
    """Import what was chosen."""
    functions = {op: function(op, chosen[op]) for op in IMPLEMENTATIONS}
    if chosen["sample"] == "by row":
        functions["sample"] = partial(functions["sample"], is_by_row=True)
    for op, asked in _TILED.items():
        if chosen[op] == NATIVE_TILES:
            functions[op] = partial(functions[op], **{asked: True})
    return Kernels(chosen=dict(chosen), **functions)


def describe(chosen: Mapping[str, str]) -> str:
    """One line: each implementation and the ops that it runs."""
    groups: dict[str, list[str]] = {}
    for op, name in chosen.items():
        groups.setdefault(name, []).append(op)
    return "; ".join(f"{name}: {', '.join(ops)}" for name, ops in groups.items())


def reasons(chosen: Mapping[str, str]) -> dict[str, str]:
    """Op -> why that was chosen of a GPU's, in words."""
    asked = _asked(None)
    return {op: _reason(op, chosen[op], asked.get(op)) for op in IMPLEMENTATIONS}


def _reason(op: str, name: str, asked: str | None) -> str:
    if name == asked:
        return f"{VARIABLE} asks for it"
    if name == "native":
        return "the CUDA kernels are proven on this GPU"
    if asked is not None:
        return f"{VARIABLE} asks for {asked}, which can't run here"
    if "triton" not in IMPLEMENTATIONS[op]:
        return "there is no Triton kernel"
    return "Triton is installed" if name == "triton" else "Triton is not installed"


def describe_launch(chosen: Mapping[str, str]) -> str:
    """Who launches the kernels of a step, and which ops keep C++ from it."""
    others = [f"{op} ({chosen[op]})" for op in IMPLEMENTATIONS if chosen[op] != "native"]
    if LAUNCH not in chosen:
        return f"from Python ({VARIABLE}=native: from C++)"
    if not others:
        return "from C++ where every node of a model has a kernel, else from Python"
    return f"from Python for models with {', '.join(others)}, else from C++"


def has_flash() -> bool:
    """Whether the flash-attn package is installed."""
    return importlib.util.find_spec("flash_attn") is not None


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _check_native(device_type: str, chosen: dict[str, str]) -> None:
    """Replace native kernels in ``chosen`` where the device can't run them."""
    from lmi_core.ops.kernels.cuda import library

    kernels = library.load()
    reason = kernels.unusable_because(device_type)
    if reason is None:
        kernels.choose_launches()
        return
    chosen.pop(LAUNCH, None)
    others = {op: usable(op, device_type)[0] for op, name in chosen.items() if name == "native"}
    chosen.update(others)
    _log.warning("no CUDA kernels run (%s), but %s", reason, describe(others))


def _check_flash(device_type: str) -> None:
    if not has_flash():
        raise MissingExtraError(f"{VARIABLE}, which asks for flash-attn,", "flash-attn")
    if device_type != "cuda":
        raise UserError(f"{VARIABLE} asks for flash-attn, which runs on CUDA devices only")


def _check_triton(device_type: str) -> None:
    if not _has_triton():
        raise UserError(f"{VARIABLE} asks for Triton, which is not installed: pip install triton")
    if device_type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise UserError(
            f"{VARIABLE} asks for Triton without a GPU: set TRITON_INTERPRET=1 to run it in its "
            "interpreter"
        )
