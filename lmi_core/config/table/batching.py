"""Dynamic batching, queues and workers: keys that the model server reads itself."""

from dataclasses import replace

from lmi_core.config.table.option import Action, Flag, Option, honoured, mapped, no_effect
from lmi_core.config.table.value_type import Bool, Int, Text
from lmi_core.settings.placement import MAX_WORKERS

_SYSTEMS = ("batching",)
_ONE_ENGINE = no_effect("one engine serves the model; it takes as many requests as its batch holds")
_PLACED = "tests/config/test_placed_copies.py"
_PLACED_ON_RAY = f"{_PLACED}::test_copies_on_the_gpus_of_a_cluster_by_load"
_COPIES_ON_CPU = honoured(
    None,
    "copies in processes of their own on the CPU, as option.num_copies",
    test=f"{_PLACED}::test_copies_on_the_cpu",
    by_value=dict.fromkeys((0, 1), _ONE_ENGINE),
)
_COPIES_ON_GPUS = honoured(
    None,
    "copies on the GPUs of a Ray cluster, as option.num_copies",
    test=_PLACED_ON_RAY,
    by_value=dict.fromkeys((0, 1), _ONE_ENGINE),
)
_BY_LOAD = "tests/server/models/test_copies.py::test_copies_by_load"
_COPIES_BY_LOAD = honoured(None, "most copies, which are started by load", test=_BY_LOAD)
_CONTINUOUS = no_effect("the lmi engine batches continuously and never waits to fill a batch")
_ENGINE_MEMORY = no_effect("memory is planned by the engine; set option.kv_cache_bytes")


def _of(action: Action, test: str) -> Action:
    return replace(action, test=test)


def _workers(key: str, *env: str, action: Action = _ONE_ENGINE) -> Option:
    return Option(
        key=key,
        type=Int(0, MAX_WORKERS),
        doc=f"{'Fewest' if key.endswith('minWorkers') else 'Most'} workers of a model.",
        systems=_SYSTEMS,
        env=env,
        actions={"lmi": action},
    )


OPTIONS = (
    Option(
        key="job_queue_size",
        type=Int(1),
        doc="Requests that may wait; more are refused at once.",
        systems=("common", "batching", "tgi"),
        default=1000,
        defaults={"tgi": 128},
        spellings=("option.job_queue_size",),
        env=("MAX_CONCURRENT_REQUESTS",),
        flag=Flag("--max-concurrent-requests", "MAX_CONCURRENT_REQUESTS"),
        actions={
            "lmi": honoured(
                "max_queue_size",
                test="tests/config/test_honoured_limits.py::test_requests_that_may_wait",
            ),
            "vllm": mapped("max_queue_size"),
            "trtllm": mapped("max_queue_size"),
        },
    ),
    Option(
        key="batch_size",
        type=Int(1),
        doc="Requests that dynamic batching collects into one call.",
        systems=_SYSTEMS,
        default=1,
        spellings=("option.batch_size", "max_dynamic_batch_size"),
        actions={
            "lmi": _CONTINUOUS,
            "neuron": mapped("max_num_seqs"),
        },
    ),
    Option(
        key="max_batch_delay",
        type=Int(0),
        doc="Milliseconds to wait for a dynamic batch to fill.",
        systems=_SYSTEMS,
        default=100,
        spellings=("option.max_batch_delay",),
        actions={"lmi": _CONTINUOUS},
    ),
    Option(
        key="max_idle_time",
        type=Int(0),
        doc="Seconds until an idle extra worker ends.",
        systems=_SYSTEMS,
        default=60,
        spellings=("option.max_idle_time",),
        actions={"lmi": honoured(None, "of a copy that was started by load", test=_BY_LOAD)},
    ),
    Option(
        key="load_on_devices",
        type=Text("*, or device names separated by ';'"),
        doc="Devices that hold a copy of the model.",
        systems=("common", "batching"),
        default="*",
        spellings=("option.load_on_devices",),
        actions={"lmi": mapped(None, "the devices that hold a copy each")},
    ),
    _workers(
        "minWorkers", "SERVING_MIN_WORKERS", "SAGEMAKER_NUM_MODEL_WORKERS", action=_COPIES_ON_CPU
    ),
    _workers(
        "maxWorkers", "SERVING_MAX_WORKERS", "SAGEMAKER_NUM_MODEL_WORKERS", action=_COPIES_BY_LOAD
    ),
    _workers("gpu.minWorkers", action=_COPIES_ON_GPUS),
    _workers("gpu.maxWorkers", action=_of(_COPIES_BY_LOAD, _PLACED_ON_RAY)),
    _workers("cpu.minWorkers", action=_COPIES_ON_CPU),
    _workers("cpu.maxWorkers", action=_of(_COPIES_BY_LOAD, f"{_PLACED}::test_copies_by_load")),
    Option(
        key="required_memory_mb",
        type=Int(0),
        doc="Memory in MiB that must be free before the model loads.",
        systems=_SYSTEMS,
        actions={"lmi": _ENGINE_MEMORY},
    ),
    Option(
        key="gpu.required_memory_mb",
        type=Int(0),
        doc="Device memory in MiB that must be free before the model loads.",
        systems=_SYSTEMS,
        actions={"lmi": _ENGINE_MEMORY},
    ),
    Option(
        key="reserved_memory_mb",
        type=Int(0),
        doc="Memory in MiB to leave free.",
        systems=_SYSTEMS,
        default=500,
        actions={"lmi": _ENGINE_MEMORY},
    ),
    Option(
        key="gpu.reserved_memory_mb",
        type=Int(0),
        doc="Device memory in MiB to leave free.",
        systems=_SYSTEMS,
        actions={"lmi": _ENGINE_MEMORY},
    ),
    Option(
        key="translatorFactory",
        type=Text("Java class"),
        doc="Java translator of the reference server.",
        systems=_SYSTEMS,
        actions={"lmi": no_effect("no Java runs here")},
    ),
    Option(
        key="retry_threshold",
        type=Int(0),
        doc="Worker failures until a model counts as failed.",
        systems=_SYSTEMS,
        default=10,
        actions={"lmi": no_effect("a second failed step in a row marks the engine unhealthy")},
    ),
    Option(
        key="log_request_metric",
        type=Bool(),
        doc="Log metrics of every request.",
        systems=_SYSTEMS,
        actions={"lmi": no_effect("metrics are read from /metrics")},
    ),
    Option(
        key="metrics_aggregation",
        type=Int(1),
        doc="Requests summed up in one logged metric.",
        systems=_SYSTEMS,
        default=1000,
        actions={"lmi": no_effect("metrics are read from /metrics")},
    ),
    Option(
        key="metric_dimension",
        type=Text("name"),
        doc="Dimension name of logged metrics.",
        systems=_SYSTEMS,
        default="model",
        actions={"lmi": no_effect("metrics are read from /metrics")},
    ),
)
