"""Variables become settings as the reference reads them."""

import pytest

from lmi_core.config.problem import Problems
from lmi_core.config.sources.environment import read_environment
from lmi_core.config.sources.merge import merge


def read(environ, **kwargs):
    problems = Problems()
    return merge(read_environment(environ, problems, **kwargs), problems), problems


@pytest.mark.parametrize(
    ("variable", "text", "key", "value"),
    [
        ("OPTION_MODEL_ID", "gpt2", "option.model_id", "gpt2"),
        ("OPTION_ENTRYPOINT", "model.py", "option.entryPoint", "model.py"),
        ("OPTION_ENGINE", "MPI", "engine", "MPI"),
        ("OPTION_LOAD_IN_8BIT", "true", "option.load_in_8bit", True),
        ("OPTION_modelName", "m", "option.modelName", "m"),
        ("OPTION_MAX_NUM_SEQS", "8", "option.max_rolling_batch_size", 8),
        ("SERVING_JOB_QUEUE_SIZE", "10", "job_queue_size", 10),
        ("SERVING_LOAD_MODELS", "ALL", "load_models", "ALL"),
        ("SERVING_MIN_WORKERS", "2", "minWorkers", 2),
        ("TENSOR_PARALLEL_DEGREE", "max", "option.tensor_parallel_degree", "max"),
        ("SM_NUM_GPUS", "4", "option.tensor_parallel_degree", 4),
        ("HF_MODEL_QUANTIZE", "awq", "option.quantize", "awq"),
        ("HF_MODEL_TRUST_REMOTE_CODE", "true", "option.trust_remote_code", True),
        ("MAX_CONCURRENT_REQUESTS", "7", "job_queue_size", 7),
        ("MAX_BATCH_PREFILL_TOKENS", "9", "option.max_rolling_batch_prefill_tokens", 9),
        ("MAX_BATCH_SIZE", "5", "option.max_rolling_batch_size", 5),
        ("ENABLE_CUDA_GRAPHS", "true", "option.enforce_eager", False),
        ("ENABLE_CUDA_GRAPHS", "yes", "option.enforce_eager", True),
        ("SM_VLLM_MODEL", "org/name", "option.model_id", "org/name"),
        ("SM_VLLM_MAX_MODEL_LEN", "12000", "option.max_model_len", 12000),
        ("SM_VLLM_ENFORCE_EAGER", "", "option.enforce_eager", True),
        ("SM_VLLM_TENSOR_PARALLEL_SIZE", "2", "option.tensor_parallel_degree", 2),
        ("SM_LLAMA_CPP_CTX_SIZE", "4096", "option.ctx_size", 4096),
        ("SM_LLAMA_CPP_PARALLEL", "2", "option.max_rolling_batch_size", 2),
        ("VLLM_API_KEY", "secret", "option.api_key", "secret"),
        ("VLLM_LOGGING_LEVEL", "DEBUG", "log_level", "debug"),
        ("VLLM_CPU_KVCACHE_SPACE", "2", "option.kv_cache_bytes", 2 << 30),
        ("VLLM_BATCH_INVARIANT", "1", "option.deterministic", True),
        ("CUDA_MEMORY_FRACTION", "0.5", "option.gpu_memory_utilization", 0.5),
        ("PIPELINE_PARALLEL_DEGREE", "2", "option.pipeline_parallel_degree", 2),
        ("MODEL_LOADING_TIMEOUT", "1200", "option.model_loading_timeout", 1200),
        ("SAGEMAKER_MAX_PAYLOAD_IN_MB", "2", "max_request_size", 2 << 20),
        ("DJL_OFFLINE", "true", "offline", True),
        ("MAX_INPUT_LENGTH", "99", "option.max_input_tokens", 99),
        ("MAX_TOTAL_TOKENS", "100", "option.max_total_tokens", 100),
        ("SPECULATE", "2", "option.speculate", 2),
    ],
)
def test_variable(variable, text, key, value):
    values, problems = read({variable: text})
    assert values.get(key) == value
    assert values.where(key) == variable
    assert not problems.items


def test_empty_values_and_other_variables_do_not_count():
    values, problems = read({"OPTION_DTYPE": "", "PATH": "/bin", "OPTIONAL": "x", "OPTION_": "y"})
    assert not values.known
    assert not values.unknown
    assert not problems.items


def test_the_regular_variable_wins_over_aliases():
    values, _ = read(
        {"SM_NUM_GPUS": "8", "TENSOR_PARALLEL_DEGREE": "4", "OPTION_TENSOR_PARALLEL_DEGREE": "2"}
    )
    assert values.get("option.tensor_parallel_degree") == 2
    values, _ = read({"SM_NUM_GPUS": "8", "TENSOR_PARALLEL_DEGREE": "4"})
    assert values.get("option.tensor_parallel_degree") == 4


def test_unknown_variables_of_our_prefixes_are_warnings():
    values, problems = read({"OPTION_ROLING_BATCH": "auto", "SERVING_FOO_BAR_BAZ": "1"})
    assert set(values.unknown) == {"option.roling_batch", "foo_bar_baz"}
    assert "did you mean option.rolling_batch?" in str(problems.warnings[0])


def test_ambiguous_launcher_variables_count_only_for_a_launcher():
    common = {"PORT": "80", "REVISION": "main", "HOSTNAME": "box"}
    assert not read(common)[0].known
    values, problems = read({**common, "MODEL_ID": "gpt2"})
    assert values.get("option.port") == 80
    assert values.get("option.revision") == "main"
    assert values.get("option.hostname") is None
    assert not problems.items
    assert read({"HOSTNAME": "127.0.0.1"}, tgi=True)[0].get("option.hostname") == "127.0.0.1"


def test_launcher_switches_are_strict_truth_values():
    _, problems = read({"TRUST_REMOTE_CODE": "1"})
    assert "exactly true or false" in str(problems.errors[0])
    assert read({"TRUST_REMOTE_CODE": "true"})[0].get("option.trust_remote_code") is True


def test_an_unknown_flag_of_another_servers_container_is_a_warning_with_the_nearest():
    values, problems = read({"SM_VLLM_MAX_MODL_LEN": "9", "SM_VLLM_ZZZZ": "1"})
    assert not values.known
    assert [str(problem) for problem in problems.warnings] == [
        "SM_VLLM_MAX_MODL_LEN: unknown flag --max-modl-len; did you mean SM_VLLM_MAX_MODEL_LEN?",
        "SM_VLLM_ZZZZ: unknown flag --zzzz; it has no effect",
    ]


@pytest.mark.parametrize(
    ("variable", "text", "key", "outcome"),
    [
        ("PREFIX_CACHING", "0", "option.enable_prefix_caching", "honoured"),
        ("PREFILL_CHUNKING", "1", "option.prefill_chunking", "no effect"),
        ("ATTENTION", "paged", "option.attention", "no effect"),
        ("USE_FLASH_ATTENTION", "true", "option.use_flash_attention", "no effect"),
        ("TGI_WIGGLE_ROOM", "0.9", "option.tgi_wiggle_room", "no effect"),
        ("DISABLE_EXLLAMA", "True", "option.disable_exllama", "no effect"),
        ("WATERMARK_GAMMA", "0.5", "option.watermark_gamma", "honoured"),
    ],
)
def test_variables_of_a_launcher_without_flags(explained, variable, text, key, outcome):
    report = explained(environ={"MODEL_ID": "org/m", variable: text})
    row = next(row for row in report.rows[0] if row.key == key)
    assert (row.value, row.where) == (text, variable)
    assert row.outcome == outcome
    assert not report.errors


def test_a_launchers_switch_for_its_environment_takes_no_value(explained):
    report = explained("--env", "--model-id", "org/m", "-e")
    assert not report.errors
    assert [row.key for row in report.server_rows] == ["option.print_environment"]


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("debug", "debug"),
        ("info,text_generation_router=debug", "info"),
        ("text_generation_launcher=debug", "info"),
        ("WARN", "warning"),
        ("trace", "debug"),
        ("off", "error"),
    ],
)
def test_a_launchers_level_of_its_log(explained, text, level):
    report = explained(environ={"MODEL_ID": "org/m", "LOG_LEVEL": text})
    assert (report.server.log_level, report.errors) == (level, ())
    assert report.server_rows[0].where == "LOG_LEVEL"
    assert explained("org/m", environ={"LOG_LEVEL": text}).server.log_level == "info"


@pytest.mark.parametrize(
    "variable",
    ["COMPUTE_TYPE", "HF_HUB_ENABLE_HF_TRANSFER", "MAX_IMAGE_FETCH_SIZE", "MESSAGES_API_ENABLED"],
)
def test_a_launchers_variables_of_the_server(explained, variable):
    text = "true" if variable == "MESSAGES_API_ENABLED" else "1"
    report = explained(environ={"MODEL_ID": "org/m", variable: text})
    assert [row.where for row in report.server_rows] == [variable]
    assert not report.errors
