"""What a custom handler's processes do with the keys that they take.

Every other key of a model is given to the handler as a property.
"""

from collections.abc import Mapping

from lmi_core.config.table.option import Action, honoured, mapped, no_effect

_POOL = "tests/custom_code/test_pool.py"
_PROCESS = "tests/custom_code/test_process.py"
_CONFIG = "tests/config/test_custom_code_settings.py"
_NO_MEMORY = no_effect("a handler plans its memory itself")

ACTIONS: Mapping[str, Action] = {
    "engine": no_effect("the handler runs in Python processes, whatever the engine"),
    "option.entryPoint": honoured(
        "path", test="tests/config/test_dispatch_handlers.py::test_another_file_may_be_the_handler"
    ),
    "option.handler": honoured(
        "function",
        test="tests/server/dialects/lmi/test_served_handlers.py::test_configuration_reaches_the_processes",
    ),
    "option.modelName": mapped("model_name"),
    "option.pythonExecutable": honoured(
        "python", "python is the server's own", test=f"{_PROCESS}::test_another_interpreter"
    ),
    "option.env": honoured("env", test=f"{_POOL}::test_configuration_reaches_the_handler"),
    "option.handler_environment": honoured(
        None,
        "given to the handler, of the variables with secrets of the server",
        test="tests/config/test_handler_environment.py::test_the_operator_may_pass_them_on",
    ),
    "option.enable_venv": no_effect(
        "requirements.txt always goes to a directory of its own per model"
    ),
    "option.max_output_size": honoured("max_output_bytes", test=f"{_POOL}::test_too_long_answers"),
    "option.predict_timeout": honoured(
        "predict_timeout_s", test=f"{_POOL}::test_a_call_that_takes_too_long"
    ),
    "option.model_loading_timeout": honoured(
        "loading_timeout_s", test=f"{_PROCESS}::test_loading_has_a_limit"
    ),
    "option.parallel_loading": mapped("parallel_loading"),
    "option.mpi_mode": no_effect("handlers run without MPI"),
    "job_queue_size": honoured(
        "max_queue_size", test=f"{_POOL}::test_the_queue_is_bounded_and_forgets_who_left"
    ),
    "batch_size": honoured(
        "batch_size", test=f"{_POOL}::test_batches_keep_their_order_and_their_own_errors"
    ),
    "max_batch_delay": honoured(
        "max_batch_delay_ms", test=f"{_POOL}::test_a_batch_does_not_wait_for_ever"
    ),
    "max_idle_time": honoured(
        "max_idle_time_s", test=f"{_POOL}::test_workers_are_added_while_many_wait"
    ),
    "minWorkers": honoured("min_workers", test=f"{_CONFIG}::test_workers"),
    "maxWorkers": honoured("max_workers", test=f"{_CONFIG}::test_workers"),
    "cpu.minWorkers": honoured(
        "min_workers", "where there are no GPUs", test=f"{_CONFIG}::test_workers"
    ),
    "cpu.maxWorkers": honoured(
        "max_workers", "where there are no GPUs", test=f"{_CONFIG}::test_workers"
    ),
    "gpu.minWorkers": honoured(
        "min_workers", "where there are GPUs", test=f"{_CONFIG}::test_workers"
    ),
    "gpu.maxWorkers": honoured(
        "max_workers", "where there are GPUs", test=f"{_CONFIG}::test_workers"
    ),
    "load_on_devices": no_effect("every process sees all devices; minWorkers starts more of them"),
    "required_memory_mb": _NO_MEMORY,
    "gpu.required_memory_mb": _NO_MEMORY,
    "reserved_memory_mb": _NO_MEMORY,
    "gpu.reserved_memory_mb": _NO_MEMORY,
    "translatorFactory": no_effect("no Java runs here"),
    "retry_threshold": honoured(
        "retry_threshold", test=f"{_POOL}::test_the_pool_fails_after_too_many_failures"
    ),
    "log_request_metric": no_effect("metrics are read from /metrics"),
    "metrics_aggregation": no_effect("metrics are read from /metrics"),
    "metric_dimension": no_effect("metrics are read from /metrics"),
}
