"""Adapters in a server process with a tiny model: real clients, and management while it serves."""

from __future__ import annotations

import json
import shutil
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from huggingface_hub import InferenceClient

from tests.checkpoints import cached_checkpoint
from tests.cli.test_native import post, serving
from tests.lora_adapters import cached_adapter

pytestmark = pytest.mark.timeout(180)

PROMPT = "hello there"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with the adapter ``fr`` beside it, and ``later`` in its directory."""
    directory = tmp_path_factory.mktemp("store") / "tiny"
    shutil.copytree(cached_checkpoint("llama2"), directory)
    shutil.copytree(cached_adapter("llama2", 1), directory / "adapters" / "fr")
    shutil.copytree(cached_adapter("llama2", 2), directory / "later")
    (directory / "serving.properties").write_text("option.enable_lora=true\n")
    return directory


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    with serving(str(model)) as url:
        yield url


def manage(method: str, url: str) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method=method)) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def invoke(url: str, adapter: str) -> str:
    parameters = {"max_new_tokens": 8}
    body = {"inputs": PROMPT, "adapters": adapter, "parameters": parameters}
    status, answer = post(f"{url}/invocations", body)
    assert status == 200, answer
    text: str = json.loads(answer)["generated_text"]
    return text


def test_the_openai_client_names_adapters_as_models(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client:
        base, adapter = client.models.list().data
        assert (base.id, adapter.id) == ("tiny", "fr")
        assert adapter.model_extra is not None
        assert adapter.model_extra["parent"] == "tiny"
        texts = []
        for name in ("tiny", "fr"):
            completion = client.completions.create(model=name, prompt=PROMPT, temperature=0)
            assert completion.model == name
            texts.append(completion.choices[0].text)
            chunks = client.completions.create(
                model=name, prompt=PROMPT, temperature=0, stream=True
            )
            assert "".join(chunk.choices[0].text for chunk in chunks) == texts[-1]
        assert texts[0] != texts[1]
        with pytest.raises(openai.NotFoundError, match="'tiny', 'fr' are served here"):
            client.completions.create(model="de", prompt=PROMPT)


def test_the_hubs_client_names_adapters(url: str) -> None:
    client = InferenceClient(model=url, timeout=30)
    texts = [
        client.text_generation(PROMPT, max_new_tokens=8, adapter_id=adapter)
        for adapter in (None, "fr", "unknown")
    ]
    assert texts[0] == texts[2] != texts[1]


def test_adapters_come_and_go(url: str, model: Path) -> None:
    """As the acceptance test of LMI's adapters: each answers, and one that is gone doesn't."""
    source = urllib.parse.quote(str(model / "later"))
    before = {name: invoke(url, name) for name in ("", "fr")}
    status, answer = manage("POST", f"{url}/models/tiny/adapters?name=de&src={source}")
    assert (status, answer) == (200, {"status": "Adapter de registered"})
    texts = {name: invoke(url, name) for name in ("", "fr", "de")}
    assert len(set(texts.values())) == 3
    assert {name: texts[name] for name in before} == before
    assert texts["de"] == invoke(url, "de")
    status, answer = manage("GET", f"{url}/adapters")
    assert [adapter["name"] for adapter in answer["adapters"]] == ["fr", "de"]

    status, answer = manage("DELETE", f"{url}/models/tiny/adapters/de")
    assert (status, answer) == (200, {"status": "Adapter de unregistered"})
    body = {"inputs": PROMPT, "adapters": "de"}
    assert post(f"{url}/invocations", body)[0] == 424
    assert {name: invoke(url, name) for name in before} == before


def test_adapters_outside_the_model_and_broken_ones_are_refused(
    url: str, model: Path, tmp_path: Path
) -> None:
    outside = urllib.parse.quote(str(cached_adapter("llama2", 2)))
    status, answer = manage("POST", f"{url}/adapters?name=x&src={outside}")
    assert (status, answer["type"]) == (403, "ForbiddenException")
    status, answer = manage("POST", f"{url}/adapters?name=x&src={model}")
    assert (status, answer["type"]) == (424, "ModelException")
    assert "adapter_config.json" in answer["message"]


def test_prompts_of_one_request_have_their_own_adapters(url: str) -> None:
    parameters = {"max_new_tokens": 8}
    names = ["fr", "", "fr", ""]
    body = {"inputs": [PROMPT] * 4, "adapters": names, "parameters": parameters}
    status, answer = post(f"{url}/invocations", body)
    assert status == 200
    texts = [each["generated_text"] for each in json.loads(answer)]
    assert texts == [invoke(url, name) for name in names]
