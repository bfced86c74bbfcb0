"""The machines on which copies run, and what each copy gets of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from lmi_core.copies.link import Link, LocalLink
from lmi_core.copies.process import CopySettings, log_level
from lmi_core.errors import EngineError, TooManyCopiesError, UserError
from lmi_core.runners.cpu.core_groups import (
    most_ranked_copies,
    num_own_cores,
    own_groups,
    weight_nodes,
)
from lmi_core.runners.cpu.cpu_model import find_cpu_model
from lmi_core.runners.cpu.memory_needs import (
    HOST_MEMORY,
    check_copies,
    check_memory,
    shares_weights,
)
from lmi_core.runners.cpu.rank_hosts import host_cpus
from lmi_core.runners.runner import RunnerInfo
from lmi_core.settings.engine_config import EngineConfig


class Machines(Protocol):
    """Where the copies of one model are placed."""

    def claim(self, config: EngineConfig, num_copies: int) -> bool:
        """Have memory for so many; blocking. Whether they share packed weights. Raises
        InsufficientMemoryError where they don't fit, TooManyCopiesError where cores or devices
        don't do, and all stays as it was."""
        ...

    def release(self) -> None:
        """Give the memory back. Idempotent."""
        ...

    def settings(
        self, config: EngineConfig, number: int, num_copies: int, *, is_first: bool
    ) -> CopySettings:
        """Of the copy ``number``, from 0; blocking. ``is_first``: no other has been started before
        it."""
        ...

    def link(self, settings: CopySettings) -> Link:
        """To a copy that isn't started yet."""
        ...


def check_alike(first: RunnerInfo, other: RunnerInfo, where: str) -> None:
    """Raise EngineError where requests of the first copy wouldn't go on by the same bits."""
    if first.instruction_set != other.instruction_set:
        raise EngineError(
            f"{where} computes with {other.instruction_set}, the first copy with "
            f"{first.instruction_set}, and requests that go from one to the other would change: "
            "set option.instruction_set to a level that all machines have"
        )


class ThisMachine:
    """Implements ``Machines``: copies divide its memory and its cores."""

    def claim(self, config: EngineConfig, num_copies: int) -> bool:
        if config.device != "cpu":
            raise UserError(
                f"num_copies={num_copies} doesn't go with device={config.device}: copies run on "
                "the CPU, or one on each GPU",
                field="num_copies",
            )
        _check_cores(config, num_copies)
        found = find_cpu_model(config)
        check_memory(found, HOST_MEMORY.others_bytes(self))
        allowed = host_cpus(config.job)
        check = partial(check_copies, found, num_copies, allowed=allowed)
        HOST_MEMORY.claim_checked(self, check)
        return shares_weights(config, found.checkpoint.stored_bytes)

    def release(self) -> None:
        HOST_MEMORY.release(self)

    def settings(
        self, config: EngineConfig, number: int, num_copies: int, *, is_first: bool
    ) -> CopySettings:
        degree, allowed = config.tensor_parallel_degree, host_cpus(config.job)
        cpus = own_groups(config.cpu_binding, degree, number, num_copies, allowed)
        nodes = weight_nodes(config.cpu_binding, degree, number, num_copies, allowed)
        num_cores = num_own_cores(degree, num_copies, allowed)
        return CopySettings(
            config=replace(
                config,
                num_models=config.num_models * num_copies,
                num_threads=config.num_threads or num_cores,
                bound_cpus=cpus,
                weight_nodes=nodes,
            ),
            packs=is_first,
            claimed_bytes=HOST_MEMORY.others_bytes(self),
            log_level=log_level(),
        )

    def link(self, settings: CopySettings) -> Link:
        return LocalLink()


def _check_cores(config: EngineConfig, num_copies: int) -> None:
    """Of copies that come while others run; ``placement_on_cpu`` refuses the first ones so. A job's
    processes have the cores that they were given."""
    degree, num_cores = config.tensor_parallel_degree, num_own_cores(1)
    most = most_ranked_copies(num_cores, degree)
    if degree > 1 and config.job is None and num_copies > most:
        raise TooManyCopiesError(
            f"{num_copies} copies with tensor_parallel_degree={degree} need {num_copies * degree} "
            f"cores, one for each process, and there are {num_cores}: at most {most} can be had",
            field="num_copies",
        )


class Devices:
    """Implements ``Machines``: each copy has devices of this machine, and sees no others."""

    def __init__(self, environments: Sequence[Mapping[str, str]]) -> None:
        """``environments``: by copy, the variables that show a process its devices."""
        self._environments = environments

    def claim(self, config: EngineConfig, num_copies: int) -> bool:
        """Raises TooManyCopiesError where there are devices for fewer; each copy looks at its own
        memory."""
        if num_copies > len(self._environments):
            raise TooManyCopiesError(
                f"num_copies={num_copies}, and there are devices for {len(self._environments)}",
                field="num_copies",
            )
        return False

    def release(self) -> None:
        pass

    def settings(
        self, config: EngineConfig, number: int, num_copies: int, *, is_first: bool
    ) -> CopySettings:
        return CopySettings(
            config=config, environment=self._environments[number], log_level=log_level()
        )

    def link(self, settings: CopySettings) -> Link:
        return LocalLink(settings.environment)
