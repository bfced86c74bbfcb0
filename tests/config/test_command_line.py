"""Launcher flags and our own arguments."""

import json

import pytest

from lmi_core.config.problem import Problems
from lmi_core.config.sources.command_line import parse_command_line
from lmi_core.config.sources.merge import merge


def parse(*argv):
    problems = Problems()
    invocation = parse_command_line(argv, problems)
    return invocation, merge(invocation.settings, problems), problems


def test_launcher_flags():
    invocation, values, problems = parse(
        *("--model-id", "gpt2", "--num-shard=2", "--quantize", "bitsandbytes-nf4"),
        *("--trust-remote-code", "--max-input-length", "7", "-p", "8080"),
    )
    assert invocation.tgi
    assert not problems.items
    assert {key: value.value for key, value in values.known.items()} == {
        "option.model_id": "gpt2",
        "option.tensor_parallel_degree": 2,
        "option.quantize": "bitsandbytes-nf4",
        "option.trust_remote_code": True,
        "option.max_input_tokens": 7,
        "option.port": 8080,
    }
    assert values.where("option.tensor_parallel_degree") == "--num-shard"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--num_shard", "2"], "--num_shard: unknown flag; did you mean --num-shard?"),
        (["--zzz"], "unknown flag; see lmi explain --help"),
        (["--num-shard"], "--num-shard needs a value"),
        (["--num-shard", "--port", "1"], "--num-shard needs a value"),
        (["--num-shard", "two"], "option.tensor_parallel_degree='two' is not integer"),
        (["--trust-remote-code=true"], "takes no value"),
        (["--trust-remote-code", "true"], "takes no value"),
        (["--quantize", "AWQ"], "'AWQ' is not one of awq"),
        (["--option", "x"], "'x' is not key=value"),
        (["--lora-modules", '{"name": "a"}'], "is no JSON object with name and path"),
        (["--lora-modules={"], "is no JSON object with name and path"),
        (["--enable-log-stats"], "--enable-log-stats: unknown flag; see lmi explain --help"),
        (["--max-modell-len", "9"], "unknown flag; did you mean --max-model-len?"),
        (["--tensor-paralel-size", "9"], "unknown flag; did you mean --tensor-parallel-size?"),
    ],
)
def test_faults(argv, message):
    invocation, _, problems = parse(*argv)
    assert message in " ".join(map(str, problems.errors))
    assert invocation.models == []


@pytest.mark.parametrize(
    ("argv", "models"),
    [
        (["--no-such-space", "4"], []),
        (["--no-such-space", "org/draft", "--port", "1"], []),
        (["--no-such-bias", "-1"], []),
        (["--no-such-space=4", "org/m"], ["org/m"]),
        (["--no-such-switch", "HERE"], ["HERE"]),
        (["org/m", "--no-such-space", "4"], ["org/m"]),
    ],
)
def test_the_value_of_an_unknown_flag_is_no_model(tmp_path, argv, models):
    here = {"HERE": str(tmp_path)}
    invocation, _, problems = parse(*(here.get(argument, argument) for argument in argv))
    assert invocation.models == [here.get(model, model) for model in models]
    assert len(problems.errors) == 1


def test_own_arguments():
    invocation, values, problems = parse(
        *("dir", "--option", "option.dtype=fp32", "-o", "seed=3", "--strict", "--json"),
        *("-f", "c.properties", "-s", "/store", "-m", "a=/m/a", "b=/m/b", "--prefer-native"),
    )
    assert not problems.items
    assert invocation.models == ["dir"]
    assert invocation.config_file == "c.properties"
    assert (invocation.strict, invocation.json, invocation.prefer_native) == (True, True, True)
    assert not invocation.tgi
    assert values.get("option.dtype") == "fp32"
    assert values.get("option.seed") == 3
    assert values.get("load_models") == "a=/m/a,b=/m/b"
    assert values.get("model_store") == "/store"
    assert values.where("option.dtype") == "--option option.dtype"


def test_every_option_is_a_flag_by_its_own_name():
    invocation, values, problems = parse(
        *("m", "--max-model-len", "64", "--enforce-eager", "--kv-dtype=fp32"),
        *("--enable-prefix-caching", "false", "--dtype", "bf16"),
    )
    assert not problems.items
    assert invocation.models == ["m"]
    assert {key: value.value for key, value in values.known.items()} == {
        "option.max_model_len": 64,
        "option.enforce_eager": True,
        "option.kv_cache_dtype": "fp32",
        "option.enable_prefix_caching": False,
        "option.dtype": "bf16",
    }


@pytest.mark.parametrize(
    ("argv", "key", "value"),
    [
        (["--host", "::1"], "option.hostname", "::1"),
        (["--threads", "2"], "option.num_threads", 2),
        (["--served-model-name", "m"], "option.modelName", "m"),
        (["--max-queue-size", "5"], "job_queue_size", 5),
        (["--no-overlap"], "option.overlap", False),
        (["--no-prefix-caching"], "option.enable_prefix_caching", False),
        (["--guaranteed-no-evict"], "option.guaranteed_no_evict", True),
        (["--offline"], "offline", True),
        (["--model-url-pattern", "x"], "model_url_pattern", "x"),
        (["-v"], "verbose", True),
        (["--dtype", "half"], "option.dtype", "half"),
        (["--max_model_len", "5"], "option.max_model_len", 5),
        (["--max-model-len", "1.5k"], "option.max_model_len", 1500),
        (["--max-model-len", "-1"], "option.max_model_len", "auto"),
        (["-O3"], "option.compilation_config", "3"),
        (["-O", "2"], "option.compilation_config", "2"),
        (["-O.mode=3"], "option.compilation_config", '{"mode": 3}'),
        (["--enable-log-requests"], "option.enable_log_requests", True),
        (["--kv-cache-dtype", "auto"], "option.kv_cache_dtype", "auto"),
        (["-tp", "2"], "option.tensor_parallel_degree", 2),
        (
            ["--cors-allow-origin", "http://a", "--cors-allow-origin=http://b"],
            "option.cors_allow_origin",
            "http://a,http://b",
        ),
        (["--lora-modules", "a=/x", "b=/y"], "option.lora_adapters", ("a=/x", "b=/y")),
        (
            ["--lora-modules", "a=/x", '{"name": "b", "path": "/y", "base_model_name": "m"}'],
            "option.lora_adapters",
            ("a=/x", "b=/y"),
        ),
        (["--no-enable-prefix-caching"], "option.enable_prefix_caching", False),
        (["-c", "4096"], "option.ctx_size", 4096),
        (["-np", "4"], "option.max_rolling_batch_size", 4),
        (["-hf", "o/m:Q4_K_M"], "option.model_id", "o/m:Q4_K_M"),
        (["-hfr", "o/m"], "option.model_id", "o/m"),
        (["-n", "-1"], "option.n_predict", -1),
        (["--predict", "64"], "option.n_predict", 64),
        (["--temp", "0.7"], "option.temp", 0.7),
        (["-ngl", "all"], "option.n_gpu_layers", "all"),
        (["-fa"], "option.flash_attn", "on"),
        (["-fa", "--mlock"], "option.flash_attn", "on"),
        (["-fa", "auto"], "option.flash_attn", "auto"),
        (["--no-mmap"], "option.mmap", False),
        (["-ctk", "q8_0"], "option.cache_type_k", "q8_0"),
        (["--kv-cache-bytes", "1M"], "option.kv_cache_bytes", 1 << 20),
    ],
)
def test_flags_of_our_own(argv, key, value):
    invocation, values, problems = parse(*argv)
    assert not problems.items
    assert values.get(key) == value
    assert not invocation.tgi


def test_everything_after_two_dashes_is_a_model():
    assert parse("--", "--strict", "x")[0].models == ["--strict", "x"]


def test_a_model_may_be_a_flags_value():
    invocation, _, problems = parse("--model", "dir", "--dtype", "half")
    assert (invocation.models, invocation.tgi, problems.items) == (["dir"], False, [])


def test_further_names_of_a_model_are_no_models() -> None:
    invocation, values, problems = parse("org/m", "--served-model-name", "a", "b")
    assert (invocation.models, values.get("option.modelName")) == (["org/m"], "a")
    (problem,) = problems.items
    assert "a model has one name here; leave out 'b'" in problem.message
    for argv in (["--served-model-name", "a", "gpt2"], ["--served-model-name", "a", "org/m"]):
        invocation, _, problems = parse(*argv)
        assert (invocation.models, problems.items) == (argv[2:], [])


def test_several_api_keys_behind_one_flag() -> None:
    invocation, values, problems = parse("org/m", "--api-key", "a", "b", "c", "--port", "1")
    assert (invocation.models, problems.items) == (["org/m"], [])
    assert (values.get("option.api_key"), values.get("api_keys")) == ("a", ("b", "c"))
    invocation, values, problems = parse("--api-key", "a", "org/m")
    assert (invocation.models, values.get("api_keys")) == (["org/m"], None)
    _, values, problems = parse("--model", "org/m", "--api-key", "a", "b,c")
    assert values.get("api_keys") is None
    (problem,) = problems.errors
    assert problem.message == "a further key has a comma, which ends a key of api_keys"


def test_parts_of_an_options_json() -> None:
    invocation, values, problems = parse(
        *("org/m", "--speculative-config.method", "ngram"),
        *("--speculative_config.num_speculative_tokens", "4", "--hf-overrides.a.b", "x.y"),
        *("--hf-overrides.a.c=true", "--hf-overrides.a", '{"d": null}'),
        *("--hf-overrides.e+", "1,2", "--hf-overrides.e+=3"),
    )
    assert (invocation.models, problems.items) == (["org/m"], [])
    assert json.loads(values.get("option.speculative_config")) == {
        "method": "ngram",
        "num_speculative_tokens": 4,
    }
    assert json.loads(values.get("option.hf_overrides")) == {
        "a": {"b": "x.y", "c": True, "d": None},
        "e": ["1", "2", "3"],
    }
    assert values.where("option.hf_overrides") == "--hf-overrides"


def test_a_part_that_is_given_twice() -> None:
    argv = ("--hf-overrides.a.b", "1", "--hf-overrides.a", "2", "--hf-overrides.a.b", "3")
    _, values, problems = parse(*argv)
    assert json.loads(values.get("option.hf_overrides")) == {"a": {"b": 3}}
    assert [p.where for p in problems.warnings] == ["--hf-overrides.a", "--hf-overrides.a.b"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--speculative-config.method"], "--speculative-config.method needs a value"),
        (["--hf-overrides.", "1"], "--hf-overrides.: unknown flag"),
        (["--hf-overrides..a", "1"], "--hf-overrides..a: unknown flag"),
        (["--revision.a", "1"], "--revision.a: unknown flag"),
        (["--port.a", "1"], "--port.a: unknown flag"),
        (["--no-such.a", "1"], "--no-such.a: unknown flag"),
        (["--hf-overrides" + ".a" * 100_000, "1"], "--hf-overrides: is nested too deeply"),
    ],
)
def test_parts_of_nothing(argv, message):
    invocation, _, problems = parse(*argv)
    assert invocation.models == []
    assert message in " ".join(map(str, problems.errors))
