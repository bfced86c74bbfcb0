"""From sources to frozen objects: settings, ranks of sources, provenance, placement."""

import dataclasses
from pathlib import Path

import pytest

from lmi_core.config.targets.host import Host
from lmi_core.errors import ConfigError
from lmi_core.settings.engine_config import EngineConfig

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


def settings_of(deployment):
    (model,) = deployment.models
    return model.engine.shown()


def test_a_directory_becomes_an_engine_configuration(model_dir, resolved):
    name = model_dir(
        "option.dtype=fp16\noption.max_rolling_batch_size=8\njob_queue_size=9\n"
        "option.max_model_len=512\n",
        config=LLAMA,
    )
    (model,) = resolved(name).models
    assert model.engine_config() == EngineConfig(
        model=Path(name),
        served_model_name="model",
        dtype="bf16",
        max_num_seqs=8,
        max_queue_size=9,
        max_model_len=512,
    )
    assert model.where("option.dtype") == "model/serving.properties:1"
    assert model.where("option.revision") == "default"


def test_the_result_is_frozen(model_dir, resolved):
    deployment = resolved(model_dir("", config=LLAMA))
    (model,) = deployment.models
    for frozen in (deployment, deployment.server, model):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(frozen, dataclasses.fields(frozen)[0].name, "other")
    with pytest.raises(dataclasses.FrozenInstanceError):
        model.engine.config.seed = 1
    with pytest.raises(TypeError):
        model.values["option.seed"] = 1


@pytest.mark.parametrize(
    ("properties", "expected"),
    [
        ("option.max_tokens=300", {"max_model_len": 300}),
        ("option.n_positions=300", {"max_model_len": 300}),
        ("option.max_input_len=200\noption.max_output_len=100", {"max_model_len": 300}),
        ("option.max_output_len=100", {"max_model_len": 1124}),
        ("option.max_input_len=9\noption.max_model_len=300", {"max_model_len": 300}),
        ("option.max_rolling_batch_prefill_tokens=64", {"max_num_batched_tokens": 64}),
        ("option.max_num_batched_tokens=64", {"max_num_batched_tokens": 64}),
        ("option.max_num_tokens=64", {"max_num_batched_tokens": 64}),
        ("option.max_num_sequences=3", {"max_num_seqs": 3}),
        ("option.predict_timeout=7", {"max_queue_s": 7.0}),
        ("option.predict_timeout=7\noption.max_queue_s=2.5", {"max_queue_s": 2.5}),
        ("option.scheduling_policy=fcfs", {"scheduling_policy": "fcfs"}),
        ("option.tokens_per_block=64", {"block_size": 64}),
        ("option.enable_kv_cache_reuse=false", {"enable_prefix_caching": False}),
        ("option.enable_prefix_caching=true", {"enable_prefix_caching": True}),
        (
            "option.batch_scheduler_policy=guaranteed_no_evict",
            {"guaranteed_no_evict": True},
        ),
        ("option.batch_scheduler_policy=max_utilization", {"guaranteed_no_evict": False}),
        ("option.enable_trt_overlap=true", {"overlap": True}),
        ("option.kv_cache_dtype=bf16", {"kv_dtype": "bf16"}),
        ("option.instruction_set=auto", {"instruction_set": ""}),
        ("option.instruction_set=avx2", {"instruction_set": "avx2"}),
        ("option.seed=7", {"seed": 7}),
        ("option.num_threads=2", {"num_threads": 2}),
        ("option.kv_cache_bytes=4096", {"kv_cache_bytes": 4096}),
        ("option.max_logprobs=5", {"max_logprobs": 5}),
        ("option.dtype=float32", {"dtype": "fp32"}),
    ],
)
def test_keys_of_every_system_reach_the_native_engine(model_dir, resolved, properties, expected):
    settings = settings_of(resolved(model_dir(properties, config=LLAMA)))
    assert {key: settings[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("properties", "size"),
    [
        ("", 32),
        ("engine=DeepSpeed", 4),
        ("option.rolling_batch=lmi-dist", 256),
        ("option.rolling_batch=scheduler", 32),
        ("option.rolling_batch=lmi-dist\noption.max_rolling_batch_size=2", 2),
    ],
)
def test_the_batch_size_defaults_by_system(model_dir, resolved, properties, size):
    assert settings_of(resolved(model_dir(properties, config=LLAMA)))["max_num_seqs"] == size


def test_two_keys_for_one_setting_conflict_only_at_equal_rank(model_dir, resolved):
    name = model_dir("option.max_model_len=100\noption.max_tokens=200", config=LLAMA)
    with pytest.raises(ConfigError, match="both set max_model_len"):
        resolved(name)
    name = model_dir("option.max_model_len=100", config=LLAMA)
    deployment = resolved(name, environ={"OPTION_MAX_TOKENS": "200"})
    assert settings_of(deployment)["max_model_len"] == 100


def test_files_win_over_variables_and_overrides_over_files(model_dir, resolved):
    name = model_dir("option.max_rolling_batch_size=8", config=LLAMA)
    environ = {"OPTION_MAX_ROLLING_BATCH_SIZE": "4", "OPTION_SEED": "5"}
    settings = settings_of(resolved(name, environ=environ))
    assert (settings["max_num_seqs"], settings["seed"]) == (8, 5)
    settings = settings_of(
        resolved(name, "--option", "option.max_rolling_batch_size=2", environ=environ)
    )
    assert settings["max_num_seqs"] == 2


def test_the_servers_file_is_weaker_than_variables(model_dir, resolved, tmp_path):
    name = model_dir("", config=LLAMA)
    Path("config.properties").write_text(
        "inference_address=http://127.0.0.1:9000\nmax_request_size=10\njob_queue_size=5\n"
    )
    deployment = resolved(name, environ={"SERVING_MAX_REQUEST_SIZE": "20"})
    server = deployment.server
    assert (server.host, server.port) == ("127.0.0.1", 9000)
    assert server.max_request_size_bytes == 20
    assert settings_of(deployment)["max_queue_size"] == 5


def test_launcher_defaults_count_only_for_a_launcher(resolved):
    tgi = resolved("--model-id", "org/m").server
    assert (tgi.port, tgi.max_best_of, tgi.max_stop_sequences) == (3000, 2, 4)
    lmi = resolved("org/m").server
    assert (lmi.port, lmi.max_best_of, lmi.max_stop_sequences) == (8080, None, None)


def test_a_server_key_in_a_model_file_is_a_warning(model_dir, explained):
    report = explained(model_dir("max_request_size=10", config=LLAMA))
    assert "is a key of the server" in str(report.warnings[0])


@pytest.mark.parametrize(
    ("text", "host", "expected"),
    [
        ("max", Host(num_gpus=4), (4, 1)),
        ("2", Host(num_gpus=4), (2, 2)),
        ("-1", Host(num_gpus=4), (1, 4)),
        ("max", Host(), (1, 1)),
        ("max", Host(num_neuron_cores=2), (2, 1)),
    ],
)
def test_copies_follow_from_the_tensor_parallel_degree(explained, text, host, expected):
    argv = ["org/m", "-o", "rolling_batch=vllm", "-o", f"tensor_parallel_degree={text}"]
    placement = explained(*argv, host=host).models[0].placement
    assert (placement.tensor_parallel_degree, placement.num_copies) == expected


def test_a_launcher_makes_one_copy(explained):
    report = explained("--model-id", "org/m", "--num-shard", "1", host=Host(num_gpus=4))
    assert report.models[0].placement.num_copies == 1
    assert not report.errors
    assert "4 GPUs are visible" in str(report.warnings[0])


def test_too_few_devices_are_an_error(resolved):
    argv = ("org/m", "-o", "rolling_batch=vllm", "-o", "tensor_parallel_degree=8")
    host = Host(num_gpus=4, packages=frozenset({"vllm"}))
    with pytest.raises(ConfigError, match="=8 needs 8 GPUs, but 4 GPUs are visible"):
        resolved(*argv, host=host)


@pytest.mark.parametrize(
    ("option", "setting"),
    [
        ("quantize=int8", ("quantize", "int8")),
        ("load_in_8bit=true", ("quantize", "bitsandbytes")),
        ("dtype=int8", ("quantize", "int8")),
        ("kv_cache_dtype=int8", ("kv_dtype", "int8")),
        ("deterministic=true", ("deterministic", True)),
    ],
)
def test_what_every_device_has(resolved, option, setting):
    for device in ("cpu", "cuda"):
        options = ("-o", f"device={device}", "-o", option)
        config = resolved("org/m", *options, host=Host(num_gpus=1))
        assert config.models[0].engine.shown()[setting[0]] == setting[1]


def test_settings_of_the_cpu_engine_have_no_effect_on_a_gpu(explained):
    argv = ("org/m", "-o", "device=cuda", "-o", "num_threads=2")
    report = explained(*argv, host=Host(num_gpus=1))
    assert report.models[0].engine.config.device == "cuda"
    assert "num_threads" not in report.models[0].engine.shown()
    assert "belongs to option.device=cpu" in str(report.warnings[0])
    assert "no GPU is visible" in str(explained("org/m", "-o", "device=cuda").errors[0])


def test_all_faults_of_a_configuration_come_together(model_dir, resolved):
    name = model_dir("option.dtype=fp17\noption.block_size=24\noption.lora_adapters=a=b=c\n")
    with pytest.raises(ConfigError) as caught:
        resolved(name, "--port", "x", environ={"OPTION_SEED": "-1"})
    text = str(caught.value)
    for part in (
        "model/serving.properties:1: option.dtype='fp17'",
        "model/serving.properties:2: option.block_size=24 is not a multiple of 16",
        "model/serving.properties:3: LoRA adapter 'a=b=c' is not id, id=path",
        "--port: option.port='x'",
        "OPTION_SEED: option.seed='-1'",
    ):
        assert part in text
    assert len(caught.value.problems) == 5


def test_error_rates_reach_the_server(resolved):
    environ = {"SERVING_ERROR_RATE_ANY": "10/PT30S", "SERVING_ERROR_RATE_MODEL": "3"}
    server = resolved("org/m", environ=environ).server
    assert dict(server.error_rates) == {"any": (10, 30.0), "model": (3, 60.0)}
    with pytest.raises(ConfigError, match="error_rate_any='often' is not number"):
        resolved("org/m", environ={"SERVING_ERROR_RATE_ANY": "often"})


@pytest.mark.parametrize("pattern", ["[", "(" * 5000, "x{99999999999}"])
def test_a_broken_pattern_of_urls_is_named(resolved, pattern):
    with pytest.raises(ConfigError, match="model_url_pattern is not a regular expression"):
        resolved("org/m", environ={"SERVING_MODEL_URL_PATTERN": pattern})


def test_a_doubtful_pattern_of_urls_is_taken(resolved):
    environ = {"SERVING_MODEL_URL_PATTERN": "[[]x"}
    assert resolved("org/m", environ=environ).server.model_url_pattern == "[[]x"
