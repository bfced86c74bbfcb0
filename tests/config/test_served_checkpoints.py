"""Every family, stored format and task: what ``explain`` calls usable is served, and no other."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from lmi_core.cli import main
from lmi_core.config.resolve import resolve
from lmi_core.errors import UserError
from tests.bitsandbytes_checkpoints import make_bitsandbytes_checkpoint
from tests.checkpoints import FAMILIES, cached_checkpoint
from tests.exl2_checkpoints import make_exl2_checkpoint
from tests.fp8_checkpoints import CONFIGS, make_fp8_checkpoint
from tests.integer_checkpoints import FORMS, OTHER_FORMS, make_integer_checkpoint
from tests.weights.test_fp4_checkpoints import FORMS as FP4_FORMS
from tests.weights.test_fp4_checkpoints import make as make_fp4_checkpoint

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
        f"integers {name}": lambda p, f=form: make_integer_checkpoint(p, f)
        for name, form in FORMS.items()
    },
    **{
        f"integers {name}": lambda p, f=form: make_integer_checkpoint(p, f)
        for name, (form, _) in OTHER_FORMS.items()
    },
    **{
        f"floats {form}": lambda p, f=form: make_fp4_checkpoint(p.parent / "made", f).rename(p)
        for form in FP4_FORMS
    },
    "exl2": lambda p: make_exl2_checkpoint(p.parent / "made").rename(p),
    **{
        f"bitsandbytes {kind}": lambda p, k=kind: make_bitsandbytes_checkpoint(p, k)
        for kind in ("nf4", "fp4", "int8")
    },
    **{
        f"written {name}": lambda p, n=name: _write(p, n)
        for name in ("compressed-tensors-w8a8", "compressed-tensors-fp8", "gguf-q4_k")
    },
    **{f"fp8 {form}": lambda p, f=form: make_fp8_checkpoint(p, f) for form in CONFIGS},
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
