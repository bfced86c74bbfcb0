"""``lmi top``: what it makes of two snapshots, and of a running server."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from lmi_core.http_url import HttpUrl
from lmi_core.top import Snapshot, _cut, screen, view
from tests.cli.test_native import lmi, post, serving

URL = HttpUrl.parse("http://127.0.0.1:8080")


def snapshot(
    at_s: float, *, tokens: int, fast: int, slow: int, weight_bytes: int = 10**9
) -> Snapshot:
    return Snapshot.parse(
        at_s,
        f"""\
lmi_build_info{{version="1.2",python="3"}} 1
lmi_http_requests_in_flight 3
lmi_running_sequences{{model_name="m"}} 2
lmi_waiting_requests{{model_name="m"}} 5
lmi_kv_blocks{{model_name="m",state="used"}} 10
lmi_kv_blocks{{model_name="m",state="cached"}} 20
lmi_kv_blocks{{model_name="m",state="free"}} 70
# TYPE lmi_steps counter
lmi_steps_total{{model_name="m"}} {tokens}
# TYPE lmi_read_weight_bytes counter
lmi_read_weight_bytes_total{{model_name="m"}} {tokens * weight_bytes}
# TYPE lmi_native_step_seconds histogram
lmi_native_step_seconds_sum{{model_name="m"}} {tokens * 0.008}
# TYPE lmi_step_seconds histogram
lmi_step_seconds_sum{{model_name="m"}} {tokens * 0.01}
# TYPE lmi_generated_tokens counter
lmi_generated_tokens_total{{model_name="m"}} {tokens}
# TYPE lmi_prompt_tokens counter
lmi_prompt_tokens_total{{model_name="m"}} {10 * tokens}
# TYPE lmi_cached_prompt_tokens counter
lmi_cached_prompt_tokens_total{{model_name="m"}} {5 * tokens}
# TYPE lmi_time_to_first_token_seconds histogram
lmi_time_to_first_token_seconds_bucket{{model_name="m",le="0.1"}} {fast}
lmi_time_to_first_token_seconds_bucket{{model_name="m",le="0.5"}} {fast + slow}
lmi_time_to_first_token_seconds_bucket{{model_name="m",le="+Inf"}} {fast + slow}
lmi_time_to_first_token_seconds_sum{{model_name="m"}} 1
lmi_time_to_first_token_seconds_count{{model_name="m"}} {fast + slow}
""",
    )


BEFORE = snapshot(10.0, tokens=100, fast=50, slow=0)
AFTER = snapshot(12.0, tokens=300, fast=60, slow=30)


def test_rates_and_shares_are_those_of_the_interval() -> None:
    seen = view(BEFORE, AFTER, "m")
    assert (seen.running, seen.waiting) == (2, 5)
    assert seen.rates["generated tokens"] == 100
    assert seen.cached_share == 0.5
    assert seen.kernel_share == pytest.approx(0.8)


def test_of_the_roof_is_what_kernels_read_of_weights() -> None:
    """A GB in 8 ms is 125 GB/s."""
    seen = view(BEFORE, AFTER, "m", roof_gb_per_s=500)
    assert (seen.read_gb_per_s, seen.roof_share) == (pytest.approx(125), pytest.approx(0.25))
    assert "memory   125.0 GB/s of weights by kernels, 25% of" in screen(URL, AFTER, [seen])
    assert view(BEFORE, AFTER, "m").roof_share is None
    small = [snapshot(t, tokens=t, fast=0, slow=0, weight_bytes=10**7) for t in (1, 2)]
    assert view(small[0], small[1], "m", roof_gb_per_s=500).read_gb_per_s is None


def test_latencies_are_of_what_ended_in_the_interval() -> None:
    """10 within 0.1 s and 30 up to 0.5 s: the median is a third into the second bucket."""
    pair = view(BEFORE, AFTER, "m").latency_ms["first token"]
    assert pair is not None
    assert pair[0] == pytest.approx(1e3 * (0.1 + 0.4 * (20 - 10) / 30))
    assert pair[1] == pytest.approx(1e3 * (0.1 + 0.4 * (39.6 - 10) / 30))
    assert view(AFTER, AFTER, "m").latency_ms["first token"] is None


def test_a_counter_that_began_anew_is_no_negative_rate() -> None:
    assert view(AFTER, snapshot(14.0, tokens=1, fast=0, slow=0), "m").rates["requests"] == 0


def test_the_screen() -> None:
    text = screen(URL, AFTER, [view(BEFORE, AFTER, "m")])
    assert text.startswith("http://127.0.0.1:8080  lmi 1.2  3 requests in flight\n\nm\n")
    assert "batch    2 sequences run, 5 requests wait" in text
    assert f"[{'#' * 3}{'+' * 6}{' ' * 21}] 10 used (#), 20 cached (+) of 100" in text
    assert "50% of prompts from the cache" in text
    assert "rates    0.0 requests/s  1,000 prompt tokens/s  100 generated tokens/s\n" in text
    assert "           100 steps/s  0.0 preemptions/s\n" in text
    assert max(map(len, text.splitlines())) < 80


def test_a_server_is_watched_without_the_extension() -> None:
    code = (
        "import sys; sys.modules['lmi_core._native'] = None\n"
        "from lmi_core.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "top", "--once", "--interval", "0.05", "--json"]
    with serving("--served-model-name", "m") as url:
        result = subprocess.run([*command, url], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")
    assert json.loads(result.stdout)[0]["name"] == "m"


def test_what_is_too_wide_for_the_terminal_goes_on_below(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    monkeypatch.setenv("LINES", "24")
    text = screen(URL, AFTER, [view(BEFORE, AFTER, "m")])
    cut = _cut(text)
    assert max(map(len, cut.splitlines())) <= 50
    assert cut.split() == text.split()
    assert "rates    0.0 requests/s  1,000 prompt tokens/s\n           100 generated" in cut


def test_a_server_is_watched() -> None:
    with serving("--served-model-name", "m") as url:
        body = {"inputs": "Once", "parameters": {"max_new_tokens": 3}}
        assert post(f"{url}/invocations", body)[0] == 200
        result = lmi("top", url, "--once", "--interval", "0.1")
        assert (result.returncode, result.stderr) == (0, "")
        assert "\nm\n  batch    0 sequences run" in result.stdout
        result = lmi("top", url, "--once", "--interval", "0.1", "--json")
        assert json.loads(result.stdout)[0]["name"] == "m"


def test_a_server_with_keys_is_watched_by_who_has_one() -> None:
    with serving("--api-key", "secret") as url:
        for command in (("top", url, "--once", "--interval", "0.1"), ("chat", "--url", url)):
            refused = lmi(*command, environ=dict(os.environ))
            assert refused.returncode == 2
            assert "wants an API key: put it into OPENAI_API_KEY" in refused.stderr
            refused = lmi(*command, environ={**os.environ, "OPENAI_API_KEY": "other"})
            assert refused.returncode == 2
            assert "refuses the API key that is in OPENAI_API_KEY" in refused.stderr
        environ = {**os.environ, "OPENAI_API_KEY": "secret"}
        result = lmi("top", url, "--once", "--interval", "0.1", environ=environ)
        assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["http://127.0.0.1:9"], "http://127.0.0.1:9 can't be read: "),
        (["--interval", "0"], "--interval must be 0.05 to 3600, got 0"),
        (["--roof", "nan"], "--roof must be here, or above 0 and at most 100000 GB/s, got nan"),
        (["ftp://x"], "'ftp://x' is no URL such as"),
        (["http://[::1"], "'http://[::1' is no URL such as"),
        ([f"http://{70 * 'a'}.x"], "is no URL such as"),
    ],
)
def test_errors_are_one_line(arguments: list[str], message: str) -> None:
    result = lmi("top", *arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
