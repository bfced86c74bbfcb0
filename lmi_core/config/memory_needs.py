"""What a model that is here will need of the machine's memory, from its headers alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lmi_core.config.model_config import ModelConfig
from lmi_core.errors import LmiError
from lmi_core.units import megabytes
from lmi_core.weights.checkpoint import weight_files

if TYPE_CHECKING:
    from lmi_core.models.found_model import FoundModel


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """In bytes; the activations of a step, a few MiB mostly, are not among them."""

    weight_bytes: int
    kv_cache_bytes: int
    limit_bytes: int
    """What this process may use."""
    free_bytes: int

    def describe(self) -> str:
        need = self.weight_bytes + self.kv_cache_bytes
        return (
            f"about {megabytes(need)} (weights {megabytes(self.weight_bytes)}, KV cache up to "
            f"{megabytes(self.kv_cache_bytes)}); the machine has {megabytes(self.limit_bytes)}, "
            f"{megabytes(self.free_bytes)} of it free"
        )


Needs = MemoryNeeds | str | None


def memory_needs(
    model: ModelConfig, directory: Path | None, draft: Path | None, found: FoundModel | None
) -> Needs:
    """The needs of a model of the CPU engine whose files are in ``directory``, and of its draft
    model in ``draft``, or why it can't have them; None where that shows only when it is loaded.
    ``found``: what its judge read of the files, where these have no faults."""
    if model.backend != "lmi" or directory is None or not weight_files(directory):
        return None
    if model.engine is None or model.engine.config.device != "cpu" or model.is_on_ray:
        return None
    try:
        return _needs(model, directory, draft, found)
    except LmiError as error:
        return str(error)
    except (ImportError, ValueError, TypeError, OSError):
        return None  # other checks say what is wrong


def _needs(
    model: ModelConfig, directory: Path, draft: Path | None, found: FoundModel | None
) -> MemoryNeeds:
    from lmi_core import _native
    from lmi_core.models.found_model import find_model
    from lmi_core.runners.cpu.memory_needs import estimate_copies

    if found is None:
        found = find_model(model.engine_config(directory, draft=draft))
    needs = estimate_copies(found, model.placement.num_copies)
    limit = int(_native.cpu_info()["memory_limit_bytes"])
    return MemoryNeeds(needs.weights, needs.kv_cache, limit, min(limit, free_bytes()))


def free_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """What the system could give without swapping (proc(5), MemAvailable)."""
    for line in meminfo.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) << 10
    return 0
