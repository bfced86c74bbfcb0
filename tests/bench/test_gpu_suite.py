"""The GPU suite's stages on the CPU: what it does with failures, time and libraries."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.gpu.stage import Stage, run_stage

torch = pytest.importorskip("torch", exc_type=ImportError)

from bench.gpu import __main__ as suite  # noqa: E402
from bench.gpu import (  # noqa: E402
    plan,
    summary,
)

EMULATOR = Path(__file__).parents[2] / "build/native/liblmi_cuda_emulator.so"


def stage(script: str, *, name: str = "stage", limit_s: float = 20.0) -> Stage:
    return Stage(
        name=name,
        command=(sys.executable, "-c", script),
        limit_s=limit_s,
        environment={"ASKED": "yes"},
    )


def test_a_stage_that_works(tmp_path: Path) -> None:
    record = run_stage(stage("import os; print(os.environ['ASKED'])"), tmp_path, left_s=60.0)
    assert record["status"] == "ok"
    assert (tmp_path / "stage.log").read_text() == "yes\n"


def test_a_stage_that_fails(tmp_path: Path) -> None:
    record = run_stage(stage("raise SystemExit('no device')"), tmp_path, left_s=60.0)
    assert (record["status"], record["exit_code"]) == ("failed", 1)
    assert record["output_tail"] == "no device\n"


def test_a_stage_that_hangs_ends_with_its_children(tmp_path: Path) -> None:
    script = f"""if True:
        import subprocess, time
        child = subprocess.Popen(["sleep", "60"])
        open({str(tmp_path / "child")!r}, "w").write(str(child.pid))
        print("started", flush=True)
        time.sleep(60)
    """
    started_s = time.monotonic()
    record = run_stage(stage(script, limit_s=5.0), tmp_path, left_s=60.0)
    assert record["status"] == "timeout"
    assert record["output_tail"] == "started\n"
    assert time.monotonic() - started_s < 30
    state = Path("/proc", (tmp_path / "child").read_text(), "stat")
    deadline = time.monotonic() + 10
    while state.exists() and state.read_text().split()[2] != "Z":
        assert time.monotonic() < deadline, "the stage's child is still there"
        time.sleep(0.05)


def test_without_time_left_a_stage_is_skipped(tmp_path: Path) -> None:
    record = run_stage(stage("print(1)"), tmp_path, left_s=0.5)
    assert record["status"] == "skipped"
    assert not list(tmp_path.iterdir())


def run_suite(
    monkeypatch: pytest.MonkeyPatch, planned: list[Stage], out: Path, *options: str
) -> tuple[int, list[dict[str, Any]]]:
    monkeypatch.setattr(plan.Plan, "stages", lambda self: planned)
    monkeypatch.setattr(suite, "machine", lambda device: {"device": device})
    monkeypatch.setitem(suite.PACKAGES, "nowhere_to_be_found", "figures of it")
    monkeypatch.setattr(sys, "argv", ["suite", str(out), "--dry-run", *options])
    code = suite.main()
    written = json.loads((out / "suite.json").read_text())
    assert written["machine"] == {"device": "cpu"}
    return code, written["stages"]


def test_a_stage_that_fails_or_hangs_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    rows = [{"what": "a kernel", "us": 2.5}, {"what": "another", "error": "no device"}]
    script = f"open({str(out / 'last.json')!r}, 'w').write({json.dumps(rows)!r})"
    planned = [
        replace(stage("raise SystemExit(3)", name="first"), tells="whether it fails"),
        stage("import time; time.sleep(60)", name="second", limit_s=1.5),
        stage(script, name="last"),
    ]
    code, records = run_suite(monkeypatch, planned, out)
    assert code == 1
    assert [record["status"] for record in records] == ["failed", "timeout", "ok"]
    assert [record["limit_s"] for record in records] == [20.0, 1.5, 20.0]
    assert records[0]["tells"] == "whether it fails"
    said = capsys.readouterr().out
    assert said.startswith("nowhere_to_be_found is not installed: no figures of it\n")
    assert "whether it fails" in said
    assert "  a kernel: us 2.5\n  another: error: no device\n" in said
    with tarfile.open(out / summary.ARCHIVE) as packed:
        names = set(packed.getnames())
    assert {"suite.json", "summary.txt", "first.log", "last.json"} <= names


def test_the_machine_is_asked_in_another_process() -> None:
    assert suite.machine("cpu")["torch"] == torch.__version__


@pytest.mark.parametrize("is_dry", [False, True])
def test_all_stages_fit_into_the_time_and_tell_something(tmp_path: Path, is_dry: bool) -> None:
    planned = plan.Plan(out_dir=tmp_path, is_dry=is_dry).stages()
    assert is_dry or sum(map(suite.seconds_of, suite.groups(planned))) <= plan.LIMIT_S < 9 * 60
    names = [stage.name for stage in planned]
    assert len(set(names)) == len(names)
    assert all(stage.tells for stage in planned)
    wanted = ["baseline", "smoke", "kernels", "captured_steps", "engine-llama3-8b-native",
              "engine-llama3-8b-native-dependent", "engine-llama3-8b-triton",
              "engine-llama3-8b-int4", "profile", "tests", "ready"]  # fmt: skip
    assert [name for name in names if name in wanted] == wanted
    assert names[-1] == "ready"
    named = {stage.name: stage for stage in planned}
    native = named["engine-llama3-8b-native-dependent"].environment
    assert (native["LMI_OPS"], native["LMI_CUDA_DEPENDENT_LAUNCH"]) == ("native", "1")
    triton = "" if is_dry else "triton"  # which runs on GPUs
    assert named["engine-llama3-8b-triton"].environment["LMI_OPS"] == triton
    assert ("near-zero" in named["profile"].command) == is_dry
    assert ("LMI_CUDA_LIBRARY" in named["smoke"].environment) == is_dry
    assert ("CMAKE_ARGS" in named["build_engine"].environment) != is_dry, "it'd build all anew"
    assert os.access(Path(suite.__file__).parents[1] / "gpu_suite.sh", os.X_OK)
    page = Path(suite.__file__).with_name("README.md").read_text()
    rows = re.findall(r"^\| `(.+)` \| (\d+) s \|", page, re.MULTILINE)
    assert is_dry or rows == [(one.name, f"{one.limit_s:.0f}") for one in planned]


def test_every_measuring_stage_has_a_module_that_takes_its_options(tmp_path: Path) -> None:
    """A word that a module doesn't know would end its stage at once."""
    whole = plan.Plan(out_dir=tmp_path)
    dry = plan.Plan(out_dir=tmp_path, is_dry=True)
    for one in (*whole.stages(), *whole.extra_stages(), *dry.stages(), *dry.extra_stages()):
        if one.command[1:2] != ("-m",) or one.command[2] in ("bench.gpu.tests", "pytest"):
            continue
        text = Path(*one.command[2].split(".")).with_suffix(".py").read_text()
        known = text + Path("bench/gpu/measure.py").read_text()
        for option in (part for part in one.command[3:] if part.startswith("--")):
            name = option.removeprefix("--").replace("-", "_")
            assert f"{name}=" in known or f'"{option}"' in known, (one.name, option)


def test_a_library_of_another_machine_takes_the_place_of_the_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    library = tmp_path / "liblmi_cuda.so"
    arguments = ["suite", str(tmp_path / "out"), "--prebuilt", str(library), "--plan"]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit):
        suite.main()
    assert f"--prebuilt: there is no file {library}" in capsys.readouterr().err
    library.touch()
    assert suite.main() == 0
    first, second = capsys.readouterr().out.splitlines()[:2]
    assert first.count(" | ") == 2
    assert second.startswith("smoke 25 s: which native kernels run")
    assert not (tmp_path / "out").exists()
    for is_dry in (False, True):
        planned = plan.Plan(out_dir=tmp_path, prebuilt=library, is_dry=is_dry).stages()
        assert {one.environment["LMI_CUDA_LIBRARY"] for one in planned} == {str(library)}
        build = next(one for one in planned if one.name == "build_kernels")
        record = run_stage(build, tmp_path, left_s=60.0)  # an empty file
        assert record["status"] == "failed"
        assert f"{library} can't be loaded" in record["output_tail"]


@pytest.mark.skipif(not EMULATOR.exists(), reason="the emulator is not built: make build")
def test_a_library_that_fits_is_taken_where_it_lies(tmp_path: Path) -> None:
    library = tmp_path / "elsewhere.so"
    shutil.copy(EMULATOR, library)
    planned = plan.Plan(out_dir=tmp_path, prebuilt=library).stages()
    build = next(one for one in planned if one.name == "build_kernels")
    assert run_stage(build, tmp_path, left_s=60.0)["status"] == "ok"
    assert f"{library}, version" in (tmp_path / "build_kernels.log").read_text()
    assert "elsewhere" in build.tells


def test_a_stage_without_a_figure_has_failed(tmp_path: Path) -> None:
    rows = [{"what": "a", "us": 1.0}, {"what": "b", "error": "lost"}]

    def judged(some: list[dict[str, Any]], status: str) -> dict[str, Any]:
        (tmp_path / "one.json").write_text(json.dumps(some))
        return summary.judge(tmp_path, {"name": "one", "status": status})

    assert judged(rows, "ok") == {"name": "one", "status": "ok", "num_errors": 1}
    assert judged(rows[1:], "ok") == {"name": "one", "status": "failed", "num_errors": 1}
    assert judged(rows[1:], "timeout")["status"] == "timeout"
    assert judged(rows[:1], "ok") == {"name": "one", "status": "ok"}
    record = {"name": "nothing written", "status": "ok"}
    assert summary.judge(tmp_path, record) == record


def test_lanes_run_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of each waits for the other's; the second of one comes behind its first."""
    kinds = suite.groups(plan.Plan(out_dir=tmp_path).stages())
    assert [[stage.name for stage in lane] for lane in kinds[0]] == [
        ["build_engine"],
        ["build_kernels"],
        ["roofs", "baseline"],
    ]
    assert all(len(group) == 1 for group in kinds[1:])
    script = """if True:
        import pathlib, sys, time
        own, other = (pathlib.Path(name) for name in sys.argv[1:])
        own.touch()
        while not other.exists():
            time.sleep(0.02)
    """

    def one(name: str, other: str, lane: str) -> Stage:
        paths = [str(tmp_path / each) for each in (name, other)]
        command = (sys.executable, "-c", script, *paths)
        return Stage(name=name, command=command, limit_s=20.0, lane=lane)

    planned = [one("a", "b", "1"), one("b", "a", "2"), one("c", "a", "1")]
    code, records = run_suite(monkeypatch, planned, tmp_path / "out")
    assert code == 0
    assert [record["name"] for record in records] == ["a", "c", "b"]


def test_what_is_left_of_the_time_goes_to_the_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    show = "import os; print(os.environ['GPU_SUITE_LIMIT_S'])"
    planned = [
        stage("print(1)", name="first", limit_s=40.0),
        replace(stage(show, name="hungry", limit_s=10.0), takes_what_is_left=True),
        stage("print(1)", name="last", limit_s=20.0),
    ]
    _, records = run_suite(monkeypatch, planned, tmp_path / "out", "--limit", "100")
    assert 60 < records[1]["limit_s"] <= 80
    assert records[2]["limit_s"] == 20.0
    assert int((tmp_path / "out/hungry.log").read_text()) == round(records[1]["limit_s"])


def test_the_sanitizer_runs_only_where_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def planned(*only: str) -> str:
        monkeypatch.setattr(sys, "argv", ["suite", str(tmp_path), "--plan", *only])
        assert suite.main() == 0
        return capsys.readouterr().out

    assert "racecheck" not in planned()
    assert planned("--only", "racecheck").startswith("racecheck 530 s")
    with pytest.raises(SystemExit, match="no stage is called nothing; there are build_engine, "):
        planned("--only", "nothing")
