"""What the harness knows of a peer."""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

from bench.peers.driver import Load, arguments_of
from bench.peers.install import Home, Installation, install, last_installation
from bench.peers.process import Command
from bench.peers.side import LineSide, Side
from lmi_core.bench.rooflines import GGUF_BYTES

HOMES = Path("build/peers")
GGUF_FILE = "model.gguf"
"""In the directory of a model of a peer that reads GGUF."""
GGUF_MIXES = ("q4_k_m",)
"""Of several types in a file, which have no roof here: rows not of whole blocks get others."""
GGUF_DTYPES = (*GGUF_BYTES, *GGUF_MIXES)


class Peer(ABC):
    """One engine: how it is installed, fed and started."""

    name: str
    formats: Mapping[str, str]
    """dtype -> what this peer calls the format that comes nearest to it."""
    requirements: tuple[str, ...] = ()
    """Of its virtual environment; pinned, so that rows can be repeated."""

    def __init__(self, homes: Path = HOMES) -> None:
        self.home = Home(homes / self.name)

    @property
    def version(self) -> str:
        """The pinned requirement that names the engine."""
        return self.requirements[0]

    @property
    def is_installed(self) -> bool:
        last = last_installation(self.home.path, repr(self.requirements))
        return last is not None and not last.error

    def install(self, *, retry: bool = False) -> Installation:
        return install(self.home.path, repr(self.requirements), self.install_steps, retry=retry)

    def install_steps(self, home: Home) -> None:
        home.make_environment(self.requirements)

    def model(self, checkpoint: Path, shape: str, dtype: str) -> Path:
        """The checkpoint in the peer's own format, made if it isn't there; raises InstallError."""
        target = self.home.path / "models" / f"{shape}-{dtype}"
        if not target.exists():
            partial = target.with_name(target.name + ".partial")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            self.convert(checkpoint.absolute(), dtype, partial.absolute())
            partial.rename(target)
        return target.absolute()

    @abstractmethod
    def convert(self, checkpoint: Path, dtype: str, target: Path) -> None:
        """Fill the directory ``target``; raises InstallError."""

    @abstractmethod
    def engine_side(self, load: Load) -> Side:
        """The side of the offline rows."""

    def server_side(self, load: Load) -> Side | None:
        """The side of the serving rows; None: it has no server, and its engine takes all requests
        at once instead."""
        return None

    def driver(self, module: str, load: Load, environment: Mapping[str, str] = {}) -> Side:
        """The module's driver in the peer's environment."""
        arguments = [str(self.home.python), "-m", module, *arguments_of(load)]
        log = self.home.path.absolute() / "engine.log"
        return LineSide(Command(arguments, log, environment))


def link_checkpoint(checkpoint: Path, target: Path) -> None:
    """For peers that read the checkpoint as it is."""
    for file in checkpoint.iterdir():
        (target / file.name).symlink_to(file)
