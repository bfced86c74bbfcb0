"""Every family, stored format and task: what ``explain`` calls usable is served, and no other."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from lmi_core.cli import main
from lmi_core.config.resolve import resolve
from lmi_core.errors import UserError
from tests.checkpoints import FAMILIES, cached_checkpoint
from tests.gguf_files import BLOCKS
from tests.weights.checkpoint_fuzz import SOUND

from .cases import NO_CACHE
from .test_judge import HERE, explain, serve

pytestmark = pytest.mark.timeout(120)

Make = Callable[[Path], object]


def _family(name: str) -> Make:
    return lambda path: shutil.copytree(cached_checkpoint(name), path)


def _task(task: str) -> Make:
    def make(path: Path) -> None:
        shutil.copytree(cached_checkpoint("llama2"), path)
        (path / "serving.properties").write_text(f"option.task={task}\n")

    return make


def _write(path: Path, format: str) -> None:
    arguments = [str(cached_checkpoint("llama2")), str(path), "--format", format]
    assert main(["quantize", *arguments]) == 0


CASES: dict[str, Make] = {
    **{f"family {name}": _family(name) for name in FAMILIES},
    **{
        f"format {name}": make
        for name, make in SOUND.items()
        if name.removeprefix("gguf-") not in BLOCKS or name == "gguf-Q6_K"
    },
    **{
        f"written {name}": lambda p, n=name: _write(p, n)
        for name in ("compressed-tensors-w8a8", "compressed-tensors-fp8", "gguf-q4_k")
    },
    **{
        f"task {task}": _task(task)
        for task in (
            "text-generation",
            "feature-extraction",
            "sentence-similarity",
            "text-classification",
            "fill-mask",
            "zero-shot-classification",
        )
    },
}


def refusal(path: Path) -> str:
    """Why ``lmi serve`` doesn't; empty: it does."""
    try:
        resolve((str(path),), NO_CACHE, HERE)
        serve(str(path))
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("case", CASES)
def test_explain_and_serve_say_the_same(case: str, tmp_path: Path) -> None:
    path = tmp_path / "model"
    CASES[case](path)
    code, text = explain(str(path))
    why = refusal(path)
    assert code == (2 if why else 0), (text, why)
    assert not why or not case.startswith("format"), why
