"""``lmi bench serve`` beside the load clients of vLLM and GuideLLM, on one server, same prompts.

    python -m bench.clients --vllm VENV/bin/vllm --guidellm VENV/bin/guidellm --tick-ms 25
    python -m bench.clients ... --shape 160m --rounds 5

With ``--tick-ms`` the server's tokens come from a script, one a tick for every open stream, so that
it is known what a client should see, whatever else the machine does; else from a model. The clients
take turns. Beside each figure, the median of its rounds, stands what the server's own histograms
say of the requests of these rounds (means, which are compared with means).
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.checkpoints import checkpoint
from bench.copies import say
from bench.server_process import started
from lmi_core.bench.workload import Sizes, make_sessions
from lmi_core.demo import MODEL_DIR

Figures = dict[str, float]
"""Tokens a second, and milliseconds to the first token and between tokens."""
_NAMES = ("tokens/s", "first token, mean", "first token, median", "between tokens, mean")
_HISTOGRAMS = ("lmi_time_to_first_token_seconds", "lmi_inter_token_latency_seconds")


class Load:
    """A server, the prompts as files that the clients read, and who takes them where."""

    def __init__(self, args: argparse.Namespace, url: str, tokenizer: Path, home: Path) -> None:
        self.args, self.url, self.tokenizer, self.home = args, url, tokenizer, home
        self.prompts = home / "prompts.jsonl"
        self.result = home / "result.json"

    def write_prompts(self, seed: int) -> None:
        sizes = Sizes(
            num_requests=self.args.requests,
            num_prompt=self.args.prompt_words,
            num_new=self.args.new_tokens,
        )
        rows = [
            {"prompt": session[0].text, "output_tokens_count": self.args.new_tokens}
            for session in make_sessions("fixed", sizes, seed)
        ]
        self.prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(self, *command: str) -> dict[str, Any]:
        self.result.unlink(missing_ok=True)
        done = subprocess.run(command, capture_output=True, text=True, cwd=self.home)
        if done.returncode or not self.result.exists():
            raise SystemExit(f"{command[0]} failed:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
        result: dict[str, Any] = json.loads(self.result.read_text())
        return result

    def seen_by_server(self) -> dict[str, tuple[float, float]]:
        """Sums and counts of its histograms."""
        with urllib.request.urlopen(f"{self.url}/metrics") as response:
            text = response.read().decode()

        def total(name: str) -> float:
            return sum(map(float, re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)))

        return {name: (total(f"{name}_sum"), total(f"{name}_count")) for name in _HISTOGRAMS}


def by_lmi(load: Load, seed: int) -> Figures:
    args = load.args
    sizes = f"--requests {args.requests} --prompt-tokens {args.prompt_words}"
    sizes += f" --new-tokens {args.new_tokens} --concurrency {args.concurrency}"
    command = [sys.executable, "-m", "lmi_core", "bench", "serve", "--url", load.url]
    command += [*sizes.split(), "--runs", "1", "--seed", str(seed), "--json", str(load.result)]
    (figures,) = load.run(*command)["figures"].values()
    medians = {figure["name"]: figure["median"] for figure in figures}
    return {
        "tokens/s": medians["output"],
        "first token, mean": medians["time to first token, mean"],
        "first token, median": medians["time to first token, median"],
        "between tokens, mean": medians["between tokens, mean"],
    }


def by_vllm(load: Load, seed: int) -> Figures:
    args = load.args
    words = f"bench serve --backend openai --base-url {load.url} --endpoint /v1/completions"
    words += f" --model model --tokenizer {load.tokenizer} --dataset-name custom"
    words += f" --dataset-path {load.prompts} --custom-output-len {args.new_tokens}"
    words += f" --skip-chat-template --disable-shuffle --num-prompts {args.requests}"
    words += f" --max-concurrency {args.concurrency} --ignore-eos --temperature 0 --save-result"
    words += f" --result-filename {load.result} --num-warmups {args.concurrency} --disable-tqdm"
    result = load.run(str(args.vllm), *words.split())
    return {
        "tokens/s": result["output_throughput"],
        "first token, mean": result["mean_ttft_ms"],
        "first token, median": result["median_ttft_ms"],
        "between tokens, mean": result["mean_itl_ms"],
    }


def by_guidellm(load: Load, seed: int) -> Figures:
    args = load.args
    words = f"run --backend kind=openai_http,target={load.url},model=model"
    words += ",request_format=/v1/completions"
    words += f" --profile kind=concurrent,streams={args.concurrency}"
    words += f" --constraint kind=max_requests,count={args.requests}"
    words += f" --data kind=json_file,path={load.prompts}"
    words += f" --tokenizer kind=hf_auto,model={load.tokenizer}"
    words += f" --output kind=json,path={load.result} --disable-console"
    result = load.run(str(args.guidellm), *words.split())
    metrics = result["benchmarks"][0]["metrics"]

    def of(name: str, what: str) -> float:
        return float(metrics[name]["successful"][what])

    return {
        "tokens/s": of("output_tokens_per_second", "mean"),
        "first token, mean": of("time_to_first_token_ms", "mean"),
        "first token, median": of("time_to_first_token_ms", "median"),
        "between tokens, mean": of("inter_token_latency_ms", "mean"),
    }


Client = Callable[[Load, int], Figures]
CLIENTS: dict[str, Client] = {"lmi": by_lmi, "vllm": by_vllm, "guidellm": by_guidellm}


def measure(load: Load) -> dict[str, list[Figures]]:
    """The clients' figures, round by round, and what the server saw meanwhile."""
    asked = {"vllm": load.args.vllm, "guidellm": load.args.guidellm}
    clients = {name: CLIENTS[name] for name in CLIENTS if name == "lmi" or asked[name]}
    found: dict[str, list[Figures]] = {name: [] for name in clients}
    for i in range(load.args.rounds):
        load.write_prompts(seed=i)
        for name, client in clients.items():
            before = load.seen_by_server()
            figures = client(load, i)
            after = load.seen_by_server()
            for histogram, name_here in zip(_HISTOGRAMS, (_NAMES[1], _NAMES[3]), strict=True):
                (sum_0, count_0), (sum_1, count_1) = before[histogram], after[histogram]
                if count_1 > count_0:
                    seen_ms = 1e3 * (sum_1 - sum_0) / (count_1 - count_0)
                    figures[f"{name_here}, server's"] = seen_ms
            found[name].append(figures)
            shown = ", ".join(f"{key} {value:.2f}" for key, value in figures.items())
            say(f"{name}: {shown}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--vllm", type=Path, help="the program of an environment with vLLM")
    add("--guidellm", type=Path, help="the program of an environment with GuideLLM")
    add("--tick-ms", type=float, help="scripted tokens instead of a model's")
    add("--shape", default="160m")
    add("--rounds", type=int, default=5)
    add("--requests", type=int, default=64)
    add("--concurrency", type=int, default=8)
    add("--prompt-words", type=int, default=128)
    add("--new-tokens", type=int, default=128)
    args = parser.parse_args()
    model = MODEL_DIR if args.tick_ms else checkpoint(args.shape).absolute()
    command = [sys.executable, "-m", "lmi_core", "serve", str(model), "--device", "cpu"]
    # A client's prompts are found in no cache that those before it filled.
    command += ["--served-model-name", "model", "--no-enable-prefix-caching"]
    if args.tick_ms:
        command = [sys.executable, "-m", "bench.front_end", "--serve", "--tick-ms"]
        command.append(f"{args.tick_ms:g}")
    with started(command) as server, tempfile.TemporaryDirectory() as home:
        url = f"http://127.0.0.1:{server.port}"
        found = measure(Load(args, url, model, Path(home)))
    print("| | " + " | ".join(found) + " |\n|---" + "|---:" * len(found) + "|")
    for name in found["lmi"][0]:
        cells = [f"{statistics.median(row[name] for row in rows):.2f}" for rows in found.values()]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
