"""Which implementation of an op is chosen, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lmi_core.errors import ModelError, UserError
from lmi_core.ops.kernels import select


def torch_device(name: str) -> Any:
    import torch

    return torch.device(name)


def test_every_op_has_a_torch_implementation() -> None:
    chosen = select.select("cuda", "torch")
    assert set(chosen.values()) == {"torch"}
    assert set(chosen) == set(select.IMPLEMENTATIONS)


def test_no_triton_without_a_gpu_unless_forced() -> None:
    assert set(select.select("cpu", "").values()) == {"torch"}


def test_triton_is_preferred_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "_has_triton", lambda: True)
    chosen = select.select("cuda", "rms_norm:torch")
    assert chosen["attention"] == "triton"
    assert chosen["rms_norm"] == chosen["sample"] == "torch"


def test_triton_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "_has_triton", lambda: False)
    assert set(select.select("cuda", "").values()) == {"torch"}
    with pytest.raises(UserError, match="Triton, which is not installed"):
        select.select("cuda", "attention:triton")


def test_triton_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "_has_triton", lambda: True)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UserError, match="set TRITON_INTERPRET=1"):
        select.select("cpu", "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert select.select("cpu", "triton")["attention"] == "triton"
    assert select.select("cpu", "")["attention"] == "torch"


def test_the_environment_is_what_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMI_OPS", "linear:triton")
    with pytest.raises(UserError, match="linear has no triton implementation; it has"):
        select.select("cuda")


@pytest.mark.parametrize(
    ("forced", "message"),
    [
        ("cuda", "known are native, triton, torch"),
        ("attn:torch", "op 'attn'; known are linear"),
        ("torch,linear:triton", "linear has no triton"),
        ("attention:", "'attention:'"),
    ],
)
def test_unknown_names(forced: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        select.select("cuda", forced)


def test_native_kernels_run_only_where_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", exc_type=ImportError)
    from tests.ops.cuda_kernels import use_cuda_kernels

    use_cuda_kernels(torch_device("cpu"), monkeypatch)
    assert "native" not in select.select("cpu", "").values()
    chosen = select.select("cpu", "rms_norm:native")
    assert chosen["rms_norm"] == "native"
    assert chosen["gated_activation"] == "torch"
    assert select.load(chosen).rms_norm.__module__ == "lmi_core.ops.kernels.cuda.norm"


def test_who_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", exc_type=ImportError)
    from tests.ops.cuda_kernels import use_cuda_kernels

    use_cuda_kernels(torch_device("cpu"), monkeypatch)
    assert select.describe_launch(select.select("cpu", "")).startswith("from Python (")
    chosen = select.select("cpu", "native")
    assert select.describe_launch(chosen).startswith("from C++ where every node of a model has")
    assert "launch" not in select.launched_from_python(chosen)
    assert select.load(chosen).attention.__module__ == "lmi_core.ops.kernels.cuda.attention"
    assert "launch" not in select.select("cpu", "native,launch:torch")
    text = select.describe_launch(select.select("cpu", "native,attention:torch"))
    assert text == "from Python for models with attention (torch), else from C++"
    with pytest.raises(UserError, match="launch is by native or torch"):
        select.select("cpu", "launch:triton")
    # What the device can't run isn't launched there either.
    assert "launch" not in select.select("cuda", "native")


def test_dependent_launches_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("torch", exc_type=ImportError)
    from lmi_core.ops.kernels.cuda import library
    from tests.ops.cuda_kernels import use_cuda_kernels

    use_cuda_kernels(torch_device("cpu"), monkeypatch)
    functions = SimpleNamespace(asked=[], status=0, lmi_cuda_error=lambda: b"sm_80")

    def use_dependent_launch(is_used: int) -> int:
        functions.asked.append(is_used)
        return functions.status

    functions.lmi_cuda_use_dependent_launch = use_dependent_launch
    loaded = library.load()
    monkeypatch.setattr(loaded, "_functions", functions)
    select.select("cpu", "native")
    monkeypatch.setenv("LMI_CUDA_DEPENDENT_LAUNCH", "1")
    select.select("cpu", "native")
    assert functions.asked == [0, 1]
    assert not caplog.messages
    functions.status = -1
    select.select("cpu", "native")
    assert caplog.messages == ["LMI_CUDA_DEPENDENT_LAUNCH=1 is not followed: sm_80"]
    monkeypatch.setenv("LMI_CUDA_DEPENDENT_LAUNCH", "yes")
    with pytest.raises(UserError, match="LMI_CUDA_DEPENDENT_LAUNCH=yes: 0 and 1 are allowed"):
        select.select("cpu", "native")


def test_why_an_op_runs_where_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "_has_triton", lambda: True)
    monkeypatch.setenv("LMI_OPS", "rms_norm:torch")
    chosen = select.select("cuda")
    why = select.reasons(chosen)
    assert (chosen["rms_norm"], why["rms_norm"]) == ("torch", "LMI_OPS asks for it")
    assert (chosen["attention"], why["attention"]) == ("triton", "Triton is installed")
    assert (chosen["sample"], why["sample"]) == ("torch", "there is no Triton kernel")
    monkeypatch.setattr(select, "_has_triton", lambda: False)
    assert select.reasons(select.select("cuda"))["attention"] == "Triton is not installed"
    monkeypatch.setenv("LMI_OPS", "attention:native")
    fallen_back = {**chosen, "attention": "triton"}
    why = select.reasons(fallen_back)["attention"]
    assert why == "LMI_OPS asks for native, which can't run here"


def test_what_runs_for_any_company(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "_has_triton", lambda: True)
    monkeypatch.delenv("LMI_OPS", raising=False)
    chosen = select.select_invariant("cuda")
    assert {op for op, name in chosen.items() if name == "invariant"} == {
        "linear",
        "linear_packed",
        "linear_quantized",
        "grouped_linear",
        "head_linear",
        "attention",
    }
    assert chosen["rms_norm"] == "triton"
    assert chosen["sample"] == "by row"
    assert set(select.select_invariant("cuda", "torch").values()) == {"by row"}
    monkeypatch.setattr(select, "_has_triton", lambda: False)
    assert set(select.select_invariant("cuda").values()) == {"by row"}
    for forced in ("triton", "attention:native", "rms_norm:torch", "torch,attention:triton"):
        with pytest.raises(UserError, match="LMI_OPS"):
            select.select_invariant("cuda", forced)


def test_native_kernels_that_are_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", exc_type=ImportError)
    monkeypatch.setenv("LMI_CUDA_LIBRARY", "/nowhere/liblmi_cuda.so")
    with pytest.raises(UserError, match=r"LMI_CUDA_LIBRARY=/nowhere/liblmi_cuda.so is no file"):
        select.select("cuda", "native")


def test_native_kernels_that_the_device_cannot_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("torch", exc_type=ImportError)
    from tests.ops.cuda_kernels import use_cuda_kernels

    use_cuda_kernels(torch_device("cpu"), monkeypatch)
    chosen = select.select("cuda", "torch,rms_norm:native")
    assert chosen["rms_norm"] in ("triton", "torch")
    assert f"but {chosen['rms_norm']}: rms_norm" in caplog.text
    select.select("cuda", "native")
    assert len(caplog.messages) == 2, "once for all ops"


def test_native_kernels_run_unasked_where_they_are_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch", exc_type=ImportError)
    from lmi_core.ops.kernels import library_file
    from lmi_core.ops.kernels.cuda import library
    from tests.ops.cuda_kernels import use_cuda_kernels

    with monkeypatch.context() as without:
        without.delenv("LMI_CUDA_LIBRARY", raising=False)
        without.setattr(library_file, "find", lambda: None)
        assert "the wheel lmi-cuda is not installed" in str(select.why_not_native("cuda"))
    use_cuda_kernels(torch_device("cpu"), monkeypatch)
    assert "finds no GPU" in str(select.why_not_native("cuda"))
    capability = [9, 0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu: tuple(capability))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(library.Library, "unusable_because", lambda *_: None)
    assert set(select.select("cuda", "").values()) == {"native"}
    chosen = select.select("cuda", "rms_norm:torch,launch:torch")
    assert (chosen["rms_norm"], chosen["attention"]) == ("torch", "native")
    assert select.LAUNCH not in chosen
    assert "native" not in select.select("cuda", "torch").values()
    capability[0] = 10
    assert "proven on compute capability 9.0, and a GPU here has 10.0" in str(
        select.why_not_native("cuda")
    )
    assert "native" not in select.select("cuda", "").values()
    assert select.select("cuda", "attention:native")["attention"] == "native"


def test_description() -> None:
    assert select.describe({"a": "torch", "b": "triton", "c": "torch"}) == "torch: a, c; triton: b"


def test_load() -> None:
    pytest.importorskip("torch", exc_type=ImportError)
    kernels = select.load(select.select("cpu", "torch"))
    assert kernels.attention.__module__ == "lmi_core.ops.kernels.torch_ops.attention"
    assert kernels.chosen["sample"] == "torch"


def test_what_no_invariant_kernel_has_runs_row_by_row(caplog: pytest.LogCaptureFixture) -> None:
    assert set(select.by_row("latent attention").values()) == {"by row"}
    assert "no invariant kernel has latent attention" in caplog.text


def test_a_model_with_an_op_that_devices_lack_is_refused_by_name() -> None:
    np, ops, eager = (
        pytest.importorskip(name) for name in ("numpy", "lmi_core.ops", "lmi_core.ops.device.eager")
    )
    graph = ops.Graph("bf16")
    x = ops.embed(graph, np.zeros((4, 8), np.float32))
    graph.add("nothing", x, {"x": x})
    kernels = select.load(select.select("cpu", "torch"))
    with pytest.raises(ModelError, match="no op nothing"):
        eager.EagerGraph(graph, kernels, torch_device("cpu"))
