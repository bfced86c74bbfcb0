"""What a model's generation_config.json says of sampling, where requests don't."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lmi_core.config.model_config import ModelConfig
from lmi_core.config.resolve import resolve
from lmi_core.config.targets.host import Host
from lmi_core.config.targets.sampling_defaults import sampling_defaults, sampling_note
from lmi_core.errors import ModelError, UserError
from lmi_server.dialects.base import Call
from lmi_server.dialects.openai.openai import parse_completion
from tests.server.parsing import model_of

FILE = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "max_new_tokens": 77}


def configured(directory: Path, written: str, values: dict[str, Any] = FILE) -> ModelConfig:
    (directory / "serving.properties").write_text(written)
    (directory / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (directory / "generation_config.json").write_text(json.dumps(values))
    arguments = [str(directory), "--prefer-native"]
    return resolve(arguments, {}, Host(num_gpus=0)).models[0]


def params_of(model: ModelConfig, directory: Path, **body: Any) -> Any:
    content = json.dumps({"prompt": "a"} | body).encode()
    call = Call(request_id="r", body=content, content_type="application/json")
    served = model_of(sampling_defaults=sampling_defaults(model, directory))
    return parse_completion(served, call).requests[0].params


def test_requests_that_leave_sampling_open(tmp_path: Path) -> None:
    model = configured(tmp_path, "option.generation_config=auto\n")
    params = params_of(model, tmp_path)
    assert (params.temperature, params.top_p, params.top_k) == (0.6, 0.9, 20)
    assert params.max_new_tokens == 77
    own = params_of(model, tmp_path, temperature=0.1, top_k=3, max_tokens=5)
    assert (own.temperature, own.top_p, own.top_k, own.max_new_tokens) == (0.1, 0.9, 3, 5)
    searched = params_of(model, tmp_path, num_beams=2, top_p=1.0, top_k=0)
    assert searched.temperature == 0.0


@pytest.mark.parametrize(
    ("written", "temperature"),
    [("", 1.0), ("option.rolling_batch=vllm\n", 0.6), ("option.generation_config=vllm\n", 1.0)],
)
def test_whose_habits_they_are(written: str, temperature: float, tmp_path: Path) -> None:
    model = configured(tmp_path, written)
    assert params_of(model, tmp_path).temperature == temperature
    assert bool(sampling_note(model, tmp_path)) == (temperature != 1.0)


def test_another_directory(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "generation_config.json").write_text('{"temperature": 0.2}')
    model = configured(tmp_path, f"option.generation_config={other}\n")
    assert sampling_defaults(model, tmp_path) == {"temperature": 0.2}
    model = configured(tmp_path, "option.generation_config=/nowhere\n")
    with pytest.raises(UserError, match=r"/nowhere/generation_config\.json isn't there"):
        sampling_defaults(model, tmp_path)


def test_values_that_no_request_may_have(tmp_path: Path) -> None:
    model = configured(tmp_path, "option.generation_config=auto\n", {"top_p": 1.5})
    with pytest.raises(ModelError, match=r"top_p is 1\.5, but must be a number from .* to 1;"):
        sampling_defaults(model, tmp_path)


def overriding(text: str, generation_config: str = "auto") -> str:
    return (
        f"option.generation_config={generation_config}\noption.override_generation_config={text}\n"
    )


def test_an_object_comes_before_the_file(tmp_path: Path) -> None:
    written = overriding('{"temperature": 0.5, "max_new_tokens": 9}')
    params = params_of(configured(tmp_path, written), tmp_path)
    assert (params.temperature, params.top_p, params.max_new_tokens) == (0.5, 0.9, 9)
    assert params_of(configured(tmp_path, written), tmp_path, temperature=0.1).temperature == 0.1
    alone = configured(tmp_path, overriding('{"top_k": 3}', "vllm"))
    assert sampling_defaults(alone, tmp_path) == {"top_k": 3}
    assert sampling_note(alone, tmp_path) == ()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"temperature": "hot"}', r"_generation_config: temperature is 'hot', but must be a num"),
        ('{"temprature": 0.5}', r"has 'temprature'; allowed are temperature, top_p"),
    ],
)
def test_objects_that_no_request_may_have(text: str, said: str, tmp_path: Path) -> None:
    model = configured(tmp_path, overriding(text))
    with pytest.raises(UserError, match=said) as caught:
        sampling_defaults(model, tmp_path)
    assert caught.value.field == "option.override_generation_config"
