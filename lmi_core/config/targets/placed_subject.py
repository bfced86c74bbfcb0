"""What is placed: a model's configuration on a machine, and how refusals speak of its devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lmi_core.config.problem import Problems
from lmi_core.config.sources.merge import Values
from lmi_core.config.table.capabilities import BACKENDS
from lmi_core.config.targets.host import Host
from lmi_core.settings.placement import DEVICE_NAMES, VISIBLE, DeviceKind

DEGREE = "option.tensor_parallel_degree"
STAGES = "option.pipeline_parallel_degree"
COPIES = "option.data_parallel_size"
OWN_COPIES = "option.num_copies"
ON = "option.on"
RAY_ADDRESS = "option.ray_address"
OWN = frozenset({"lmi", "transformers"})
"""Backends that run in our engine."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A model's configuration, what it is for, and the machine."""

    values: Values
    host: Host
    backend: str
    system: str
    mpi_mode: bool
    is_demo: bool
    """The embedded model, which is served on the CPU everywhere."""
    problems: Problems

    def refuse(self, key: str, message: str) -> None:
        key_given = key if key in self.values.known else None
        self.problems.error(self.values.where(key), message, key_given)

    @property
    def title(self) -> str:
        title = BACKENDS[self.backend].title
        return f"the {title}" if self.backend == "lmi" else title

    @property
    def is_on_ray(self) -> bool:
        """Whether copies of our engine are to run on a cluster's nodes."""
        return self.backend == "lmi" and self.values.get(ON) == "ray"

    @property
    def on_cpu_instead(self) -> str:
        """The way out of a refusal that our engine has, in words."""
        return "; --device cpu serves it on the CPU" if self.backend in OWN else ""

    def can(self, capability: str) -> bool:
        return capability in BACKENDS[self.backend].capabilities

    @property
    def copies_key(self) -> str:
        """The key of the number of copies, which is left to the devices where it isn't given."""
        is_own = self.backend == "lmi" and self.values.get(OWN_COPIES) is not None
        return OWN_COPIES if is_own else COPIES

    def names(self, kind: DeviceKind) -> tuple[str, ...]:
        """The devices as the variable that shows them calls them."""
        given = self.host.gpu_names if kind == "cuda" else ()
        return given or tuple(map(str, range(self.host.num_devices)))

    def restricted(self, ids: Sequence[int], kind: DeviceKind) -> str:
        """The variable that shows a process these devices alone."""
        return f"{VISIBLE[kind]}={','.join(self.names(kind)[i] for i in ids)}"

    def visible(self, kind: DeviceKind) -> str:
        """How many devices there are, in words."""
        count, name = self.host.num_devices, DEVICE_NAMES[kind]
        return f"1 {name} is visible" if count == 1 else f"{count} {name}s are visible"
