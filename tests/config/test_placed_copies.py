"""How many copies of a model configurations have, and on what."""

import pytest

from lmi_core.config.judge import judge
from lmi_core.config.resolve import examine
from lmi_core.config.targets.placed_subject import DEGREE
from lmi_core.demo import MODEL_DIR

from .cases import LLAMA, NO_CACHE
from .test_placement import VLLM, host, placed


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


@pytest.mark.parametrize(
    ("written", "copies", "ignored"),
    [
        ("minWorkers=2\nmaxWorkers=4", (2, 4), {}),
        ("gpu.minWorkers=2\ngpu.maxWorkers=3", (2, 3), {}),
        ("gpu.maxWorkers=3\nmaxWorkers=9", (1, 3), {"maxWorkers": "gpu.maxWorkers=3 says how"}),
        (
            "cpu.minWorkers=2\ncpu.maxWorkers=8",
            (1, 1),
            dict.fromkeys(("cpu.minWorkers", "cpu.maxWorkers"), "the model's are on GPUs"),
        ),
    ],
)
def test_copies_on_the_gpus_of_a_cluster_by_load(model_dir, written, copies, ignored):
    options = "option.on=ray\noption.device=cuda\n"
    report = examine([model_dir(options + written, config=LLAMA)], NO_CACHE, host())
    assert not report.errors
    placement = report.models[0].placement
    assert (placement.num_copies, placement.most_copies) == copies
    given = [row for row in report.rows[0] if "Workers" in row.key]
    without_effect = {row.key: row.text for row in given if row.outcome == "no effect"}
    assert without_effect.keys() == ignored.keys()
    assert all(why in without_effect[key] for key, why in ignored.items())


@pytest.mark.parametrize("on", [host(), host(1)])
def test_workers_on_other_devices_do_nothing(model_dir, on):
    written = "".join(
        f"{kind}.{which}Workers=2\n" for kind in ("cpu", "gpu") for which in ("min", "max")
    )
    report = examine([model_dir(written, config=LLAMA)], NO_CACHE, on)
    rows = {row.key: row.outcome for row in report.rows[0] if "gpu" in row.key}
    assert rows == dict.fromkeys(("gpu.minWorkers", "gpu.maxWorkers"), "no effect")
    expected = 1 if on.num_gpus else 2
    assert report.models[0].placement.num_copies == expected


def test_workers_of_another_librarys_engine_do_nothing(model_dir):
    keys = [f"{kind}{which}Workers" for kind in ("", "cpu.", "gpu.") for which in ("min", "max")]
    written = "".join(f"{key}=2\n" for key in keys)
    name = model_dir("option.rolling_batch=vllm\n" + written, config=LLAMA)
    report = examine([name], NO_CACHE, host(1, packages=VLLM))
    rows = [row for row in report.rows[0] if row.key in keys]
    assert [row.outcome for row in rows] == ["no effect"] * 6


def test_more_copies_of_ranks_than_there_are_cores_for_are_not_promised():
    written = ("-o", "num_copies=1", "-o", "maxWorkers=10", "-tp", "32")
    report, model = placed("--device", "cpu", *written, on=host())
    [warning] = report.warnings
    assert "maxWorkers=10 with option.tensor_parallel_degree=32 would need 320 cores" in str(
        warning
    )
    assert (warning.key, model.placement.most_copies) == ("maxWorkers", 3)
    assert model.placement.describe().startswith("1 to 3 copies, ")


@pytest.mark.parametrize("key", ["option.num_copies", "minWorkers"])
def test_a_model_that_gives_embeddings_goes_with_copies(model_dir, key):
    written = f"option.model_id={MODEL_DIR}\noption.task=text-embedding\n{key}=2"
    report = examine([model_dir(written)], NO_CACHE, host())
    assert judge(report.models[0], report.server, {}).problems == ()
    assert report.models[0].num_processes == 2


@pytest.mark.parametrize(
    ("num_gpus", "written", "key", "way"),
    [
        (2, "-tp 2", DEGREE, f"write {DEGREE}=1 with CUDA_VISIBLE_DEVICES=0"),
        (0, "-tp 2 --device cpu", DEGREE, f"write {DEGREE}=1"),
        (2, "", None, "start the server with CUDA_VISIBLE_DEVICES=0"),
        (0, "-o num_copies=2", "option.num_copies", "leave out option.num_copies"),
    ],
)
def test_processes_beside_formatters_are_refused_by_their_key(
    model_dir, num_gpus, written, key, way
):
    name = model_dir("", config=LLAMA, model__py="@output_formatter\ndef f(output): ...")
    report = examine([name, *written.split()], NO_CACHE, host(num_gpus))
    assert not report.errors
    problems = judge(report.models[0], report.server, {}).problems
    [problem] = [each for each in problems if "go with the formatters in model.py" in str(each)]
    assert (problem.key, problem.message.endswith(f"; {way}")) == (key, True)


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


@pytest.mark.parametrize("num_gpus", [0, 8])
def test_copies_on_the_gpus_of_a_ray_cluster(num_gpus):
    """Whatever the server's own machine has."""
    argv = ("--on", "ray", "--device", "cuda", "-o", "num_threads=6")
    report, model = placed(*argv, "-tp", "2", "-o", "minWorkers=3", on=host(num_gpus))
    assert not report.problems
    assert (model.is_on_ray, model.num_processes) == (True, 3)
    config = model.engine.config
    sizes = (config.device, config.tensor_parallel_degree, config.num_threads)
    assert sizes == ("cuda", 2, 6)
    assert model.placement.describe() == (
        "3 copies, 2 GPUs each (tensor parallel degree 2) of a Ray cluster's nodes, 6 cores each"
    )


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("tensor_parallel_degree=max", "goes by the GPUs of this machine"),
        ("device_id=0", "names devices of one machine"),
        ("pipeline_parallel_degree=2", "the lmi engine has no pipelines"),
    ],
)
def test_what_ray_does_not_place_on_gpus_is_refused(written, message):
    argv = ("--on", "ray", "--device", "cuda", "-o", written)
    [error] = placed(*argv, on=host(4))[0].errors
    assert (message in str(error), error.key) == (True, f"option.{written.split('=')[0]}")


@pytest.mark.parametrize(
    ("argv", "num_gpus", "message"),
    [
        ((), 1, "option.on=ray, and 1 GPU is visible here, which says nothing of the nodes"),
        (("--device", "torch-cpu"), 0, "option.on=ray doesn't go with option.device=torch-cpu"),
        (("--rolling-batch", "disable", "--force-padded", "true"), 0, "the lmi engine's copies"),
    ],
)
def test_what_ray_does_not_place_is_refused(argv, num_gpus, message):
    report, _ = placed("--on", "ray", *argv, on=host(num_gpus, packages={"transformers"}))
    [error] = report.errors
    assert (message in str(error), error.key) == (True, "option.on")
