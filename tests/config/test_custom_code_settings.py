"""What a configuration says about a model's own code, as its processes get it."""

import pytest

from lmi_core.config.targets.host import Host
from lmi_core.errors import ConfigError
from lmi_core.settings.custom_code_config import CustomCodeConfig

HANDLE = "def handle(inputs): ..."


@pytest.fixture
def config(model_dir, resolved):
    def make(
        properties="", *argv, host=None, name="model", text=HANDLE, **environ
    ) -> CustomCodeConfig:
        options = {} if host is None else {"host": host}
        directory = model_dir(properties, name=name, model__py=text)
        (model,) = resolved(directory, *argv, environ=environ, **options).models
        assert model.backend == "handler"
        return model.custom_code_config()

    return make


def test_defaults_are_the_documented_ones(config, tmp_path):
    made = config()
    assert made == CustomCodeConfig(
        path=made.path,
        model_dir=made.model_dir,
        function="handle",
        call_properties={"model_dir": str(tmp_path / "model"), "device_id": "-1"},
    )


def test_a_name_that_is_given_is_the_models(config):
    assert config("option.modelName=mine\n").model_name == "mine"


def test_keys_become_fields(config):
    made = config(
        "batch_size=4\nmax_batch_delay=20\nmax_idle_time=5\njob_queue_size=7\nretry_threshold=2\n"
        "option.predict_timeout=3\noption.model_loading_timeout=4\noption.max_output_size=1000\n"
        "option.parallel_loading=true\noption.pythonExecutable=/usr/bin/python3.12\n"
        "option.env=A=1,B=x=y\noption.handler=serve\n",
        text="def serve(inputs): ...",
    )
    assert (made.batch_size, made.max_batch_delay_ms, made.max_idle_time_s) == (4, 20, 5)
    assert (made.max_queue_size, made.retry_threshold) == (7, 2)
    assert (made.predict_timeout_s, made.loading_timeout_s) == (3, 4)
    assert (made.max_output_bytes, made.parallel_loading) == (1000, True)
    assert (made.python, made.env) == ("/usr/bin/python3.12", {"A": "1", "B": "x=y"})
    assert made.function == "serve"


@pytest.mark.parametrize(
    ("properties", "host", "expected"),
    [
        ("minWorkers=2", None, (2, 2)),
        ("maxWorkers=3", None, (1, 3)),
        ("minWorkers=0\nmaxWorkers=0", None, (1, 1)),
        ("minWorkers=2\ncpu.minWorkers=3\ngpu.minWorkers=4", None, (3, 3)),
        ("minWorkers=2\ncpu.minWorkers=3\ngpu.minWorkers=4", Host(num_gpus=1), (4, 4)),
        ("gpu.maxWorkers=4", None, (1, 1)),
        ("cpu.maxWorkers=4\ngpu.maxWorkers=5", None, (1, 4)),
    ],
)
def test_workers(config, properties, host, expected):
    made = config(properties, host=host)
    assert (made.min_workers, made.max_workers) == expected


def test_every_option_is_a_property(config, tmp_path):
    made = config(
        "option.model_id=some/model\noption.dtype=fp16\noption.my_own=x\nother=y\n"
        "option.tensor_parallel_degree=max\n"
    )
    assert made.properties == {
        "model_id": "some/model",
        "dtype": "fp16",
        "my_own": "x",
        "tensor_parallel_degree": "max",
    }
    assert made.call_properties["tensor_parallel_degree"] == "1"


def test_a_broken_variable_is_an_error(config):
    with pytest.raises(ConfigError) as raised:
        config("option.env=A=1,oops")
    assert "option.env: 'oops' is not NAME=value" in str(raised.value.problems)


def test_code_of_a_download_is_never_taken(model_dir, resolved, tmp_path):
    model_dir(None, name="downloaded", model__py=HANDLE, config={"architectures": ["X"]})
    directory = model_dir("option.model_id=downloaded\noption.task=text-generation", name="own")
    with pytest.raises(ConfigError) as raised:
        resolved(directory)
    assert "no description of X" in str(raised.value.problems)


def test_explanation_says_what_the_handler_gets(model_dir, explained):
    name = model_dir("option.dtype=fp16\noption.foo=1\nbatch_size=2\n", model__py=HANDLE)
    report = explained(name)
    assert not report.errors
    rows = {row.key: (str(row.outcome), row.text) for row in report.rows[0]}
    assert rows["option.dtype"] == ("mapped", "given to the handler as dtype")
    assert rows["option.foo"] == ("mapped", "given to the handler as foo")
    assert rows["batch_size"] == ("honoured", "batch_size=2")
    assert "option.rolling_batch" not in rows
    assert rows["job_queue_size"] == ("honoured", "max_queue_size=1000")
