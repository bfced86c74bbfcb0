"""What a configuration says, done by the real engine: from written keys to behaviour."""

import asyncio
import json
import shutil
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from lmi_core.engine.engine import Engine
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.errors import UserError
from tests.checkpoints import cached_checkpoint
from tests.tiny_tokenizer import VOCAB_SIZE

pytestmark = pytest.mark.timeout(120)

PROMPT = tuple(range(10, 50))
TRTLLM = "engine=MPI\noption.rolling_batch=trtllm\n"
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1024}


@asynccontextmanager
async def running(config, watch=None):
    async with Engine(config, observer=watch, check_integrity=True) as engine:
        yield engine


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 60))


def params(num_tokens=4, **more):
    return SamplingParams(max_new_tokens=num_tokens, ignore_eos=True, **more)


async def generate(engine, prompt=PROMPT, num_tokens=4, **more):
    return [event async for event in engine.generate(prompt, params(num_tokens, **more))]


@pytest.mark.parametrize(
    ("properties", "num_cached"),
    [
        ("option.block_size=16\n", 32),
        ("option.block_size=16\noption.enable_prefix_caching=true\n", 32),
        ("option.block_size=16\noption.enable_prefix_caching=false\n", 0),
        (f"{TRTLLM}option.tokens_per_block=32\noption.enable_kv_cache_reuse=true\n", 32),
        (f"{TRTLLM}option.tokens_per_block=48\noption.enable_kv_cache_reuse=true\n", 0),
        (f"{TRTLLM}option.tokens_per_block=16\noption.enable_kv_cache_reuse=false\n", 0),
    ],
)
def test_reuse_of_prefixes_in_blocks(configured, properties, num_cached):
    async def main():
        async with running(configured(properties)) as engine:
            await generate(engine)
            assert (await generate(engine))[0].num_cached_tokens == num_cached

    run(main())


def test_most_log_probabilities(configured):
    async def main():
        async with running(configured("option.max_logprobs=3\n")) as engine:
            events = await generate(engine, logprobs=3)
            assert len(events[0].top) == 3
            with pytest.raises(UserError, match="between 0 and 3"):
                await generate(engine, logprobs=4)

    run(main())


@pytest.mark.parametrize(
    ("written", "dtype", "kv_dtype", "weight_bytes"),
    [
        ("option.dtype=auto", "bf16", "bf16", 2),
        ("option.dtype=fp32", "fp32", "fp32", 4),
        ("option.dtype=float32\noption.kv_cache_dtype=bf16", "fp32", "bf16", 4),
        ("option.dtype=bfloat16\noption.kv_cache_dtype=auto", "bf16", "bf16", 2),
        ("option.dtype=bf16\noption.kv_cache_dtype=fp32", "bf16", "fp32", 2),
        ("option.dtype=bf16\noption.kv_cache_dtype=int8", "bf16", "int8", 2),
    ],
)
def test_data_types(configured, written, dtype, kv_dtype, weight_bytes):
    threads = "\noption.num_threads=1\noption.instruction_set=scalar\noption.kv_cache_bytes=1M\n"

    async def main():
        async with running(configured(written + threads)) as engine:
            info = engine.info.runner
            assert (info.dtype, info.kv_dtype) == (dtype, kv_dtype)
            assert (info.num_threads, info.instruction_set) == (1, "scalar")
            # of 16 values; int8 has a scale
            head_bytes = {"bf16": 32, "fp32": 64, "int8": 16 + 4}[kv_dtype]
            # 3 layers, 2 KV heads, K and V, blocks of 32 tokens
            assert info.num_blocks == (1 << 20) // (3 * 2 * head_bytes * 2 * 32)
            assert info.weight_bytes >= 2 * VOCAB_SIZE * 64 * weight_bytes
            assert len(await generate(engine)) == 4

    run(main())


QUANTIZED = [
    ("option.quantize=int8\n", (), "int8"),
    ("option.quantize=int4\n", (), "int4"),
    ("", ("--quantize", "int8"), "int8"),
    ("", ("--quantize=int4",), "int4"),
    ("option.rolling_batch=disable\noption.quantize=int8\n", (), "int8"),
    ("option.rolling_batch=disable\noption.quantize=bitsandbytes8\n", (), "bitsandbytes"),
    ("option.rolling_batch=disable\noption.quantize=bitsandbytes4\n", (), "bitsandbytes-fp4"),
    ("option.rolling_batch=disable\noption.load_in_8bit=true\n", (), "bitsandbytes"),
    ("option.rolling_batch=scheduler\noption.load_in_4bit=true\n", (), "bitsandbytes-fp4"),
    ("engine=DeepSpeed\noption.quantize=dynamic_int8\n", (), "int8"),
    ("engine=DeepSpeed\noption.quantize=smoothquant\n", (), "smoothquant"),
    (
        "engine=MPI\noption.rolling_batch=lmi-dist\noption.quantize=bitsandbytes\n",
        (),
        "bitsandbytes",
    ),
    ("engine=MPI\noption.rolling_batch=lmi-dist\noption.dtype=int8\n", (), "int8"),
    ("option.rolling_batch=vllm\noption.quantize=bitsandbytes\n", (), "bitsandbytes"),
    (f"{TRTLLM}option.quantize=smoothquant\n", (), "smoothquant"),
    (
        "option.entryPoint=djl_python.transformers_neuronx\noption.quantize=static_int8\n",
        (),
        "int8",
    ),
    ("", ("--model-id", "MODEL", "--quantize", "eetq"), "eetq"),
    ("", ("--model-id", "MODEL", "--quantize", "bitsandbytes"), "bitsandbytes"),
    ("", ("--model-id", "MODEL", "--quantize", "bitsandbytes-nf4"), "bitsandbytes-nf4"),
    ("", ("--model-id", "MODEL", "--quantize", "int8"), "int8"),
    ("option.device=cuda\noption.quantize=fp8\n", (), "fp8"),
    ("option.device=cuda\n", ("--quantize", "fp8"), "fp8"),
]


@pytest.mark.parametrize(("properties", "argv", "expected"), QUANTIZED)
def test_every_system_reaches_quantized_weights(configured, properties, argv, expected):
    assert configured(properties, argv).quantize == expected


def test_quantized_weights_are_smaller(configured):
    async def weight_bytes(properties):
        async with running(configured(properties)) as engine:
            assert len(await generate(engine)) == 4
            return engine.info.runner.weight_bytes

    async def main():
        whole = await weight_bytes("option.dtype=bf16\n")
        eight = await weight_bytes("option.quantize=int8\n")
        four = await weight_bytes("option.quantize=int4\n")
        assert whole > eight > four

    run(main())


def test_weights_get_the_librarys_codes(configured):
    async def logprobs(value):
        async with running(configured(f"option.quantize={value}\n" * bool(value))) as engine:
            events = await generate(engine, logprobs=1)
            return engine.info.runner.quantize, [event.logprob for event in events]

    async def main():
        _, exact = await logprobs("")
        seen = {}
        for value, kept, near in (
            ("bitsandbytes-nf4", "nf4", 1.0),
            ("bitsandbytes-fp4", "fp4", 1.0),
            ("bitsandbytes", "llm_int8", 0.1),
            ("eetq", "eetq", 0.1),
        ):
            quantize, seen[value] = await logprobs(value)
            assert quantize == kept
            assert seen[value] == pytest.approx(exact, abs=near)
        assert len({tuple(each) for each in seen.values()}) == 4

    run(main())


def test_what_quantized_weights_are_multiplied_with(configured):
    async def logprobs(activations):
        properties = f"option.quantize=int8\noption.activations={activations}\n"
        async with running(configured(properties)) as engine:
            return [event.logprob for event in await generate(engine, logprobs=1)]

    async def main():
        rounded, exact = await logprobs("int8"), await logprobs("bf16")
        assert rounded != exact
        assert rounded == pytest.approx(exact, abs=0.2)

    run(main())
    with pytest.raises(UserError, match="activations=bf16 needs device=cpu, not torch-cpu"):
        configured("option.device=torch-cpu\noption.activations=bf16\n")


def test_fp8_weights_on_a_torch_device(configured):
    pytest.importorskip("torch")

    async def weight_bytes(properties):
        async with running(configured(f"option.device=torch-cpu\n{properties}")) as engine:
            assert len(await generate(engine)) == 4
            return engine.info.runner.weight_bytes

    async def main():
        assert await weight_bytes("option.quantize=fp8\n") < await weight_bytes("")

    run(main())


def test_devices_give_the_same_greedy_tokens(configured):
    """``cuda`` differs from ``torch-cpu`` in the torch device only."""
    pytest.importorskip("torch")

    async def tokens(device):
        async with running(configured(f"option.device={device}\noption.dtype=fp32\n")) as engine:
            assert engine.info.runner.device == device
            return [event.token_id for event in await generate(engine, num_tokens=8)]

    async def main():
        assert await tokens("cpu") == await tokens("torch-cpu")

    run(main())


def test_the_same_tokens_in_any_company(configured):
    """The option is heard; tests/runners/device/test_torch_invariance.py has the bits."""
    pytest.importorskip("torch")

    async def kernels(written):
        async with running(configured(f"option.device=torch-cpu\n{written}")) as engine:
            return engine.info.runner.kernels

    async def main():
        assert (await kernels("option.deterministic=true\n")).startswith("by row: linear")
        assert "by row" not in await kernels("option.deterministic=false\n")

    run(main())


def test_devices_have_the_same_data_types(configured):
    pytest.importorskip("torch")

    async def sizes(device):
        written = f"option.device={device}\noption.kv_cache_dtype=int8\noption.quantize=int8\n"
        async with running(configured(written + "option.kv_cache_bytes=1M\n")) as engine:
            assert len(await generate(engine)) == 4
            info = engine.info.runner
            return info.kv_dtype, info.quantize, info.num_blocks

    async def main():
        expected = await sizes("cpu")
        assert expected[:2] == ("int8", "int8")
        assert await sizes("torch-cpu") == expected

    run(main())


@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3fn", "fp8_e5m2"])
@pytest.mark.parametrize("device", ["cpu", "torch-cpu"])
def test_fp8_caches(configured, kv_dtype, device):
    """``cuda`` differs from ``torch-cpu`` in the torch device only."""
    pytest.importorskip("torch")
    written = f"option.kv_cache_dtype={kv_dtype}\noption.kv_cache_bytes=1M\n"

    async def main():
        async with running(configured(written + f"option.device={device}\n")) as engine:
            info = engine.info.runner
            assert info.kv_dtype == kv_dtype
            # 3 layers, 2 KV heads of 16 values, K and V, blocks of 32 tokens
            assert info.num_blocks == (1 << 20) // (3 * 2 * 16 * 2 * 32)
            assert len(await generate(engine)) == 4

    run(main())


@pytest.mark.parametrize(
    ("properties", "argv", "expected"),
    [
        ("", ("--model-id", "MODEL", "--rope-scaling", "dynamic", "--rope-factor", "2"), "dynamic"),
        ("", ("--model-id", "MODEL", "--rope-factor", "2"), "linear"),
        (
            f"{TRTLLM}option.rotary_scaling_type=linear\noption.rotary_scaling_factor=2\n",
            (),
            "linear",
        ),
        (f"{TRTLLM}option.rotary_base=500000\n", (), "theta"),
        ("", ("--rope-theta", "500000"), "theta"),
        ("", ("--rope-scaling", '{"rope_type": "linear", "factor": 2}'), "linear"),
        ("", ("--rope-scaling", '{"type": "dynamic", "factor": 2.0}'), "dynamic"),
        ("", ("--rope-scaling", json.dumps(YARN)), "yarn"),
        (f"option.rope_scaling={json.dumps(YARN)}\n", (), "yarn"),
        ("", ("--hf-overrides", json.dumps({"rope_parameters": YARN})), "yarn"),
        ("", ("--hf-overrides", json.dumps({"text_config": {"rope_scaling": YARN}})), "yarn"),
        ("", ("--hf-overrides", '{"rope_scaling": null, "rope_theta": 500000}'), "theta"),
    ],
)
def test_rotary_settings(configured, properties, argv, expected, tmp_path):
    """As if the checkpoint's own configuration said so."""
    parameters = {
        "linear": {"rope_theta": 10000.0, "rope_type": "linear", "factor": 2.0},
        "dynamic": {"rope_theta": 10000.0, "rope_type": "dynamic", "factor": 2.0},
        "theta": {"rope_theta": 500000.0, "rope_type": "default"},
        "yarn": {"rope_theta": 10000.0, **YARN},
    }[expected]
    own = tmp_path / "own"
    shutil.copytree(cached_checkpoint("llama2", dtype="bfloat16"), own)
    values = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps({**values, "rope_parameters": parameters}))
    if expected != "theta":
        properties += "option.max_input_len=1000\noption.max_output_len=24\n" if properties else ""

    async def outputs(config):
        async with running(config) as engine:
            events = await generate(engine, num_tokens=8, logprobs=0)
            length = engine.info.max_total_tokens
            return length, [(event.token_id, event.logprob) for event in events]

    async def main():
        written = await outputs(configured(properties, argv))
        plain = await outputs(configured())
        assert written[1] != plain[1]
        config = replace(configured(properties, argv), rope_scaling=None, rope_factor=None)
        assert written == await outputs(replace(config, rope_theta=None, model=own))
        if "--model-id" in argv:
            assert written[0] == 2 * plain[0]

    run(main())


def test_the_seed_decides_what_is_sampled(configured):
    async def sampled(seed):
        async with running(configured(f"option.seed={seed}\n")) as engine:
            events = await generate(engine, num_tokens=12, temperature=1.0)
            return [event.token_id for event in events]

    async def main():
        first, again, other = [await sampled(seed) for seed in (1, 1, 2)]
        assert first == again != other

    run(main())


@pytest.mark.parametrize(
    ("normalize", "is_unit"), [("", True), ("option.normalize=false\n", False)]
)
def test_embeddings(configured, normalize, is_unit):
    async def main():
        config = configured(f"option.task=feature-extraction\n{normalize}")
        async with running(config) as engine:
            with pytest.raises(UserError, match="doesn't generate"):
                await generate(engine)
            length = sum(float(x) ** 2 for x in await engine.embed(PROMPT))
            assert (abs(length - 1) < 1e-4) is is_unit

    run(main())
