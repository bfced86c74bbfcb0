"""What the GPU suite's stages measure, on the CPU."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", exc_type=ImportError)

from bench.checkpoints import make_checkpoint  # noqa: E402
from bench.gpu import __main__ as suite  # noqa: E402
from bench.gpu import (  # noqa: E402
    baseline,
    engine,
    kernels,
    plan,
    profile,
    random_model,
    ready,
    shapes,
    smoke,
    turnover,
)
from bench.gpu import tests as gpu_tests  # noqa: E402
from lmi_core.weights.formats import Quantization  # noqa: E402


def test_idle_is_what_intervals_leave() -> None:
    """Overlapping kernels count once; other events, and the time before the first, not at all."""
    events = [
        {"cat": "kernel", "name": "long", "ts": 100.0, "dur": 40.0},
        {"cat": "kernel", "name": "short", "ts": 120.0, "dur": 10.0},
        {"cat": "gpu_memcpy", "name": "copy", "ts": 135.0, "dur": 15.0},
        {"cat": "kernel", "name": "short", "ts": 190.0, "dur": 10.0},
        {"cat": "cpu_op", "name": "launch", "ts": 0.0, "dur": 900.0},
        {"name": "without a category", "ts": 0.0},
    ]
    found = profile.figures(events, profile.CATEGORIES["cuda"])
    assert found["idle"] == pytest.approx(0.4)
    assert found["wall_ms"] == pytest.approx(0.1)
    assert found["num_kernels"] == 4
    assert [one["kernel"] for one in found["heaviest"]] == ["long", "short", "copy"]
    assert found["heaviest"][1] == {
        "kernel": "short", "share": pytest.approx(20 / 75), "us": 10.0, "count": 2
    }  # fmt: skip
    with pytest.raises(RuntimeError, match="saw no work"):
        profile.figures(events[4:], profile.CATEGORIES["cuda"])


def settings(path: Path, **changes: object) -> argparse.Namespace:
    usual = {
        "quantize": None,
        "kv_dtype": "auto",
        "deterministic": False,
        "index": 0,
        "load": "usual",
    }
    fields = {"device": "cpu", "tiny": True, "shape": "near-zero", "json": path, **usual, **changes}
    return argparse.Namespace(**fields)


def test_requests_that_come_and_go_are_measured(tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    rows = asyncio.run(turnover.measure(settings(tmp_path / "turnover.json")))
    assert rows == json.loads((tmp_path / "turnover.json").read_text())
    assert [row["what"] for row in rows] == list(turnover.KINDS)
    assert all(row.get("tokens_per_s", 0) > 0 for row in rows), rows
    assert rows[-1]["num_matching"] == rows[-1]["num_texts"] == turnover.TINY.num_requests


def test_wide_requests_are_all_as_long(tmp_path: Path) -> None:
    changes = {"load": "wide", "quantize": "fp8", "kv_dtype": "fp8_e4m3fn"}
    (row,) = asyncio.run(turnover.measure(settings(tmp_path / "wide.json", **changes)))
    assert row["what"] == "greedy"
    assert row["num_tokens"] == turnover.TINY.num_requests * turnover.TINY.longest_output


def test_the_profiler_sees_every_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMI_OPS", "")
    row = asyncio.run(profile.measure(settings(tmp_path / "profile.json"), "torch"))
    assert 0 <= row["idle"] < 1
    assert len(row["heaviest"]) == profile.NUM_HEAVIEST
    assert row["tokens_per_s"] > 0


def test_a_decoder_in_plain_torch() -> None:
    """Token by token it says what the whole prompt says."""
    decoder = baseline.Decoder(shapes.GPU_SHAPES["near-zero"], "cpu")
    ids, caches = torch.arange(6).view(1, 6), decoder.caches(1, 6)
    for end in range(1, 7):
        last = decoder.step(ids[:, end - 1 : end], [cache[:, :, :, :end] for cache in caches])
    assert torch.equal(last, decoder.step(ids, None))
    assert baseline.decode(decoder, 2, 16, "cpu", {"read_gb_per_s": 1.0})["share_of_read_rate"] > 0


def test_what_runs_beside_the_builds_needs_nothing_built(tmp_path: Path) -> None:
    """As in a fresh clone, without the extension."""
    (first, *_) = suite.groups(plan.Plan(out_dir=tmp_path, is_dry=True).stages())
    modules = [one.command[2] for lane in first for one in lane if one.command[1] == "-m"]
    assert modules == ["bench.gpu.roofs", "bench.gpu.baseline"]
    script = "import sys\nsys.modules['lmi_core'] = None\n" + "\n".join(
        f"import {module}" for module in modules
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=100)


@pytest.mark.timeout(120)
def test_a_start_is_measured_beyond_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The other device's start is the next test's: importing torch is most of it.
    monkeypatch.setenv("OPTION_DEVICE", "cpu")
    shape = shapes.GPU_SHAPES["near-zero"]
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
        shapes.GPU_SHAPES["near-zero"], tmp_path / "model", make=ready.make_tensor
    )
    row = ready.measure_start(model)
    assert row["started"] == "engine: no server without nowhere"
    assert row["ready_s"] > row["read_s"]


def test_the_server_is_that_of_these_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where another one is installed."""
    installed = tmp_path / "installed/lmi_server"
    installed.mkdir(parents=True)
    (installed / "__init__.py").touch()
    monkeypatch.setattr(sys, "path", [str(installed.parent), *sys.path])
    monkeypatch.delitem(sys.modules, "lmi_server", raising=False)
    monkeypatch.setenv("PYTHONPATH", "")
    named = tmp_path / "named"
    named.mkdir()
    ready.name_the_server(named)
    script = "import lmi_server; print(lmi_server.__file__)"
    command = [sys.executable, "-c", script]
    found = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert Path(found.stdout.strip()).resolve().parent == Path("server").resolve()


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
    items = kernels.sample_items(2, 500, "cpu", {})
    assert [item.what.split()[2] for item in items[::2]] == ["greedy:", "drawn:", "top-p:"]
    items = [item for item in items if item.what.endswith("torch")]
    assert [item.measure()["us"] > 0 for item in items] == [True] * 3


def test_the_smoke_calls_every_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the emulator, whose results are torch's but for roundings."""
    from lmi_core.ops.kernels.cuda.library import Library
    from tests.ops.cuda_kernels import use_cuda_kernels

    use_cuda_kernels(torch.device("cpu"), monkeypatch)
    monkeypatch.setattr(Library, "call_with", Library.call_with)
    monkeypatch.setattr(smoke, "_called", set())
    smoke.note_calls()
    items = smoke.items_of("cpu")
    with torch.inference_mode():
        rows = {item.what: item.measure() for item in items}
    assert rows["kernels that nothing called"]["num_kernels"] >= 15
    assert all(row["difference"] <= row["allowed"] for row in list(rows.values())[:-1])


def test_a_process_that_ends_costs_one_row(tmp_path: Path) -> None:
    """Whether it ends in the item, hangs there, or finds the device lost right after it."""
    path = tmp_path / "rows.json"
    script = tmp_path / "items.py"
    script.write_text("""if True:
        import os, sys, time
        from types import SimpleNamespace
        sys.modules["torch"] = SimpleNamespace()  # which nothing here needs
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


@pytest.mark.timeout(300)
def test_tests_go_on_behind_one_that_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of seven processes, importing what the file's tests don't use would be most of the time.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_PLUGINS", "pytest_timeout")
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
    runs = gpu_tests.Runs("not gpu", timeout_s=2, limit_s=300.0)
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


def test_every_file_with_gpu_tests_is_in_the_suite(request: pytest.FixtureRequest) -> None:
    """Each once, as a session of all tests has collected them."""
    root, items = Path(__file__).parents[2], request.session.items
    folders = {root / "tests" / name for name in ("ops", "runners", "adapters", "structured")}
    is_whole = folders <= {folder for item in items for folder in item.path.parents}
    if not is_whole or request.config.option.keyword or request.config.option.markexpr:
        pytest.skip("not all tests were collected")
    files = {item.path for item in items if item.get_closest_marker("gpu")}
    named = plan.STEP_TESTS + plan.OTHER_TESTS
    assert sorted(str(file.relative_to(root)) for file in files) == sorted(named)


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
    *rows, graphs = asyncio.run(engine.measure(settings(path, **changes)))
    assert graphs["assumed_mib"] > 0 == graphs["mib_each"]
    assert rows == json.loads(path.read_text())
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
