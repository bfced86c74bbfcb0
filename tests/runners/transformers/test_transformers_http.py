"""A server process with a model of another family, by every protocol."""

import json
import shutil

import pytest

from lmi_core.config.explain import main as explain
from tests.backends.models import checkpoint, oracle
from tests.cli.test_native import post, serving

pytest.importorskip("transformers")
pytestmark = pytest.mark.timeout(180)


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox"])
def test_every_protocol_gives_the_same_text(family, tmp_path):
    directory = tmp_path / family
    shutil.copytree(checkpoint(family), directory)
    (directory / "serving.properties").write_text(
        "engine=Python\noption.rolling_batch=scheduler\noption.num_threads=1\n"
    )
    with serving(str(directory)) as url:
        parameters = {"max_new_tokens": 8, "ignore_eos_token": True}
        status, answer = post(f"{url}/invocations", {"inputs": "A fox", "parameters": parameters})
        assert status == 200, answer
        text = json.loads(answer)["generated_text"]
        assert text

        body = {"inputs": "A fox", "parameters": {**parameters, "details": True}}
        status, answer = post(f"{url}/invocations", {**body, "stream": True})
        lines = [json.loads(line) for line in answer.splitlines()]
        assert status == 200, answer
        assert len(lines) == 8
        assert lines[-1]["generated_text"] == text
        assert all(line["token"]["log_prob"] < 0 for line in lines)

        asked = {"inputs": "A fox", "parameters": {"max_new_tokens": 8, "details": True}}
        status, answer = post(f"{url}/generate", asked)
        assert status == 200, answer
        generated = json.loads(answer)
        assert text.startswith(generated["generated_text"])
        assert generated["details"]["tokens"]

        asked = {"prompt": "A fox", "max_tokens": 8, "temperature": 0, "model": family}
        status, answer = post(f"{url}/v1/completions", asked)
        assert status == 200, answer
        assert text.startswith(json.loads(answer)["choices"][0]["text"])

        sampled = {**asked, "temperature": 1.0, "seed": 3, "n": 2, "logprobs": 2}
        answers = [json.loads(post(f"{url}/v1/completions", sampled)[1]) for _ in "ab"]
        first, again = ([choice["text"] for choice in a["choices"]] for a in answers)
        assert first == again
        assert len(first) == 2

        chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "model": family}
        status, answer = post(f"{url}/v1/chat/completions", {**chat, "stream": True})
        assert status == 200, answer
        assert answer.rstrip().endswith("data: [DONE]")

        status, answer = post(f"{url}/invocations", {"inputs": "A fox " * 500})
        assert status == 424
        assert "at most 255 fit" in answer
        status, answer = post(f"{url}/v1/completions", {**asked, "max_tokens": 0})
        assert status == 400


def test_an_encoder_decoder_answers_every_protocol(tmp_path, capsys):
    """As the configuration of google/flan-t5-xl in LMI's examples has it."""
    import torch
    from transformers import AutoTokenizer

    directory = tmp_path / "t5"
    shutil.copytree(checkpoint("t5"), directory)
    (directory / "serving.properties").write_text(
        "engine=FasterTransformer\noption.num_threads=1\n"
    )
    prompt = "Config, weights and tokenizer"
    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = oracle("t5").generate(torch.tensor([tokenizer(prompt).input_ids]), max_new_tokens=8)[0]
    expected = tokenizer.decode(ids, skip_special_tokens=True)
    assert expected
    assert explain([str(directory)]) == 0
    assert "no description of T5ForConditionalGeneration" in capsys.readouterr().out
    with serving(str(directory)) as url:
        asked = {"inputs": prompt, "parameters": {"max_new_tokens": 8}}
        status, answer = post(f"{url}/invocations", asked)
        assert (status, json.loads(answer)["generated_text"]) == (200, expected)
        status, answer = post(f"{url}/invocations", {**asked, "stream": True})
        last = json.loads(answer.splitlines()[-1])
        assert (status, last["generated_text"]) == (200, expected)
        status, answer = post(f"{url}/generate", asked)
        assert (status, json.loads(answer)["generated_text"]) == (200, expected)
        asked = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "model": "t5"}
        status, answer = post(f"{url}/v1/completions", asked)
        assert (status, json.loads(answer)["choices"][0]["text"]) == (200, expected)
