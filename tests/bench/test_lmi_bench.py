"""``lmi bench`` and its parts."""

from __future__ import annotations

import asyncio
import json
import statistics
from itertools import pairwise
from pathlib import Path

import pytest

from lmi_core.bench.figures import Figure, Run, figures_of, percentile, table
from lmi_core.bench.offline import OfflineBench, StepLog
from lmi_core.bench.page import html
from lmi_core.bench.rooflines import ModelShape
from lmi_core.bench.stream import APIS, Answer, RefusedError, _TokenReader, ask
from lmi_core.bench.workload import WORKLOADS, Sizes, arrivals, make_sessions
from lmi_core.cli import DEMO_MODEL, main
from lmi_core.engine.engine import Engine
from lmi_core.errors import UserError
from lmi_core.http_url import HttpUrl
from tests.cli.test_native import lmi, serving

SIZES = Sizes(num_requests=12, num_prompt=10, num_new=5, num_shared=40, num_turns=3)


@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_are_the_same_for_the_same_seed(name: str) -> None:
    sessions = make_sessions(name, SIZES, 1)
    assert sessions == make_sessions(name, SIZES, 1) != make_sessions(name, SIZES, 2)
    assert sum(map(len, sessions)) == 12


def test_a_conversations_prompt_begins_with_the_one_before() -> None:
    for session in make_sessions("agents", SIZES, 0):
        for before, after in pairwise(session):
            assert after.words[: len(before.words)] == before.words
            assert len(after.words) == len(before.words) + 5 + 10


def test_prefixes_are_shared_by_groups() -> None:
    prefixes = {session[0].words[:40] for session in make_sessions("prefix", SIZES, 0)}
    assert 1 < len(prefixes) <= SIZES.num_groups


def test_lengths_of_a_mix_have_a_long_tail() -> None:
    sizes = Sizes(num_requests=2000, num_prompt=100, num_new=50)
    lengths = [len(session[0].words) for session in make_sessions("mix", sizes, 0)]
    assert statistics.median(lengths) == pytest.approx(100, rel=0.1)
    assert max(lengths) > 10 * statistics.median(lengths)


@pytest.mark.parametrize("burstiness", [1.0, 4.0])
def test_arrivals_have_the_rate_and_its_bursts(burstiness: float) -> None:
    times = arrivals(20_000, 10.0, burstiness, 0)
    gaps = [after - before for before, after in pairwise(times)]
    assert statistics.fmean(gaps) == pytest.approx(0.1, rel=0.05)
    variation = statistics.pvariance(gaps) / statistics.fmean(gaps) ** 2
    assert variation == pytest.approx(burstiness, rel=0.1)


def answer(*at: float, prompt: int | None = 7) -> Answer:
    gaps = [after - before for before, after in pairwise(at[1:])]
    return Answer(at[0], at[1], at[-1], len(at) - 1, prompt, gaps)


def test_figures_of_a_run() -> None:
    run = Run(2.0, [answer(0.0, 0.1, 0.2, 0.4), answer(0.0, 0.3, 0.4)])
    figures = {figure.name: figure for figure in figures_of([run])}
    assert figures["requests"].median == 1.0
    assert figures["output"].median == 2.5
    assert figures["prompts and output"].median == (14 + 5) / 2
    assert figures["time to first token, mean"].median == pytest.approx(200)
    assert figures["time per output token, mean"].median == pytest.approx((150 + 100) / 2)
    assert figures["between tokens, median"].median == pytest.approx(100)
    assert figures["whole request, 99 %"].median == pytest.approx(400)


@pytest.mark.parametrize("size", [1, 7])
def test_frames_with_tokens_are_counted_and_no_others(size: int) -> None:
    choices = b"""data: {"id":"1","choices":[{"index":0,"text":"a"}]}\n\n"""
    usage = b"""data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":3}}\n\n"""
    data = b"HTTP/1.1 200 OK\r\n\r\n" + 2 * choices + choices.replace(b":[", b": [") + usage

    async def read() -> Answer:
        reader = _TokenReader(APIS["openai"], b"", Answer(0.0), None)
        for start in range(0, len(data), size):
            piece = data[start : start + size]
            reader.get_buffer(-1)[: len(piece)] = piece
            reader.buffer_updated(len(piece))
        reader.connection_lost(None)
        return await reader.done

    answer = asyncio.run(read())
    assert (answer.num_tokens, len(answer.intervals_s)) == (3, 2)
    assert answer.num_prompt_tokens == 5


def test_prompts_that_a_server_does_not_count_are_in_no_figure() -> None:
    names = {figure.name for figure in figures_of([Run(1.0, [answer(0, 1, 2, prompt=None)])])}
    assert "prompts and output" not in names


def test_percentiles() -> None:
    assert [percentile([3.0, 1.0, 2.0], share) for share in (0.0, 0.5, 0.99)] == [1.0, 2.0, 3.0]


def test_a_table_compares_and_says_what_is_within_the_spread() -> None:
    ours = [Figure("output", "tokens/s", [100.0, 110.0, 120.0], shares=[0.5, 0.7, 0.6])]
    theirs = [Figure("output", "tokens/s", [50.0, 55.0, 60.0])]
    text = table(ours, theirs, "http://b")
    assert text.splitlines()[-1] == ("| output (tokens/s) | 110 | 100 to 120 | 60% | 55.0 | 2.00 |")
    assert "2.00 (within the spread)" in table(ours, [Figure("output", "", [55, 10, 105])], "b")


def test_a_models_shape_counts_the_linears_that_a_step_reads() -> None:
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    kv = config["num_key_value_heads"] * (hidden // config["num_attention_heads"])
    per_layer = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * config["intermediate_size"]
    expected = layers * per_layer + config["vocab_size"] * hidden
    assert ModelShape.read(DEMO_MODEL).linear_params == expected


def test_a_page_stands_alone() -> None:
    figure = Figure("output", "tokens/s", [1.0, 2.0])
    runs = [Run(1.0, [answer(0.0, 0.1, 0.2)])]
    for text in (
        html("t", {"a": "<b>"}, {"x": [figure]}, {}),
        html("t", {}, {"x": [figure], "y": [figure]}, {"x": runs, "y": runs}),
    ):
        assert "<svg" in text
        assert "<b>" not in text
        assert "http" not in text
        assert "NaN" not in text


def test_offline_figures_as_a_table_and_as_files(tmp_path: Path) -> None:
    files = ["--json", str(tmp_path / "f.json"), "--html", str(tmp_path / "f.html")]
    result = lmi(
        "bench", "decode", "--batches", "2", "--runs", "2", "--max-model-len", "300", *files
    )
    assert result.returncode == 0, result.stderr
    assert "| decode batch 2 (tokens/s) |" in result.stdout
    assert "roof: none: weights under 128 MiB" in result.stdout
    ((name, figures),) = json.loads((tmp_path / "f.json").read_text())["figures"].items()
    assert (name, len(figures[0]["runs"])) == ("model", 2)
    assert (tmp_path / "f.html").read_text().startswith("<!doctype html>")


LOAD = ["--requests", "4", "--runs", "2", "--new-tokens", "6", "--prompt-tokens", "8"]


def test_a_model_is_loaded_without_a_server() -> None:
    result = lmi("bench", "serve", *LOAD, "--workload", "agents", "--shared-tokens", "8")
    assert result.returncode == 0, result.stderr
    assert "| output (tokens/s) |" in result.stdout


def test_two_servers_by_turns_in_every_protocol() -> None:
    with serving("--served-model-name", "tales") as url:
        for protocol in APIS:
            other = url if protocol == "lmi" else f"{url}/v1"
            more = ["--url", url, "--protocol", protocol, "--against", other]
            result = lmi("bench", "serve", *LOAD, *more, "--rate", "100")
            assert result.returncode == 0, result.stderr
            name = f"{url} again" if protocol == "lmi" else f"{url}/v1"
            assert f"| {name} | ratio |" in result.stdout
            assert "time to first token, median (ms)" in result.stdout


def test_what_a_server_refuses_is_said() -> None:
    with serving("--max-model-len", "64") as url:
        body = APIS["tgi"].body("x", 5000)
        with pytest.raises(ValueError, match=r"the stream ended with an error: .*5000"):
            asyncio.run(ask(HttpUrl.parse(url), APIS["tgi"], body))
        with pytest.raises(RefusedError, match="answered 404: "):
            asyncio.run(ask(HttpUrl.parse(f"{url}/nowhere"), APIS["openai"], body))
        more = ["--protocol", "tgi", "--new-tokens", "500"]
        result = lmi("bench", "serve", *LOAD, "--url", url, *more)
        assert result.returncode == 4
        assert "no request was answered" in result.stderr
        assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["decode", "--url", "http://x"], "write serve for --url"),
        (
            ["serve", "--url", "http://x", "m", "--dtype", "fp32"],
            "--dtype is none of this command's",
        ),
        (["serve", "--url", "http://x", "m", "n"], "--url takes one model's name besides, got m n"),
        (["serve", "--url", "http://127.0.0.1:9"], "http://127.0.0.1:9 can't be reached: "),
        (["serve", "m", "--url", "http://127.0.0.1:9"], "no request was answered; "),
        (["dekode"], "did you mean decode?"),
        ([], "arguments are required: {prefill,decode,serve}"),
        (["decode", "--runs", "0"], "must be at least 1, got 0"),
        (["prefill", "--lengths", "5,"], "argument --lengths: must be at least 1, got ;"),
        (["serve", "--rate", "nan"], "argument --rate: must be above 0 and at most 1e+06, got nan"),
        (["serve", "--json", "/no/such/x.json"], "--json: can't be written: /no/such/x.json"),
        (["serve", "--html", "/"], "--html: can't be written: /"),
    ],
)
def test_errors_are_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) in (2, 4)
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_a_batch_that_never_decodes_alone_is_said() -> None:

    async def decode() -> None:
        async with Engine(DEMO_MODEL) as engine:
            log = StepLog()  # not the engine's: it never hears of a step
            await OfflineBench(ModelShape.read(DEMO_MODEL), "", engine, log).decode(3, 1)

    with pytest.raises(UserError, match="no step had a batch of 3 that only decodes"):
        asyncio.run(decode())


def test_rates_are_above_0() -> None:
    with pytest.raises(UserError, match="must be above 0"):
        arrivals(3, 0.0, 1.0, 0)
