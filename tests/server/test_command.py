"""From a configuration to the server's options."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from lmi_core.config.resolve import resolve
from lmi_core.config.targets.launch import prepare
from lmi_core.errors import ConfigError, UserError
from lmi_server.dialects.lmi.release import Release
from lmi_server.http.options import ServerOptions
from lmi_server.models.loading import build_options
from tests.checkpoints import cached_checkpoint, make_checkpoint
from tests.server.harness import serving


@pytest.fixture(scope="module")
def model() -> str:
    path: Path = cached_checkpoint("llama2")
    return str(path)


def options(*argv: str, **environ: str) -> ServerOptions:
    (launch,) = prepare(resolve(argv, environ), environ)
    return build_options(launch)


def test_api(model: str) -> None:
    assert options(model).api == "lmi"
    assert options(model, "--api", "openai").api == "openai"
    assert options(model, SERVING_API="tgi").api == "tgi"
    assert options("--model-id", model, "--api", "lmi").api == "lmi"
    with pytest.raises(ConfigError) as raised:
        options(model, "--api", "ibm")
    assert "lmi" in str(raised.value.problems)


def test_api_key_and_origins(model: str) -> None:
    chosen = options(model)
    assert (chosen.api_keys, chosen.cors_origins) == ((), ())
    chosen = options(
        model,
        "--cors-allow-origin",
        "https://a.example, https://b.example",
        OPTION_API_KEY="a-secret",
    )
    assert chosen.api_keys == ("a-secret",)
    assert "a-secret" not in repr(chosen)
    assert chosen.cors_origins == ("https://a.example", "https://b.example")
    assert options(model, SERVING_CORS_ALLOWED_ORIGIN="*").cors_origins == ("*",)


def test_lmi_release(model: str) -> None:
    assert options(model).lmi.release is None
    assert options(model, OPTION_LMI_COMPAT="0.27").lmi.release == Release.V0_27
    with pytest.raises(UserError, match="tgi_compat came with"):
        options(model, OPTION_LMI_COMPAT="0.27", OPTION_TGI_COMPAT="true")


def test_a_broken_chat_template_is_said_at_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_checkpoint(tmp_path / "model", "llama2", dtype="float32")
    (model / "chat_template.jinja").write_text("{% for %}")
    template = options(str(model)).chat_template
    assert "The chat template is broken: line 1" in caplog.text
    assert f"({model / 'chat_template.jinja'}); chats are refused, everything else" in caplog.text

    async def ask(path: str, body: dict[str, object]) -> tuple[int, bytes]:
        async with serving(chat_template=template) as served:
            assert (await served.post({"inputs": "x"})).status == 200
            answer = await served.post(body, path)
            return answer.status, answer.body

    chat = {"messages": [{"role": "user", "content": "x"}]}
    for path, expected in (
        ("/v1/chat/completions", 400),
        ("/invocations", 424),
        ("/tgi/v1/chat/completions", 422),
    ):
        status, text = asyncio.run(ask(path, chat))
        assert status == expected
        assert b"The chat template is broken: line 1" in text
