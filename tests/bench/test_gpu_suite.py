"""The GPU suite's stages on the CPU: what it does with failures, and that its modules measure."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.gpu.stage import Stage, run_stage

torch = pytest.importorskip("torch", exc_type=ImportError)

from bench.checkpoints import make_checkpoint  # noqa: E402
from bench.gpu import __main__ as suite  # noqa: E402
from bench.gpu import engine, kernels, random_model, ready  # noqa: E402
from bench.gpu import tests as gpu_tests  # noqa: E402
from lmi_core.models.loader import Quantization  # noqa: E402


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


def test_failures_are_recorded_and_not_fatal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    planned = [stage("raise SystemExit(3)", name="first"), stage("print(1)", name="second")]
    monkeypatch.setattr(suite, "stages", lambda *args, **options: planned)
    monkeypatch.setattr(sys, "argv", ["suite", str(tmp_path / "out"), "--device", "cpu"])
    assert suite.main() == 1
    written = json.loads((tmp_path / "out" / "suite.json").read_text())
    assert [record["status"] for record in written["stages"]] == ["failed", "ok"]
    assert written["machine"]["torch"] == torch.__version__
    assert "first" in capsys.readouterr().out


def test_all_stages_fit_into_the_time_and_say_where_they_write(tmp_path: Path) -> None:
    planned = suite.stages("cuda", tmp_path, tiny=False)
    assert suite.LIMIT_S < 9 * 60
    names = [stage.name for stage in planned]
    assert len(set(names)) == len(names)
    assert names.index("roofs") < names.index("kernels") < names.index("engine-llama3-8b-native")
    forced = {stage.name: stage.environment.get("LMI_OPS") for stage in planned}
    assert forced["engine-llama3-8b-native"] == forced["engine-llama3-8b-int4"] == "native"
    assert os.access(Path(suite.__file__).parents[1] / "gpu_suite.sh", os.X_OK)


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
    assert first == "build_engine 150 s | build_kernels 150 s | roofs 30 s"
    assert second == "smoke 60 s"
    assert not (tmp_path / "out").exists()
    planned = suite.stages("cuda", tmp_path, tiny=False, prebuilt=library)
    build = next(stage for stage in planned if stage.name == "build_kernels")
    assert build.command == ("cp", str(library), "lmi_core/liblmi_cuda.so")


def test_the_builds_run_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for the other."""
    cuda_stages = suite.stages("cuda", tmp_path, tiny=False)
    script = """if True:
        import pathlib, sys, time
        own, other = (pathlib.Path(name) for name in sys.argv[1:])
        own.touch()
        while not other.exists():
            time.sleep(0.02)
    """
    names = [str(tmp_path / name) for name in ("first", "second")]
    planned = [
        Stage(
            name=Path(own).name,
            command=(sys.executable, "-c", script, own, other),
            limit_s=20.0,
            is_concurrent=True,
        )
        for own, other in (names, names[::-1])
    ]
    monkeypatch.setattr(suite, "stages", lambda *args, **options: planned)
    monkeypatch.setattr(sys, "argv", ["suite", str(tmp_path / "out"), "--device", "cpu"])
    assert suite.main() == 0
    kinds = [[stage.name for stage in group] for group in suite.groups(cuda_stages)]
    assert kinds[0] == ["build_engine", "build_kernels", "roofs"]
    assert all(len(group) == 1 for group in kinds[1:])


def test_the_sanitizer_runs_only_where_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def run(stage: Stage, **_: object) -> dict[str, object]:
        ran.append(stage.name)
        return {"name": stage.name, "status": "ok"}

    monkeypatch.setattr(suite, "run_stage", run)
    for only in ([], ["--only", "racecheck"]):
        monkeypatch.setattr(sys, "argv", ["suite", str(tmp_path), "--device", "cpu", *only])
        assert suite.main() == 0
    assert ran.count("racecheck") == 1
    assert ran[-1] == "racecheck"
    assert "memcheck" not in ran


@pytest.mark.timeout(120)
def test_a_start_is_measured_beyond_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPTION_DEVICE", "torch-cpu")
    shape = random_model.GPU_SHAPES["near-zero"]
    model = make_checkpoint(shape, tmp_path / "model", make=ready.make_tensor)
    row = ready.measure_start(model)
    assert row["ready_s"] > row["read_s"]
    assert row["beyond_reading_s"] == pytest.approx(row["ready_s"] - row["read_s"], abs=0.02)


def test_a_start_without_the_servers_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPTION_DEVICE", "torch-cpu")
    monkeypatch.setattr(ready, "SERVER_PACKAGES", ("json", "nowhere"))
    model = make_checkpoint(
        random_model.GPU_SHAPES["near-zero"], tmp_path / "model", make=ready.make_tensor
    )
    row = ready.measure_start(model)
    assert row["started"] == "engine: no server without nowhere"
    assert row["ready_s"] > row["read_s"]


def test_kernels_are_measured_where_they_run() -> None:
    roofs = {"copy_gb_per_s": 10.0, "read_gb_per_s": 5.0, "bf16_tflops": 0.01}
    for case in kernels.TINY_CASES:
        items = kernels.attention_items(case, "cpu", roofs)
        assert [item.what.split(": ")[1] for item in items] == ["native", "triton", "torch"]
        assert items[2].measure()["share_of_roof"] > 0
    items = kernels.linear_items(2, 128, 32, "cpu", {})
    items = [item for item in items if item.what.endswith("torch")]
    assert [item.measure()["us"] > 0 for item in items] == [True] * 4
    items = kernels.made_row_items(2, 96, 160, "cpu", {})
    items = [item for item in items if "torch" in item.what]
    assert [item.measure()["us"] > 0 for item in items] == [True] * 4


def test_a_process_that_ends_costs_one_row(tmp_path: Path) -> None:
    """Whether it ends in the item, hangs there, or finds the device lost right after it."""
    path = tmp_path / "rows.json"
    script = tmp_path / "items.py"
    script.write_text("""if True:
        import os, sys, time
        from types import SimpleNamespace
        from bench.gpu import lost_device, measure

        lost = []
        lost_device.is_lost = lambda: bool(lost)
        measure.ITEM_LIMIT_S = 1

        def lose():
            lost.append(1)
            raise RuntimeError("illegal address")

        items = [
            measure.Item("good", lambda: {"us": 1}),
            measure.Item("ends", lambda: os._exit(3)),
            measure.Item("hangs", lambda: time.sleep(100)),
            measure.Item("loses", lose),
            measure.Item("last", lambda: {"us": 2}),
        ]
        arguments = SimpleNamespace(
            json=measure.Path(sys.argv[1]), device="cuda", is_child="--is-child" in sys.argv
        )
        measure.attempt_each("items", items, arguments)
    """)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.getcwd()}"}
    subprocess.run(
        [sys.executable, str(script), str(path)], env=environment, check=True, timeout=100
    )
    assert json.loads(path.read_text()) == [
        {"what": "good", "us": 1},
        {"what": "ends", "error": "its process ended with exit code 3"},
        {"what": "hangs", "error": "its process ended with exit code 1"},
        {"what": "loses", "error": "RuntimeError: illegal address"},
        {"what": "last", "us": 2},
    ]


def test_tests_go_on_behind_one_that_ends_the_process(tmp_path: Path) -> None:
    file = tmp_path / "test_some.py"
    file.write_text("""if True:
        import os, sys, time, types, warnings
        import pytest

        cuda = types.SimpleNamespace(is_initialized=lambda: True, synchronize=lambda: None)
        sys.modules["torch"] = types.SimpleNamespace(cuda=cuda)

        def lost():
            raise RuntimeError("illegal address")

        @pytest.mark.parametrize("what", ["works", "fails", "ends", "hangs", "loses", "warns"])
        def test_native(what):
            assert what != "fails"
            if what == "ends":
                os._exit(0)
            if what == "hangs":
                time.sleep(100)
            if what == "loses":
                cuda.synchronize = lost
            if what == "warns":
                warnings.warn("of another version")

        def test_skipped():
            pytest.skip("no device")
    """)
    runs = gpu_tests.Runs("not gpu", timeout_s=2, limit_s=100.0)
    missing = tmp_path / "test_none.py"
    path = tmp_path / "tests.json"
    results = runs.run_files([str(file), str(missing)], 2, path)
    assert json.loads(path.read_text()) == results
    found = {
        test.split("::")[1]: outcome
        for result in results
        for test, outcome in result["outcomes"].items()
    }
    assert found == {
        "test_native[works]": "passed",
        "test_native[fails]": "failed",
        "test_native[ends]": "ended",
        "test_native[hangs]": "ended",
        "test_native[loses]": "ended",
        "test_native[warns]": "passed",
        "test_skipped": "skipped",
    }
    errors = [result.get("error") for result in results if result["file"] == str(missing)]
    assert errors == ["not all tests ran: pytest's exit code 4"] * 3
    assert gpu_tests.has_failed(results)
    late = gpu_tests.Runs("not gpu", timeout_s=2, limit_s=0.0).run_part(str(file), "native")
    assert late["error"] == "not all tests ran: no time left"


def test_every_file_with_gpu_tests_is_in_the_suite() -> None:
    """Each once."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-m", "gpu"]
    command += ["tests/ops", "tests/runners"]
    found = subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=100)
    files = {line.split("::")[0] for line in found.stdout.splitlines() if "::" in line}
    assert sorted(files) == sorted(suite.SMOKE_TESTS + suite.STEP_TESTS + suite.OTHER_TESTS)


def test_bytes_and_operations_of_attention() -> None:
    decode = kernels.Attention(2, 100, 1, 8, 4, 64)
    assert decode.num_bytes == 2 * 100 * 4 * 64 * 2 * 2
    assert decode.num_operations == 2 * 100 * 8 * 64 * 4
    prefill = kernels.Attention(1, 4, 4, 1, 1, 8)
    assert prefill.num_operations == (4 + 3 + 2 + 1) * 8 * 4


@pytest.mark.parametrize(
    "changes",
    [{}, {"quantize": "int4"}, {"quantize": "fp8"}, {"deterministic": True, "kv_dtype": "int8"}],
)
def test_the_engine_is_measured(tmp_path: Path, changes: dict[str, object]) -> None:
    path = tmp_path / "engine.json"
    (tmp_path / "roofs.json").write_text(
        json.dumps({"copy_gb_per_s": 10.0, "read_gb_per_s": 5.0, "bf16_tflops": 0.01})
    )
    settings = {"quantize": None, "kv_dtype": "auto", "deterministic": False, **changes}
    arguments = argparse.Namespace(
        device="cpu", tiny=True, json=path, shape="near-zero", **settings
    )
    asyncio.run(engine.measure(arguments))
    rows = json.loads(path.read_text())
    assert [row["what"] for row in rows] == ["prefill 32", "decode batch 1", "decode batch 2"]
    assert all(row["tokens_per_s"] > 0 for row in rows), rows
    assert rows[2]["num_steps"] >= 20


def test_random_weights_have_the_usual_size() -> None:
    device = torch.device("cpu")
    formats: tuple[Quantization, ...] = ("int8", "int4", "fp8")
    for format in formats:
        weight = random_model.random_packed(40, 256, format, is_gated=True, device=device)
        values = weight.unpack()
        assert values.shape == (40, 256)
        assert 0.005 < values.std() < 0.1
