"""Rules that tie several keys together."""

import pytest

from lmi_core.config.targets.host import Host

LLAMA = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 2048}


def texts(problems):
    return "\n".join(map(str, problems))


@pytest.mark.parametrize(
    ("properties", "message"),
    [
        (
            "batch_size=2\noption.rolling_batch=disable\noption.enable_streaming=true",
            "batch_size=2 can't stream",
        ),
        (
            "option.rolling_batch=scheduler\noption.quantize=squeezellm",
            "option.quantize=squeezellm is not one of bitsandbytes4",
        ),
        ("engine=DeepSpeed\noption.rolling_batch=vllm", "rolling_batch=vllm is not one of auto"),
        (
            "engine=DeepSpeed\noption.quantize=smoothquant\noption.dtype=bf16",
            "option.dtype=bf16 can't be used with option.quantize=smoothquant",
        ),
        ("engine=DeepSpeed\noption.checkpoint=c.json", "option.checkpoint needs option.dtype"),
        (
            "engine=DeepSpeed\noption.checkpoint=c\noption.dtype=fp16\n"
            "option.quantize=dynamic_int8",
            "can't be combined",
        ),
        (
            "option.rolling_batch=lmi-dist\noption.enable_lora=true\n"
            "option.speculative_draft_model=d",
            "can't be used together",
        ),
        (
            "option.rolling_batch=lmi-dist\noption.dtype=int8\noption.quantize=gptq",
            "remove one",
        ),
        (
            "option.entryPoint=djl_python.transformers_neuronx\nbatch_size=4\n"
            "option.rolling_batch=auto",
            "exclude each other",
        ),
        (
            "option.entryPoint=djl_python.transformers_neuronx\noption.model_loader=tnx\n"
            "option.partition_schema=optimum",
            "needs loader optimum",
        ),
        (
            "option.entryPoint=djl_python.transformers_neuronx\noption.model_loader=optimum\n"
            "option.partition_schema=legacy",
            "needs model_loader=tnx",
        ),
        (
            "option.entryPoint=djl_python.transformers_neuronx\noption.compiled_graph_path=absent",
            "neither s3://bucket/key nor a directory",
        ),
        (
            "option.rolling_batch=trtllm\noption.rotary_scaling_type=linear",
            "must be set together",
        ),
        ("option.max_model_len=4096", "more than the model's 2048 positions"),
        ("option.tokens_per_block=40", "not a multiple of 16"),
        ("option.max_input_tokens=9\noption.max_model_len=9", "leaves no room for an answer"),
        ("option.max_input_len=9\noption.max_model_len=9", "leaves no room for an answer"),
        ("option.max_input_tokens=9\noption.max_total_tokens=9", "leaves no room for an answer"),
        ("option.entryPoint=djl_python.hugingface", "is no built-in handler; there are djl_pyth"),
    ],
)
def test_errors(model_dir, explained, properties, message):
    report = explained(model_dir(properties, config=LLAMA))
    assert message in texts(report.errors)


@pytest.mark.parametrize(
    ("properties", "message"),
    [
        ("engine=DeepSpeed\noption.quantize=awq", "treats option.quantize=awq as unset"),
        ("job_queue_size=4\noption.max_rolling_batch_size=8", "is below"),
        ("engine=Python\noption.rolling_batch=lmi-dist", "nothing here needs MPI"),
        ("option.load_in_8bit=false", "deprecated since 0.25; write option.quantize"),
        ("option.enable_streaming=true", "deprecated since 0.25"),
        (
            "option.entryPoint=djl_python.transformers_neuronx\noption.rolling_batch=vllm",
            "takes option.rolling_batch=vllm as auto",
        ),
    ],
)
def test_warnings(model_dir, explained, properties, message):
    report = explained(model_dir(properties, config=LLAMA))
    assert message in texts(report.warnings)
    assert not report.errors


@pytest.mark.parametrize(
    ("properties", "key", "why"),
    [
        (
            "option.prefix_cache_dir=kept\noption.enable_prefix_caching=false",
            "option.prefix_cache_dir",
            "option.enable_prefix_caching=false keeps no prefixes",
        ),
        (
            "option.task=embed\noption.speculation=ngram",
            "option.speculation",
            "the model is served for embeddings, it generates no texts",
        ),
        (
            "option.max_output_len=9\noption.max_model_len=64",
            "option.max_output_len",
            "option.max_model_len says how long a sequence may be",
        ),
    ],
)
def test_what_has_no_effect_beside_another_key(model_dir, explained, properties, key, why):
    report = explained(model_dir(properties, config=LLAMA))
    assert not report.errors
    assert {row.key: row.text for row in report.rows[0]}[key] == why


def test_a_library_that_no_image_has(model_dir, explained):
    report = explained(model_dir("", config=LLAMA), environ={"SERVING_FEATURES": "vllm,lmidist"})
    assert "SERVING_FEATURES: 'lmidist' is none of trtllm, lmi-dist" in texts(report.warnings)


def test_chatglm_needs_its_version(model_dir, explained):
    config = {"architectures": ["ChatGLMModel"], "model_type": "chatglm"}
    report = explained(model_dir("option.rolling_batch=trtllm", config=config))
    assert "chatglm needs option.chatglm_model_version" in texts(report.errors)


def test_a_quantised_checkpoint_that_cannot_be_read_is_refused(model_dir, explained):
    config = {**LLAMA, "quantization_config": {"quant_method": "hqq"}}
    report = explained(model_dir("", config=config))
    assert "quantised with hqq" in texts(report.errors)
    config = {**LLAMA, "quantization_config": {"quant_method": "bitsandbytes"}}
    report = explained(model_dir("", config=config))
    assert "load_in_4bit is false, and so is load_in_8bit" in texts(report.errors)


@pytest.mark.parametrize("method", ["fp8", "compressed-tensors"])
def test_an_fp8_checkpoint_is_read_everywhere(model_dir, explained, method):
    settings = {"quant_method": method, "format": "float-quantized"}
    config = {**LLAMA, "quantization_config": settings}
    for properties in ("", "option.quantize=fp8", "option.device=cuda\noption.quantize=fp8"):
        host = Host(num_gpus=1 if "cuda" in properties else 0)
        assert not explained(model_dir(properties, config=config), host=host).errors


def test_an_fp8_checkpoint_that_was_never_compared_is_refused(model_dir, explained):
    """No file of FBGEMM itself was read yet."""
    config = {**LLAMA, "quantization_config": {"quant_method": "fbgemm_fp8"}}
    assert "quantised with fbgemm_fp8" in texts(explained(model_dir("", config=config)).errors)


def test_fp8_weights_are_made_everywhere(model_dir, explained):
    for device in ("", "option.device=cuda\n"):
        name = model_dir(f"{device}option.quantize=fp8", config=LLAMA)
        assert not explained(name, host=Host(num_gpus=1 if device else 0)).errors


@pytest.mark.parametrize("format", ["nf4", "fp4"])
def test_bitsandbytes_four_bits_are_the_cpus(model_dir, explained, format):
    written = f"option.quantize=bitsandbytes-{format}"
    assert not explained(model_dir(written, config=LLAMA)).errors
    report = explained(model_dir(written, config=LLAMA), host=Host(num_gpus=1))
    assert f"quantize=bitsandbytes-{format} needs device=cpu, not cuda" in texts(report.errors)


def test_encoder_decoder_models_have_no_scheduler(model_dir, explained):
    config = {"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}
    report = explained(model_dir("option.rolling_batch=scheduler", config=config))
    assert "decoder models only" in texts(report.errors)


def test_an_adapter_alone_cannot_be_served(model_dir, explained):
    report = explained(model_dir("", adapter_config__json="{}"))
    assert "the model is a LoRA adapter, and its base model" in texts(report.errors)


@pytest.mark.parametrize("text", ["{", "[]", '"x"', "[" * 10_000])
def test_a_broken_config_json_is_an_error(model_dir, explained, text):
    report = explained(model_dir("", config__json=text))
    assert "config.json" in texts(report.errors)


@pytest.mark.parametrize(
    ("old", "expected"),
    [
        ("option.s3url=s3://b/m", ("option.model_id", "s3://b/m")),
        ("option.data_type=fp32", ("option.dtype", "fp32")),
        ("option.data_type=fp32\noption.dtype=bf16", ("option.dtype", "bf16")),
        ("option.load_in_8bit=true", ("option.quantize", "bitsandbytes8")),
        ("option.load_in_4bit=1\noption.load_in_8bit=1", ("option.quantize", "bitsandbytes4")),
        ("option.load_in_8bit=true\noption.quantize=awq", ("option.quantize", "bitsandbytes8")),
    ],
)
def test_deprecated_keys_turn_into_their_replacement(model_dir, explained, old, expected):
    model = explained(model_dir(old)).models[0]
    key, value = expected
    assert model.values[key].value == value


BOTH = "both set"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--max-input-tokens", "5", "--max-input-length", "6"], BOTH),
        (["--max-input-tokens", "10", "--max-total-tokens", "10"], "must be below"),
        (["--max-total-tokens", "10", "--max-batch-total-tokens", "9"], "must be at most"),
        (
            ["--max-batch-prefill-tokens", "10", "--max-batch-total-tokens", "9"],
            "must be at most",
        ),
        (["--validation-workers", "0"], "at least 1"),
        (["--num-shard", "0"], "--num-shard must be at least 1"),
        (["--sharded", "true", "--num-shard", "1"], "needs --num-shard above 1"),
        (["--sharded", "true"], "at least 2 devices, found 0"),
        (["--quantize", "exl2", "--num-shard", "2"], "can't be sharded"),
        (["--ngrok", "--ngrok-edge", "e"], "--ngrok needs --ngrok-authtoken"),
        (["--lora-adapters", "a@b@c"], "is not id, id=path"),
        (["--dtype", "bfloat16", "--quantize", "gptq"], "keep one"),
    ],
)
def test_launcher_rules(explained, argv, message):
    report = explained("--model-id", "org/m", *argv)
    assert message in texts(report.errors)


def test_both_names_of_the_input_length_count_in_the_environment(explained):
    environ = {"MODEL_ID": "org/m", "MAX_INPUT_TOKENS": "5", "MAX_INPUT_LENGTH": "5"}
    assert BOTH in texts(explained(environ=environ).errors)
