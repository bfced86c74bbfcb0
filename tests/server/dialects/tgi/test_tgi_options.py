"""The launcher's flags as the TGI protocol's options."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmi_core.config.resolve import resolve
from lmi_core.config.targets.launch import prepare
from lmi_server.http.options import ServerOptions
from lmi_server.models.loading import build_options
from tests.checkpoints import cached_checkpoint


@pytest.fixture(scope="module")
def model() -> Path:
    return cached_checkpoint("llama2")


def options(*argv: str, **environ: str) -> ServerOptions:
    (launch,) = prepare(resolve(argv, environ), environ)
    return build_options(launch)


def test_limits(model: Path) -> None:
    flags = "--max-best-of 3 --max-stop-sequences 0 --max-top-n-tokens 1 --max-input-tokens 7"
    chosen = options("--model-id", str(model), *flags.split(), "--max-concurrent-requests", "9")
    assert chosen.api == "tgi"
    tgi = chosen.tgi
    assert (tgi.max_best_of, tgi.max_stop_sequences, tgi.max_top_n_tokens) == (3, 0, 1)
    assert (tgi.max_input_tokens, tgi.max_concurrent_requests) == (7, 9)
    assert tgi.model_id == str(model)


def test_defaults_of_a_launcher(model: Path) -> None:
    tgi = options("--model-id", str(model)).tgi
    assert (tgi.max_best_of, tgi.max_stop_sequences, tgi.max_top_n_tokens) == (2, 4, 5)
    assert (tgi.max_concurrent_requests, tgi.max_input_tokens, tgi.version) == (128, None, 2)


def test_defaults_of_another_system(model: Path) -> None:
    chosen = options(str(model))
    assert chosen.api == "lmi"
    assert chosen.tgi.max_stop_sequences == 4
    assert chosen.tgi.max_concurrent_requests == chosen.max_in_flight


def test_release(model: Path) -> None:
    chosen = options("--model-id", str(model), SERVING_TGI_VERSION="3")
    assert chosen.tgi.version == 3
    assert not chosen.tgi.enable_prefill_logprobs
    chosen = options("--model-id", str(model), "--enable-prefill-logprobs")
    assert chosen.tgi.enable_prefill_logprobs
