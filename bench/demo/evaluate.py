"""Measure a model directory: `python -m bench.demo.evaluate --model DIR`.

Prompts and windows are made of held-out combinations only, from a seed that training doesn't use.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel

from bench.demo.bpe import load_tokenizer
from bench.demo.chat import Turn, render_chat
from bench.demo.corpus import LONG_SOURCES, documents
from bench.demo.packing import PAD_ID, cut_rows
from bench.demo.reading import reading_task
from bench.demo.records import record_task
from bench.demo.story import story_task
from bench.demo.sums import sum_task
from bench.demo.task import Task
from lmi_core.demo import MODEL_DIR

SEED = 20_000_003
WINDOW = 2048
BUCKETS = ((0, 256), (256, 512), (512, 1024), (1024, 2048))
BATCH_SIZE = 50
MAX_NEW_TOKENS = 320

Losses = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Bar:
    """A kind of request and the share of right answers it has to reach (0: only reported)."""

    name: str
    make: Callable[[Random], Task]
    least: float


BARS = (
    Bar("story has character and place", lambda rng: story_task(rng, held_out=True), 0.95),
    Bar("JSON with the asked keys", lambda rng: record_task(rng, held_out=True), 0.95),
    Bar("answer about a text", lambda rng: reading_task(rng, held_out=True), 0.85),
    Bar("one-digit sum, held out", lambda rng: sum_task(rng, 1, held_out=True), 0.95),
    Bar("one-digit sum, trained on", lambda rng: sum_task(rng, 1, held_out=False), 0.95),
    Bar("two-digit sum, held out", lambda rng: sum_task(rng, 2, held_out=True), 0.0),
)


class Subject:
    """The model under test with its tokenizer."""

    def __init__(self, directory: Path, dtype: torch.dtype) -> None:
        self.tokenizer = load_tokenizer(directory)
        self.directory = directory
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
        self.model.train(False)

    def answer(self, prompts: list[str]) -> list[str]:
        """Greedy answers to `prompts`, each the only message of a conversation."""
        texts = [render_chat([Turn("user", prompt)], generation_prompt=True) for prompt in prompts]
        encodings = self.tokenizer.encode_batch(texts, add_special_tokens=False)
        ids = [encoding.ids for encoding in encodings]
        order = sorted(range(len(ids)), key=lambda index: len(ids[index]))
        answers = [""] * len(ids)
        for start in range(0, len(ids), BATCH_SIZE):
            members = order[start : start + BATCH_SIZE]
            for index, new_ids in zip(
                members, self._generate([ids[i] for i in members]), strict=True
            ):
                answers[index] = self.tokenizer.decode(new_ids).strip()
        return answers

    def _generate(self, prompts: list[list[int]]) -> list[list[int]]:
        """New tokens after each of `prompts`, which are padded on the left."""
        width = max(map(len, prompts))
        padded = torch.tensor([[PAD_ID] * (width - len(ids)) + ids for ids in prompts])
        mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts])
        out: Tensor = self.model.generate(  # type: ignore[operator]
            padded, attention_mask=mask, do_sample=False, max_new_tokens=MAX_NEW_TOKENS
        )
        new_ids: list[list[int]] = out[:, width:].tolist()
        return new_ids

    def losses(self, windows: NDArray[np.uint16]) -> Losses:
        """Loss of every token but the first of `windows`; padding is NaN."""
        rows = []
        for window in windows:
            ids = torch.from_numpy(window.astype(np.int64))[None]
            logits = self.model(ids).logits[:, :-1].float()
            row = F.cross_entropy(logits[0], ids[0, 1:], reduction="none").double().numpy()
            row[(window[1:] == PAD_ID) & (window[:-1] == PAD_ID)] = np.nan
            rows.append(row)
        return np.stack(rows)


def tasks(bar: Bar, num_prompts: int) -> list[Task]:
    """The prompts of a bar; the same ones each time."""
    rng = Random(f"{SEED}-{bar.name}")
    return [bar.make(rng) for _ in range(num_prompts)]


def held_out_windows(directory: Path, num_windows: int) -> NDArray[np.uint16]:
    """Windows of held-out documents `[num_windows, WINDOW]`, mixed as in the long phase.

    They are cut from one stream, so that every position has the same mix of texts.
    """
    texts = documents(SEED, sources=LONG_SOURCES, held_out=True)
    chunks = cut_rows(texts, load_tokenizer(directory), WINDOW, SEED)
    flat: Iterator[NDArray[np.uint16]] = (row for chunk in chunks for row in chunk)
    return np.stack(list(islice(flat, num_windows)))


def mean_and_error(losses: Losses) -> tuple[float, float]:
    """Mean per token, and its standard error from the spread of the windows' means."""
    means = np.nanmean(losses, axis=1)
    return float(np.nanmean(losses)), float(means.std(ddof=1) / np.sqrt(len(means)))


def report_loss(subject: Subject, num_windows: int) -> bool:
    """Print the held-out loss, whole and by position; whether late positions are no worse."""
    losses = subject.losses(held_out_windows(subject.directory, num_windows))
    mean, error = mean_and_error(losses)
    print(f"held-out loss: {mean:.4f} +- {error:.4f} nats a token ({losses.size} tokens)")
    by_bucket = {}
    for low, high in BUCKETS:
        by_bucket[low], error = mean_and_error(losses[:, max(low - 1, 0) : high - 1])
        print(f"  positions {low} to {high}: {by_bucket[low]:.4f} +- {error:.4f}")
    return by_bucket[1024] <= by_bucket[256]


def report_bar(subject: Subject, bar: Bar, num_prompts: int, num_shown: int) -> bool:
    """Print how many answers are right, and some wrong ones; whether the bar is reached."""
    asked = tasks(bar, num_prompts)
    answers = subject.answer([task.prompt for task in asked])
    wrong = [pair for pair in zip(asked, answers, strict=True) if not pair[0].accepts(pair[1])]
    num_right = len(asked) - len(wrong)
    share = num_right / len(asked)
    print(f"{bar.name}: {num_right} of {len(asked)} ({share:.1%}, bar {bar.least:.0%})", flush=True)
    for task, answer in wrong[:num_shown]:
        print(f"  {task.prompt!r}\n    -> {answer!r}, not {task.answer!r}")
    return share >= bar.least


def main() -> int:
    """Print all figures; 0 when every bar is reached, else 1."""
    parser = argparse.ArgumentParser(description="Evaluate the demo model.")
    parser.add_argument("--model", type=Path, default=MODEL_DIR, help="model directory")
    parser.add_argument("--prompts", type=int, default=500, help="prompts per bar")
    parser.add_argument("--windows", type=int, default=200, help="windows for the held-out loss")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--show", type=int, default=0, help="wrong answers to show per bar")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    subject = Subject(args.model, getattr(torch, args.dtype))
    with torch.inference_mode():
        reached = [report_bar(subject, bar, args.prompts, args.show) for bar in BARS]
        reached.append(report_loss(subject, args.windows))
    return 0 if all(reached) else 1


if __name__ == "__main__":
    sys.exit(main())
