"""Where configurations run on hosts with 0, 1, 4 and 8 GPUs, and what they are refused for."""

import io
import os
import re
from pathlib import Path

import pytest

from lmi_core.config.explain import main
from lmi_core.config.judge import Verdict, judge
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


def test_ranks_of_copies_have_a_core_each():
    written = ("--device", "cpu", "-tp", "48", "-o", "num_copies=2")
    report, model = placed(*written, on=host())
    assert not report.problems
    expected = "2 copies, the CPU by 48 ranks each, 1 core each, 1152 GiB of memory"
    assert model.placement.describe() == expected
    report, _ = placed("--device", "cpu", "-tp", "64", "-o", "num_copies=2", on=host())
    assert "needs 128 cores, one for each process, and there are 96" in str(report.errors[0])


def test_copies_on_the_cpu_divide_its_cores():
    report, model = placed("-o", "num_copies=4", on=host())
    assert not report.problems
    assert (model.placement.num_copies, model.placement.num_cores) == (4, 24)
    assert model.placement.describe() == "4 copies, the CPU, 24 cores each, 1152 GiB of memory"
    report, _ = placed("-o", "num_copies=4", on=host(1))
    [error] = report.errors
    assert "option.num_copies=4 needs 4 GPUs, but 1 GPU is visible: write" in str(error)
    assert "write option.num_copies=1, or name at most 1" in str(error)
    assert error.key == "option.num_copies"


def test_what_copies_are_bound_to_on_ray_is_said():
    report, _ = placed("--on", "ray", "-o", "cpu_binding=cores", on=host())
    [error] = report.errors
    assert "cpu_binding=cores doesn't go with option.on=ray" in str(error)
    report, _ = placed("--on", "ray", "-o", "cpu_binding=nodes", on=host())
    row = next(row for row in report.rows[0] if row.key == "option.cpu_binding")
    assert (row.outcome, row.text) == (
        "no effect",
        "a copy of one process may use all of its Ray node",
    )
    written = ("--on", "ray", "--device", "cpu", "-tp", "2", "-o", "cpu_binding=nodes")
    report, model = placed(*written, on=host())
    assert (not report.errors, model.engine.config.cpu_binding) == (True, "nodes")


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


@pytest.mark.parametrize(("num_copies", "devices", "named"), [(2, "gpu0", 1), (1, "gpu0;gpu1", 2)])
def test_devices_that_are_named_for_another_number_of_copies(num_copies, devices, named):
    written = ("-o", f"num_copies={num_copies}", "-o", f"load_on_devices={devices}")
    report, _ = placed(*written, on=host(2))
    assert f"names devices for {named}: write {named}, or leave" in str(report.errors[0])


def test_torch_on_the_cpu_has_no_copies_by_load():
    written = ("num_copies=1", "minWorkers=1", "maxWorkers=4")
    options = [part for text in written for part in ("-o", text)]
    _, model = placed("--device", "torch-cpu", *options, on=host())
    assert model.placement.most_copies == 1


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


@pytest.mark.parametrize(
    ("degree", "expected"),
    [("max", {"tensor_parallel_size": 4}), ("2", {"tensor_parallel_size": 2})],
)
def test_vllm_gets_copies_under_its_own_name(model_dir, explained, degree, expected):
    name = model_dir(f"option.rolling_batch=vllm\noption.tensor_parallel_degree={degree}")
    (model,) = explained(name, host=host(4, packages=VLLM)).models
    copies = {} if degree == "max" else {"data_parallel_size": 2}
    names = ("tensor_parallel_size", "data_parallel_size")
    found = {
        name: model.library.arguments[name] for name in names if name in model.library.arguments
    }
    assert found == expected | copies


@pytest.mark.parametrize(
    ("argv", "device_ids"),
    [
        ((), (("0",), ("1",), ("2",), ("3",))),
        (("-tp", "1"), (("0",), ("1",), ("2",), ("3",))),
        (("-tp", "-1"), (("0",), ("1",), ("2",), ("3",))),
        (("-o", "load_on_devices=0;1"), (("0",), ("1",))),
        (("-o", "num_copies=4"), (("0",), ("1",), ("2",), ("3",))),
    ],
)
def test_copies_follow_from_the_devices(argv, device_ids):
    report, model = placed(*argv, on=host(4))
    assert not report.errors
    placement = model.placement
    assert (placement.num_copies, placement.device_ids) == (len(device_ids), device_ids)
    assert placement.environment(1) == {"CUDA_VISIBLE_DEVICES": "1"}
    assert placement.num_cores == 96 // len(device_ids)
    assert (model.num_processes, placement.most_copies) == (len(device_ids), len(device_ids))
    assert model.engine.config.device == "cuda"


def test_fewer_copies_than_gpus_leave_some_unused():
    report, _ = placed("-o", "num_copies=2", on=host(4))
    [error] = report.errors
    assert (
        "4 GPUs are visible, and option.num_copies=2 would use 2 of them: write "
        "option.num_copies=4, or start the server with CUDA_VISIBLE_DEVICES=0,1"
    ) in str(error)
    report, model = placed("-o", "minWorkers=2", on=host(4))
    assert (report.errors, model.placement.num_copies) == ((), 4)
    row = next(row for row in report.rows[0] if row.key == "minWorkers")
    assert (row.outcome, "a copy on each GPU" in row.text) == ("no effect", True)


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


@pytest.mark.parametrize(
    ("written", "num_copies", "num_cores"),
    [
        ("option.num_copies=4", 4, 24),
        ("option.num_copies=1", 1, 96),
        ("option.num_copies=200", 200, 1),
        ("option.num_copies=2\noption.num_threads=3", 2, 3),
        ("minWorkers=3\nmaxWorkers=3", 3, 32),
        ("minWorkers=3\ncpu.minWorkers=2", 2, 48),
        ("minWorkers=3\noption.num_copies=2", 2, 48),
        ("minWorkers=1\nmaxWorkers=2", 1, 96),
        ("minWorkers=0", 1, 96),
    ],
)
def test_copies_on_the_cpu(model_dir, written, num_copies, num_cores):
    report = examine([model_dir(written, config=LLAMA)], NO_CACHE, host())
    assert not report.errors
    [model] = report.models
    placement = model.placement
    assert (placement.num_copies, placement.num_cores) == (num_copies, num_cores)
    asked = num_copies > 1 or "num_copies" in written
    assert model.num_processes == (num_copies if asked else None)


@pytest.mark.parametrize(
    ("written", "num_gpus"),
    [("option.num_copies=2", 1), ("option.num_copies=2\noption.device=torch-cpu", 0)],
)
def test_copies_elsewhere_are_refused_by_name(model_dir, written, num_gpus):
    report = examine([model_dir(written, config=LLAMA)], NO_CACHE, host(num_gpus))
    assert [error.key for error in report.errors] == ["option.num_copies"]


@pytest.mark.parametrize(
    ("written", "most_copies", "ignored"),
    [
        ("minWorkers=2\nmaxWorkers=4\nmax_idle_time=9", 4, {}),
        ("minWorkers=2\nmaxWorkers=9\ncpu.maxWorkers=4", 4, {"maxWorkers": "cpu.maxWorkers=4"}),
        ("minWorkers=2\nmaxWorkers=2", 2, {"maxWorkers": "whatever the load"}),
        ("option.num_copies=1\nmaxWorkers=2", 2, {}),
        ("option.on=ray\nmaxWorkers=3", 3, {}),
        ("minWorkers=1\nmaxWorkers=2", 1, {"maxWorkers": "one engine serves the model"}),
        ("minWorkers=1\nmax_idle_time=9", 1, {"max_idle_time": "one engine serves the model"}),
    ],
)
def test_copies_by_load(model_dir, written, most_copies, ignored):
    report = examine([model_dir(written, config=LLAMA)], NO_CACHE, host())
    assert not report.errors
    placement = report.models[0].placement
    assert placement.most_copies == most_copies
    ranges = most_copies > placement.num_copies
    assert placement.describe().startswith(f"{placement.num_copies} to ") == ranges
    given = [row for row in report.rows[0] if row.key in ("maxWorkers", "max_idle_time")]
    without_effect = {row.key: row.text for row in given if row.outcome == "no effect"}
    assert without_effect.keys() == ignored.keys()
    assert all(why in without_effect[key] for key, why in ignored.items())


@pytest.mark.parametrize("key", ["option.num_copies", "minWorkers"])
def test_a_model_that_gives_embeddings_goes_with_copies(model_dir, key):
    written = f"option.model_id={MODEL_DIR}\noption.task=text-embedding\n{key}=2"
    report = examine([model_dir(written)], NO_CACHE, host())
    assert judge(report.models[0], report.server, {}).problems == ()
    assert report.models[0].num_processes == 2


def test_copies_on_a_ray_cluster():
    report, model = placed("--on", "ray", "-o", "num_copies=3", on=host())
    assert not report.problems
    assert (model.is_on_ray, model.num_processes) == (True, 3)
    assert model.placement.describe() == "3 copies, the CPU of a Ray cluster's nodes"
    report, model = placed("--on", "ray", "-tp", "128", "--device", "cpu", on=host())
    assert not report.problems
    assert model.num_processes == 1
    assert model.placement.describe() == "the CPU of a Ray cluster's nodes by 128 ranks"
    report, model = placed("--on", "here", "-o", "ray_address=10.0.0.1:6379", on=host())
    assert (model.is_on_ray, model.num_processes) == (False, None)
    [row] = [row for row in report.rows[0] if row.key == "option.ray_address"]
    assert (row.outcome, "without option.on=ray" in row.text) == ("no effect", True)


@pytest.mark.parametrize(
    ("argv", "num_gpus", "message"),
    [
        ((), 1, "option.on=ray: Ray places copies on the CPU in this version, and 1 GPU is"),
        (("--device", "torch-cpu"), 0, "option.on=ray doesn't go with option.device=torch-cpu"),
        (("--rolling-batch", "disable", "--force-padded", "true"), 0, "the lmi engine's copies"),
    ],
)
def test_what_ray_does_not_place_is_refused(argv, num_gpus, message):
    report, _ = placed("--on", "ray", *argv, on=host(num_gpus, packages={"transformers"}))
    [error] = report.errors
    assert (message in str(error), error.key) == (True, "option.on")
