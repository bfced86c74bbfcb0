"""Where configurations run on hosts with 0, 1, 4 and 8 GPUs, and what they are refused for."""

import io
import os
import re
from pathlib import Path

import pytest

from lmi_core.config.explain import main
from lmi_core.config.judge import Verdict
from lmi_core.config.resolve import examine, resolve_entry
from lmi_core.config.sources.load_models import ModelEntry
from lmi_core.config.targets.host import Host
from lmi_core.demo import MODEL_DIR
from lmi_core.errors import ConfigError
from lmi_core.settings.placement import Placement

from .cases import LLAMA, NO_CACHE

GOLDEN = Path(__file__).parent / "golden_placement"
UPDATE = os.environ.get("LMI_UPDATE_GOLDEN") == "1"
VLLM = frozenset({"vllm"})
TRTLLM = frozenset({"tensorrt_llm"})


def host(num_gpus=0, **fields):
    """A machine of 96 cores, of the cloud."""
    sizes = {"gpu_memory_bytes": 80 << 30, "num_cores": 96, "memory_bytes": 1152 << 30}
    return Host(num_gpus=num_gpus, **{**sizes, **fields})


CONFIGURATIONS = {
    "lmi": {
        "no degree": "engine=Python",
        "max": "option.tensor_parallel_degree=max",
        "degree 1": "option.tensor_parallel_degree=1",
        "degree 4": "option.tensor_parallel_degree=4",
        "degree 4 on the CPU": "option.tensor_parallel_degree=4\noption.device=cpu",
        "degree 3": "option.tensor_parallel_degree=3",
        "2 stages": "option.tensor_parallel_degree=2\noption.pipeline_parallel_degree=2",
        "MPI": "engine=MPI\noption.rolling_batch=auto\noption.tensor_parallel_degree=-1",
        "one device by number": "load_on_devices=0",
        "another device": "option.device_id=3",
        "spread layers": "option.rolling_batch=disable\noption.device_map=auto",
        "cuda": "option.device=cuda",
        "on Ray": "option.on=ray\noption.tensor_parallel_degree=2\noption.num_copies=2",
        "on the GPUs of Ray's nodes": "option.on=ray\noption.device=cuda\n"
        "option.tensor_parallel_degree=2\noption.num_copies=2",
    },
    "tgi": {
        "no flag": "",
        "2 shards": "--num-shard 2",
        "1 shard": "--num-shard 1",
        "sharded": "--sharded true",
        "not sharded": "--sharded false",
    },
    "vllm": {
        "max": "option.rolling_batch=vllm\noption.tensor_parallel_degree=max",
        "degree 2": "option.rolling_batch=vllm\noption.tensor_parallel_degree=2",
        "stages": "option.rolling_batch=vllm\noption.tensor_parallel_degree=2\n"
        "option.pipeline_parallel_degree=2",
        "2 copies": "option.rolling_batch=vllm\noption.tensor_parallel_degree=2\n"
        "option.data_parallel_size=2",
        "on the CPU": "option.rolling_batch=vllm\noption.device=cpu",
    },
    "vllm_not_installed": {
        "no degree": "option.rolling_batch=vllm\noption.max_model_len=2048",
        "max": "option.rolling_batch=vllm\noption.tensor_parallel_degree=max",
        "degree 1": "option.rolling_batch=vllm\noption.tensor_parallel_degree=1",
        "a key of its own": "option.rolling_batch=vllm\noption.of_vllm=1",
    },
    "trtllm": {
        "max": "option.rolling_batch=trtllm\noption.tensor_parallel_degree=max",
        "degree 2": "engine=MPI\noption.rolling_batch=trtllm\noption.tensor_parallel_degree=2",
    },
}


def arguments(kind, written, model_dir):
    if kind != "tgi":
        return [model_dir(written, config=LLAMA)]
    return ["--model-id", model_dir("", config=LLAMA), *written.split()]


def lines_about_placement(text):
    """The backend, the devices, and what is refused or warned of."""
    _, _, rest = text.partition("\nrefused\n")
    _, _, warned = text.partition("\nwarnings\n")
    kept = re.findall(r"^  (?:backend|devices) .*", text, re.M)
    kept += [f"  refused{line}" for line in rest.partition("\n\n")[0].splitlines()]
    kept += [f"  warning{line}" for line in warned.partition("\n\n")[0].splitlines()]
    return kept


@pytest.mark.parametrize("kind", CONFIGURATIONS)
def test_explanations_on_hosts_of_all_sizes(kind, model_dir, monkeypatch):
    monkeypatch.setattr("lmi_core.config.explain.judge", lambda *arguments: Verdict(()))
    packages = {"vllm": VLLM, "trtllm": TRTLLM}.get(kind, frozenset())
    page = []
    for title, written in CONFIGURATIONS[kind].items():
        page.append(f"{title}: {written.replace(chr(10), ', ') or '(nothing)'}")
        for num_gpus in (0, 1, 4, 8):
            out = io.StringIO()
            argv = arguments(kind, written, model_dir)
            code = main(argv, environ=NO_CACHE, host=host(num_gpus, packages=packages), out=out)
            page += [f"- {num_gpus} GPUs: exit code {code}", *lines_about_placement(out.getvalue())]
        page.append("")
    path = GOLDEN / f"{kind}.txt"
    if UPDATE:
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(page))
    assert "\n".join(page) == path.read_text()


def placed(*argv, on, **environ):
    report = examine([str(MODEL_DIR), *argv], {**NO_CACHE, **environ}, on)
    return report, report.models[0]


def test_gpus_are_the_default():
    report, model = placed(on=host(1))
    assert not report.problems
    assert model.engine.config.device == "cuda"
    assert model.placement == Placement(
        device="cuda", device_ids=(("0",),), num_cores=96, memory_bytes=80 << 30
    )
    _, model = placed(on=host())
    assert (model.engine.config.device, model.placement.device_ids) == ("cpu", ())


def test_a_gpu_that_torch_cannot_use_is_not_left_unused_silently():
    on = host(1, torch_objection="torch is not installed here: pip install 'lmi-core[cuda]'")
    report, _ = placed(on=on)
    (error,) = report.errors
    assert "1 GPU is visible, but torch is not installed here" in str(error)
    assert "--device cpu serves it on the CPU" in str(error)
    report, model = placed("--device", "cpu", on=on)
    assert not report.problems
    assert model.engine.config.device == "cpu"


@pytest.mark.parametrize("num_gpus", [0, 1, 8])
def test_the_embedded_model_is_served_on_the_cpu_everywhere(num_gpus):
    on = host(num_gpus, torch_objection="torch is not installed here")
    report = examine([], NO_CACHE, on, default_model=MODEL_DIR)
    assert not report.problems
    assert report.models[0].engine.config.device == "cpu"
    named = examine(["--device", "cuda"], NO_CACHE, host(1), default_model=MODEL_DIR)
    assert named.models[0].engine.config.device == "cuda"


def test_a_degree_without_devices_names_the_flag_that_makes_it_go():
    report, _ = placed("-tp", "4", on=host())
    assert "option.tensor_parallel_degree=4 asks for 4 devices, and no GPU" in str(report.errors[0])
    assert "--device cpu serves the model on the CPU, by 4 processes" in str(report.errors[0])
    report, model = placed("-tp", "4", "--device", "cpu", on=host())
    assert not report.problems
    assert model.placement == Placement(
        tensor_parallel_degree=4, num_cores=24, memory_bytes=1152 << 30
    )
    assert model.placement.describe() == "the CPU by 4 ranks, 24 cores each, 1152 GiB of memory"
    assert (model.num_processes, model.engine.config.tensor_parallel_degree) == (1, 4)
    report, model = placed("-tp", "max", "--device", "cpu", on=host())
    row = next(row for row in report.rows[0] if row.key == "option.tensor_parallel_degree")
    assert (row.outcome, row.text) == ("no effect", "on the CPU one process uses all cores")
    assert model.placement == Placement(num_cores=96, memory_bytes=1152 << 30)
    _, model = placed("--threads", "6", on=host())
    assert model.placement.num_cores == 6


def test_a_degree_by_torch_on_the_cpu_is_a_number_of_ranks():
    report, model = placed("-tp", "2", "--device", "torch-cpu", on=host())
    assert not report.problems
    assert (
        model.placement.describe() == "the CPU by torch by 2 ranks, 48 cores each, 1152 GiB"
        " of memory"
    )
    config = model.engine.config
    assert (config.device, config.tensor_parallel_degree) == ("torch-cpu", 2)
    assert model.num_processes == 1


def test_models_that_are_added_are_placed_alike():
    entry = ModelEntry(str(MODEL_DIR), "m", "POST /models")
    model, _ = resolve_entry(entry, {}, (), NO_CACHE, host(1))
    assert model.placement.device == "cuda"
    with pytest.raises(ConfigError, match="asks for 4 devices, and no GPU is visible here"):
        resolve_entry(entry, {}, ("-tp", "4"), NO_CACHE, host())
    on_cpu = ModelEntry(str(MODEL_DIR), "m", "POST /models", devices=("cpu",))
    assert resolve_entry(on_cpu, {}, (), NO_CACHE, host(1))[0].placement.device == "cpu"


def test_devices_keep_their_names_in_what_is_to_be_written():
    on = host(4, gpu_names=("4", "5", "6", "7"))
    report, _ = placed("-o", "num_copies=2", on=on)
    assert "CUDA_VISIBLE_DEVICES=4,5" in str(report.errors[0])
    _, model = placed(on=on)
    assert model.placement.environment(2) == {"CUDA_VISIBLE_DEVICES": "6"}


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("load_on_devices=gpu7", "load_on_devices=gpu7, but 4 GPUs are visible, counted from 0"),
        ("load_on_devices=0;0", "is neither *, cpu, nor devices like gpu0;gpu1"),
        ("load_on_devices=2", "start it with CUDA_VISIBLE_DEVICES=2"),
        ("device_id=2", "start it with CUDA_VISIBLE_DEVICES=2"),
        ("load_on_devices=a", "is neither *, cpu, nor devices like gpu0;gpu1"),
    ],
)
def test_devices_that_are_named_and_cannot_be_had(written, message):
    report, _ = placed("-o", written, on=host(4))
    assert message in str(report.errors[0])


@pytest.mark.parametrize(
    "written", ["load_on_devices=cpu", "load_on_devices=-1", "device_map=cpu", "device=cpu"]
)
def test_who_names_the_cpu_means_it(written):
    report, model = placed("-o", written, on=host(4))
    assert not report.errors
    assert model.engine.config.device == "cpu"


@pytest.mark.parametrize("written", ["load_on_devices=0", "load_on_devices=gpu0", "device_id=0"])
def test_who_names_a_device_means_it_alone(written):
    report, model = placed("-o", written, on=host(4))
    assert not report.errors
    assert model.placement.device_ids == (("0",),)


def test_a_named_gpu_that_is_not_there():
    for written in ("device=cuda", "device_id=0", "load_on_devices=gpu0"):
        report, _ = placed("-o", written, on=host())
        assert "no GPU is visible here: write --device cpu" in str(report.errors[0])
    report, _ = placed("-o", "device=cuda", "-o", "load_on_devices=cpu", on=host(1))
    assert "option.device=cuda, but load_on_devices=cpu; keep one" in str(report.errors[0])


def test_spread_layers_are_for_transformers(model_dir, explained):
    other = {"architectures": ["OtherForCausalLM"]}
    for written in ("option.tensor_parallel_degree=4", "option.device_map=balanced"):
        name = model_dir(f"option.rolling_batch=disable\n{written}", config=other)
        report = explained(name, host=host(4, packages=frozenset({"transformers"})))
        assert not report.errors
        (model,) = report.models
        assert model.placement.device_ids == (("0", "1", "2", "3"),)
        assert model.engine.config.device_map == ("auto" if "degree" in written else "balanced")
    report = explained(
        model_dir("", config=other), host=host(4, packages=frozenset({"transformers"}))
    )
    assert "option.device_map=auto spreads a copy over all of them" in str(report.errors[0])
