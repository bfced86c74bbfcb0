"""The GPU suite's stages on the CPU: what it does with failures, and that its modules measure."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from pathlib import Path

import pytest

from bench.gpu.stage import Stage, run_stage

torch = pytest.importorskip("torch", exc_type=ImportError)

from bench.checkpoints import make_checkpoint  # noqa: E402
from bench.gpu import __main__ as suite  # noqa: E402
from bench.gpu import engine, kernels, random_model, ready  # noqa: E402
from lmi_core.models.loader import Quantization  # noqa: E402


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


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


def test_the_sanitizer_runs_only_where_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def run(stage: Stage, *_: object) -> dict[str, object]:
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


def test_kernels_are_measured_where_they_run() -> None:
    roofs = {"copy_gb_per_s": 10.0, "read_gb_per_s": 5.0, "bf16_tflops": 0.01}
    for case in kernels.TINY_CASES:
        rows = kernels.measure_attention(case, "cpu", roofs)
        assert [row["what"].split(": ")[1] for row in rows] == ["native", "triton", "torch"]
        assert rows[2]["share_of_roof"] > 0
    rows = kernels.measure_linear(2, 128, 32, "cpu", {})
    assert [row.get("us", 0) > 0 for row in rows if row["what"].endswith("torch")] == [True] * 4


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
