"""Train the demo model from nothing: `python -m bench.demo.train --out DIR`.

The run is planned by the clock: the learning rate and the change to long rows follow the share of
the time (or tokens, whichever runs out first) that is used up. Run it again after a cut, and it
goes on from its last checkpoint.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from bench.demo.bpe import load_tokenizer, train_tokenizer
from bench.demo.chat import ASSISTANT, BEGIN, SPECIAL_TOKENS, SYSTEM, USER
from bench.demo.corpus import (
    FIRST_SOURCES,
    LONG_SOURCES,
    SHORT_SOURCES,
    Sources,
    documents,
)
from bench.demo.export import export
from bench.demo.network import Network, Shape
from bench.demo.packing import PAD_ID, Rows, cut_batches, document_batches

TOKENIZER_DOCUMENTS = 12_000
CHECKPOINT_SECONDS = 180.0

PROMPT_SHARE = 0.2
"""The share of a prompt's tokens that the loss counts: most of a prompt can't be foreseen, and
what it teaches would drown what the answers do."""

ROLES = tuple(SPECIAL_TOKENS.index(token) for token in (BEGIN, SYSTEM, USER, ASSISTANT))
PROMPT_ROLES = tuple(SPECIAL_TOKENS.index(token) for token in (SYSTEM, USER))


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of a run, until a share `until` of it is used up."""

    until: float
    row_tokens: int
    sources: Sources
    make_batches: Callable[..., Iterator[Rows]] = document_batches


BATCH_TOKENS = 4096

STAGES = (
    Stage(0.5, 512, FIRST_SOURCES),
    Stage(0.85, 512, SHORT_SOURCES),
    # Long rows are slower; by tokens this is about a tenth.
    Stage(1.0, 2048, LONG_SOURCES, cut_batches),
)


@dataclass(frozen=True, slots=True)
class Schedule:
    """What a run may use, and how it learns."""

    max_seconds: float = 6240.0
    max_tokens: int = 25_000_000
    warmup_share: float = 0.01
    decay_share: float = 0.8
    matrix_rate: float = 0.015
    vector_rate: float = 0.003
    seed: int = 1

    def rate(self, used: float) -> float:
        """The factor on the learning rates when a share `used` of the run is over."""
        warm = min(1.0, (used + 1e-4) / self.warmup_share)
        cool = min(1.0, max(0.0, 1.0 - used) / self.decay_share)
        return min(warm, cool)


@dataclass(slots=True)
class Progress:
    """How far a run has come, padding not counted; stored in checkpoints."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0


def batches(schedule: Schedule, stage: Stage, tokenizer_dir: Path, step: int) -> Iterator[Rows]:
    """Batches of a stage; another `step` to begin at gives other documents."""
    seed = schedule.seed * 1_000_003 + step
    texts = documents(seed, sources=stage.sources)
    tokenizer = load_tokenizer(tokenizer_dir)
    return stage.make_batches(texts, tokenizer, stage.row_tokens, BATCH_TOKENS, seed)


def is_counted(ids: Tensor) -> Tensor:
    """Which targets of `ids` `[batch, tokens]` the loss counts, bool `[batch, tokens - 1]`.

    These are all tokens of answers and plain texts, a random `PROMPT_SHARE` of the others, and no
    padding.
    """
    before, targets = ids[:, :-1], ids[:, 1:]
    is_role = torch.isin(before, torch.tensor(ROLES))
    positions = torch.arange(before.shape[1]).expand_as(before)
    last_role = torch.where(is_role, positions, 0).cummax(dim=1).values
    is_prompt = torch.isin(before.gather(1, last_role), torch.tensor(PROMPT_ROLES))
    # The first end token of a row's padding is a real one; what follows it is not learned.
    is_padding = (targets == PAD_ID) & (before == PAD_ID)
    return (~is_prompt | (torch.rand(targets.shape) < PROMPT_SHARE)) & ~is_padding


def loss_of(network: Network, ids: Tensor) -> Tensor:
    """Mean loss of predicting the counted tokens of `ids` `[batch, tokens]` from those before."""
    counted = is_counted(ids)
    with torch.autocast("cpu", torch.bfloat16):
        logits = network.logits(network.hidden(ids)[:, :-1][counted])
    return F.cross_entropy(logits.float(), ids[:, 1:][counted])


class Trainer:
    """A network with its optimisers: Muon for matrices, AdamW for embeddings and norms."""

    def __init__(self, schedule: Schedule, out: Path) -> None:
        self.schedule = schedule
        self.out = out
        self.progress = Progress()
        torch.manual_seed(schedule.seed)
        self.network = Network(Shape())
        layers = list(self.network.layers.parameters())
        matrices = [weight for weight in layers if weight.ndim == 2]
        others = [weight for weight in layers if weight.ndim < 2]
        others += [*self.network.embed_tokens.parameters(), *self.network.norm.parameters()]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=schedule.matrix_rate, weight_decay=0.01),
            torch.optim.AdamW(
                others, lr=schedule.vector_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
            ),
        ]

    @property
    def checkpoint(self) -> Path:
        """Where the run keeps its state."""
        return self.out / "checkpoint.pt"

    def used(self) -> float:
        """The share of the run that is over."""
        by_time = self.progress.seconds / self.schedule.max_seconds
        return max(by_time, self.progress.tokens / self.schedule.max_tokens)

    def save(self) -> None:
        """Write the checkpoint, replacing the one before only when complete."""
        state = {
            "network": self.network.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "progress": asdict(self.progress),
        }
        partial = self.checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self.checkpoint)

    def resume(self) -> None:
        """Take up the state of the last checkpoint, if there is one."""
        if not self.checkpoint.exists():
            return
        state = torch.load(self.checkpoint, weights_only=True)
        self.network.load_state_dict(state["network"])
        for optimizer, kept in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(kept)
        self.progress = Progress(**state["progress"])

    def learn(self, batch: Rows) -> float:
        """One step on `batch`; returns its loss."""
        factor = self.schedule.rate(self.used())
        rates = (self.schedule.matrix_rate, self.schedule.vector_rate)
        for optimizer, rate in zip(self.optimizers, rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
        loss = loss_of(self.network, torch.from_numpy(batch.astype(np.int64)))
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.progress.step += 1
        self.progress.tokens += int((batch != PAD_ID).sum())
        return float(loss.detach())

    def run(self) -> None:
        """Train until time or tokens are used up, saving checkpoints on the way."""
        start = time.monotonic() - self.progress.seconds
        saved = self.progress.seconds
        for stage in STAGES:
            source = batches(self.schedule, stage, self.out, self.progress.step)
            while self.used() < stage.until:
                loss = self.learn(next(source))
                self.progress.seconds = time.monotonic() - start
                if self.progress.step % 20 == 0:
                    print(f"{self.report()}  loss {loss:.4f}", flush=True)
                if self.progress.seconds - saved > CHECKPOINT_SECONDS:
                    self.save()
                    saved = self.progress.seconds
        self.save()

    def report(self) -> str:
        """A line about where the run is."""
        now = self.progress
        return (
            f"step {now.step}  tokens {now.tokens / 1e6:.2f}M  "
            f"{now.seconds:.0f} s  {now.tokens / max(now.seconds, 1):.0f} tokens/s"
        )


def prepare_tokenizer(out: Path, seed: int) -> None:
    """Train the tokenizer into `out`, unless it is there."""
    if not (out / "tokenizer.json").exists():
        texts = islice(documents(seed, sources=FIRST_SOURCES), TOKENIZER_DOCUMENTS)
        train_tokenizer(texts, Shape().vocab_size).save(str(out / "tokenizer.json"))


def main() -> None:
    """Train as the command line says and write the model directory `OUT/model`."""
    parser = argparse.ArgumentParser(description="Train the demo model.")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    parser.add_argument("--minutes", type=float, default=104.0)
    # A second thread speeds these small matrices up by a sixth only.
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    schedule = Schedule(max_seconds=args.minutes * 60)
    prepare_tokenizer(args.out, schedule.seed)
    trainer = Trainer(schedule, args.out)
    trainer.resume()
    trainer.run()
    export(trainer.network, load_tokenizer(args.out), args.out / "model")
    print(trainer.report())


if __name__ == "__main__":
    main()
