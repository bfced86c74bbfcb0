"""One judge: what stops ``serve`` makes ``explain`` refuse, and what that lets pass is served."""

import asyncio
import contextlib
import importlib.util
import io
import json
import os
import shutil
import socket

import pytest

from lmi_core import _native
from lmi_core.config.explain import main
from lmi_core.config.judge import Verdict
from lmi_core.config.resolve import examine, resolve
from lmi_core.config.targets.host import Host
from lmi_core.config.targets.launch import prepare_model
from lmi_core.engine.engine import Engine
from lmi_core.errors import ConfigError, UserError
from lmi_core.weights.safetensors_file import read_header
from lmi_server.models.loading import build_options, server_options
from tests.checkpoints import cached_checkpoint
from tests.lora_adapters import cached_adapter

from .artefacts.fake_hub import FakeHub
from .cases import NO_CACHE

HERE = Host(packages=frozenset({"transformers"}))
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def remove(name):
    return lambda model: (model / name).unlink()


def write(name, text):
    return lambda model: (model / name).write_text(text)


def fifo(name):
    def change(model):
        (model / name).unlink(missing_ok=True)
        os.mkfifo(model / name)

    return change


def configure(**values):
    def change(model):
        path = model / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def truncate(model):
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])


def with_adapter(rank):
    def change(model):
        shutil.copytree(cached_adapter("llama2", rank=rank), model / "adapters" / "a")

    return change


def with_draft_of_other_tokens(model):
    shutil.copytree(cached_checkpoint("llama2", dtype="bfloat16"), model / "draft")
    path = model / "draft" / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    ids = tokenizer["model"]["vocab"]
    first, second = [token for token, token_id in ids.items() if token_id in (40, 41)]
    ids[first], ids[second] = ids[second], ids[first]
    path.write_text(json.dumps(tokenizer))


LLAVA = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava"}
OWN_CODE = {
    "architectures": ["MineForCausalLM"],
    "model_type": "mine",
    "auto_map": {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"},
}
BROKEN = {
    "no weights": (remove("model.safetensors"), (), "holds no *.safetensors"),
    "no config": (remove("config.json"), (), "config.json is missing"),
    "no tokenizer": (remove("tokenizer.json"), (), "has no tokenizer.json"),
    "a broken tokenizer": (write("tokenizer.json", "{}"), (), "is not a tokenizer"),
    "a broken template": (write("tokenizer_config.json", "["), (), "is not valid JSON"),
    "truncated": (truncate, (), "the file is damaged or not safetensors"),
    "other shapes": (configure(hidden_size=128), (), "don't fit config.json"),
    "an unknown activation": (configure(hidden_act="zzz"), (), "hidden_act"),
    "unknown rope": (configure(rope_parameters={"rope_type": "zzz"}), (), "zzz"),
    "a small vocabulary": (configure(eos_token_id=10_000), (), "beyond the vocabulary"),
    "too many positions": (None, ("--max-model-len", "100000"), "positions"),
    "steps of less than the batch": (
        None,
        ("--max-batch-prefill-tokens", "9"),
        "steps of 9 tokens",
    ),
    "an instruction set": (None, ("-o", "instruction_set=avx512_zzz"), "instruction_set"),
    "no such template": (None, ("-o", "chat_template=absent.jinja"), "neither a file nor Jinja"),
    "no such tokenizer config": (None, ("--tokenizer-config-path", "/absent"), "no file /absent"),
    "no such adapter": (None, ("--lora-adapters", "a=/absent"), "in neither a directory"),
    "an adapter of nothing": (None, ("--lora-adapters", "a=HERE"), "is no LoRA adapter"),
    "an adapter's rank": (with_adapter(32), ("-o", "enable_lora=true"), "max_lora_rank"),
    "no such draft model": (
        None,
        ("-o", "speculative_draft_model=/absent"),
        "draft model '/absent' is neither",
    ),
    "a draft model of another vocabulary": (
        with_draft_of_other_tokens,
        ("-o", "speculative_draft_model=HERE/draft"),
        "the draft model: ",
    ),
    "gptq of 5 bits": (
        configure(quantization_config={"quant_method": "gptq", "bits": 5, "group_size": 32}),
        (),
        "bits is 5",
    ),
    "a quantisation that no matrix has": (
        configure(quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 32}),
        (),
        "no matrix is stored so",
    ),
    "an fp8 that no matrix has": (
        configure(quantization_config={"quant_method": "fp8"}),
        (),
        "no matrix is stored so",
    ),
    "a quantisation that was never compared": (
        configure(quantization_config={"quant_method": "fbgemm_fp8"}),
        (),
        "fbgemm_fp8",
    ),
    "a GPU": (None, ("-o", "device=cuda"), "no GPU is visible"),
    "llava": (configure(**LLAVA), (), "no model of type 'llava' that generates text"),
    "its own code": (configure(**OWN_CODE), (), "option.trust_remote_code=true"),
    "no code of its own": (
        configure(architectures=["MineForCausalLM"], model_type="mine"),
        ("--trust-remote-code",),
        "none comes with it",
    ),
} | {
    f"a FIFO for {name}": (
        fifo(name),
        (),
        f"{name} can't be read: it is a FIFO, not a regular file",
    )
    for name in (
        *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
        *("chat_template.jinja", "model.safetensors"),
    )
}


def explain(*argv, environ=NO_CACHE):
    out = io.StringIO()
    code = main(argv, environ=environ, host=HERE, out=out)
    return code, out.getvalue()


def serve(*argv):
    """What ``lmi serve`` does with what ``explain`` would only look at."""
    for config in examine(argv, NO_CACHE, HERE, fetches=True).models:
        server = resolve(("org/any",), NO_CACHE, HERE).server
        launch = prepare_model(config, server, NO_CACHE)
        build_options(launch)

        async def start(launch=launch):
            async with Engine(launch.found or launch.engine):
                pass

        asyncio.run(start())


@pytest.mark.parametrize("case", BROKEN)
def test_what_serve_refuses_explain_refuses(case, model, monkeypatch):
    change, argv, message = BROKEN[case]
    if change is not None:
        change(model)
    argv = [str(model), *(argument.replace("HERE", str(model)) for argument in argv)]
    code, text = explain(*argv)
    assert code == 2, text
    assert message in text
    monkeypatch.setattr("lmi_core.config.targets.launch.judge", lambda *arguments: Verdict(()))
    if not examine(argv, NO_CACHE, HERE).errors:
        with pytest.raises(UserError):
            serve(*argv)


@pytest.mark.parametrize("kind", ["a FIFO", "a socket", "a device", "a directory"])
@pytest.mark.parametrize("name", ["model.gguf", "model-00002-of-00002.safetensors"])
def test_weights_that_are_no_regular_file(model, monkeypatch, kind, name):
    path = model / name
    stored = (model / "model.safetensors").rename(model / "model-00001-of-00002.safetensors")
    names = read_header(stored)
    weight_map = dict.fromkeys(names, stored.name) | {next(iter(names)): path.name}
    index = {"weight_map": weight_map}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    if name.endswith(".gguf"):
        shutil.rmtree(model)
        model.mkdir()
    with contextlib.ExitStack() as stack:
        if kind == "a FIFO":
            os.mkfifo(path)
        elif kind == "a socket":
            monkeypatch.chdir(model)  # a socket's path may be short only
            stack.enter_context(socket.socket(socket.AF_UNIX)).bind(name)
        elif kind == "a device":
            path.symlink_to("/dev/zero")
        else:
            path.mkdir()
        is_named = name.endswith(".gguf") and kind != "a directory"
        for place in (model, path) if is_named else (model,):
            code, text = explain(str(place))
            refused = text.partition("\nrefused\n")[2]
            assert (code, refused.count(f"{name} can't be read: it is {kind}")) == (2, 1), text


@pytest.mark.parametrize(
    "argv",
    [
        (),
        ("-o", "enable_lora=true"),
        ("-o", "max_rolling_batch_size=3000"),
        ("--quantize", "int4", "--max-model-len", "128"),
        ("-o", "device=torch-cpu"),
        ("-o", "chat_template={{ messages }}"),
        ("-o", "speculative_draft_model=HERE"),
    ],
)
def test_what_explain_lets_pass_is_served(model, argv):
    with_adapter(8)(model)
    argv = [argument.replace("HERE", str(model)) for argument in argv]
    code, text = explain(str(model), *argv)
    assert code == 0, text
    serve(str(model), *argv)


def test_copies_need_the_memory_of_all_of_them(model):
    half = _native.cpu_info()["memory_limit_bytes"] // 2
    argv = [str(model), "-o", f"kv_cache_bytes={half}", "-o"]
    assert explain(*argv, "num_copies=1")[0] == 0
    code, text = explain(*argv, "num_copies=3")
    assert code == 2, text
    assert f"3 copies of the model in {model} need" in text


LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
}
MINISTRAL = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
MINISTRAL |= {"llama_4_scaling_beta": 0.1, "rope_theta": 10000.0}


@pytest.mark.parametrize(
    ("change", "argv", "note"),
    [
        (configure(rope_parameters=LONGROPE), (), "all requests get the factors of long contexts"),
        (configure(rope_parameters=LONGROPE), ("--max-model-len", "64"), None),
        (
            configure(
                architectures=["MistralForCausalLM"],
                model_type="ministral3",
                rope_parameters=MINISTRAL,
            ),
            (),
            "contexts end at 64 tokens",
        ),
    ],
)
def test_what_is_served_otherwise_is_said_and_logged(model, caplog, change, argv, note):
    change(model)
    code, text = explain(str(model), *argv)
    assert code == 0, text
    serve(str(model), *argv)
    for said in (text, caplog.text):
        assert ("factors of long" in said or "contexts end" in said) == (note is not None)
        assert note is None or note in said


@pytest.mark.parametrize(
    ("change", "argv", "said"),
    [
        (None, ("-o", "num_threads=2000"), "  -o option.num_threads: num_threads is 2000; allowed"),
        (write("chat_template.jinja", "{% if %}"), (), "chats are refused, everything else works"),
    ],
)
def test_faults_have_their_place_and_what_is_served_without_is_said(model, change, argv, said):
    if change is not None:
        change(model)
    assert said in explain(str(model), *argv)[1]


@pytest.mark.parametrize(
    ("argv", "package", "message"),
    [
        (("org/m",), "huggingface_hub", "needs the 'hub' extra"),
        (("s3://b/m",), "boto3", "needs the 'hub' extra"),
        (
            ("--model-id", "MODEL", "--lora-adapters", "org/a"),
            "huggingface_hub",
            "downloading org/a",
        ),
    ],
)
def test_what_is_elsewhere_needs_a_client(model, monkeypatch, argv, package, message):
    find_spec = importlib.util.find_spec
    argv = [str(model) if argument == "MODEL" else argument for argument in argv]
    assert explain(*argv, environ={**NO_CACHE, "PATH": ""})[0] == 0
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == package else find_spec(name)
    )
    code, text = explain(*argv, environ={**NO_CACHE, "PATH": ""})
    assert (code, message in text) == (2, True)
    offline = explain(*argv, environ={**NO_CACHE, "HF_HUB_OFFLINE": "1", "DJL_OFFLINE": "true"})
    assert (offline[0], "offline mode forbids" in offline[1]) == (2, True)


def test_all_faults_come_at_once_before_anything_is_fetched(model):
    remove("tokenizer.json")(model)
    argv = (str(model), "--option", "chat_template=absent.jinja")
    (config,) = resolve(argv, NO_CACHE, HERE).models
    with pytest.raises(ConfigError) as raised:
        prepare_model(config, resolve(("org/any",), NO_CACHE, HERE).server, NO_CACHE)
    assert len(raised.value.problems) == 2


@pytest.mark.parametrize("serves", [True, False])
def test_a_hub_model_of_another_family_is_dispatched_at_its_first_start(model, tmp_path, serves):
    configure(architectures=["XLNetLMHeadModel"], model_type="gpt2")(model)
    environ = {"HF_HUB_CACHE": str(tmp_path / "hub")}
    host = HERE if serves else Host()
    with FakeHub(model, COMMIT).running() as url:
        deployment = resolve(("org/m",), {**environ, "HF_ENDPOINT": url}, host)
        (config,) = deployment.models
        assert config.backend == "lmi"
        arguments = (config, deployment.server, {**environ, "HF_ENDPOINT": url})
        if serves:
            launch = prepare_model(*arguments)
            assert launch.model.backend == "transformers"
            assert type(launch.engine).__name__ == "TransformersConfig"
            return
        with pytest.raises(ConfigError, match="Transformers is not installed"):
            prepare_model(*arguments)
    assert [path.name for path in tmp_path.glob("hub/**/snapshots/*/*")] == ["config.json"]


def test_a_certificate_that_cannot_be_used(model, tmp_path):
    (tmp_path / "cert.pem").write_text("no certificate")
    options = [
        f"certificate_file={tmp_path / 'cert.pem'}",
        "inference_address=https://0.0.0.0:8443",
    ]
    options += [f"private_key_file={tmp_path / 'cert.pem'}"]
    argv = [str(model), *(part for option in options for part in ("-o", option))]
    server = examine(argv, NO_CACHE, HERE).server
    with pytest.raises(ConfigError, match="can't be used"):
        server_options(server)
    code, text = explain(*argv)
    assert (code, "cert.pem can't be used" in text) == (2, True)


def test_what_cannot_be_read_is_named(model, monkeypatch):
    def refuse(*arguments):
        raise PermissionError(13, "Permission denied", "model.safetensors")

    monkeypatch.setattr("lmi_core.runners.cpu.cpu_model.find_cpu_model", refuse)
    code, text = explain(str(model))
    assert code == 2
    assert "model.safetensors: can't be read: Permission denied" in text


@pytest.mark.parametrize(
    ("line", "files", "code"),
    [
        ("import no_such_package.inner", {}, 2),
        ("from no_such_package import x", {"requirements.txt": "no-such-package"}, 0),
        ("import no_such_package", {"no_such_package.py": ""}, 0),
        ("import json, numpy", {}, 0),
        ("try:\n    import no_such_package\nexcept ImportError:\n    pass", {}, 0),
    ],
)
def test_what_a_handler_imports_is_installed(tmp_path, line, files, code):
    (tmp_path / "model.py").write_text(f"{line}\ndef handle(inputs): ...")
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    got, text = explain(str(tmp_path))
    assert got == code, text
    assert ("imports no_such_package, which isn't installed" in text) == (code == 2)
