"""What a server is started with."""

import pytest

from lmi_core.config.resolve import resolve
from lmi_core.config.targets.launch import prepare
from lmi_core.engine.engine import Engine
from lmi_core.errors import ConfigError
from lmi_core.weights import checkpoint
from tests.checkpoints import cached_checkpoint

from .cases import CPU, NO_CACHE

READ = checkpoint.read_header
LLAMA = {"architectures": ["LlamaForCausalLM"]}


@pytest.fixture
def whole(model_dir, tmp_path):
    """Return a function that writes a model directory with weights."""

    def write(properties, **kwargs):
        name = model_dir(properties, **kwargs)
        for path in cached_checkpoint("llama2").iterdir():
            (tmp_path / name / path.name).symlink_to(path)
        return name

    return write


def launch(*argv, **kwargs):
    (only,) = prepare(resolve(argv, NO_CACHE, CPU, **kwargs), NO_CACHE)
    return only


def test_a_directory_is_ready_to_start(whole):
    name = whole("option.max_rolling_batch_size=4")
    started = launch(name, "--port", "9000", "--host", "127.0.0.1", "--no-prefix-caching")
    assert str(started.engine.model) == name
    assert started.engine.max_num_seqs == 4
    assert not started.engine.enable_prefix_caching
    assert (started.server.host, started.server.port) == ("127.0.0.1", 9000)


def test_the_default_model_serves_where_none_is_named(whole, tmp_path):
    name = whole("")
    started = launch("--max-num-seqs", "2", default_model=tmp_path / name)
    assert started.engine.model == tmp_path / name
    assert started.engine.max_num_seqs == 2
    assert started.server.port == 8080


def test_faults_come_before_anything_is_fetched(model_dir):
    with pytest.raises(ConfigError, match="fp17"):
        launch(model_dir("option.dtype=fp17\noption.model_id=s3://b/m"))


def test_broken_files_are_named(model_dir):
    with pytest.raises(ConfigError, match=r"holds no \*\.safetensors"):
        launch(model_dir("", config=LLAMA))


def test_a_server_may_start_without_models():
    assert prepare(resolve([], {**NO_CACHE, "SERVING_LOAD_MODELS": "NONE"}, CPU), NO_CACHE) == ()


def test_models_that_start_together_share_memory(whole):
    first, second = whole("", name="a"), whole("option.max_model_len=9", name="b")
    launches = prepare(resolve([first, second], NO_CACHE, CPU), NO_CACHE)
    assert [launch.engine.served_model_name for launch in launches] == ["a", "b"]
    assert [launch.engine.num_models for launch in launches] == [2, 2]
    assert [launch.engine.max_model_len for launch in launches] == [None, 9]


def test_what_was_read_to_judge_a_model_is_not_read_again(whole, monkeypatch):
    read = []
    monkeypatch.setattr(checkpoint, "read_header", lambda path: read.append(path) or READ(path))
    started = launch(whole("option.max_rolling_batch_size=4"))
    assert started.found.asked == started.engine
    assert [path.name for path in read] == ["model.safetensors"]

    def refuse(*arguments, **settings):
        raise AssertionError("read again")

    monkeypatch.setattr("lmi_core.models.found_model.Checkpoint", refuse)
    monkeypatch.setattr("lmi_core.engine.parts.Tokenizer", refuse)
    with Engine(started.found, own_loop=True) as engine:
        assert engine.config == started.engine
        assert [event.token_id for event in engine.generate_sync("one", max_new_tokens=1)]
