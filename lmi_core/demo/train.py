"""Train the demo model from nothing: `python -m lmi_core.demo.train --out DIR`.

The run is planned by the clock: the learning rate and the change to long rows follow the share of
the time (or tokens, whichever runs out first) that is used up. Run it again after a cut, and it
goes on from its last checkpoint.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from lmi_core.demo.bpe import load_tokenizer, train_tokenizer
from lmi_core.demo.corpus import LONG_SOURCES, SHORT_SOURCES, Sources, documents
from lmi_core.demo.export import export
from lmi_core.demo.network import Network, Shape
from lmi_core.demo.packing import PAD_ID, Rows, packed_rows

TOKENIZER_DOCUMENTS = 12_000
CHECKPOINT_SECONDS = 180.0


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of a run, until a share `until` of it is used up."""

    until: float
    row_tokens: int
    batch_tokens: int
    sources: Sources


STAGES = (
    # Many small steps on short rows first: that is when the model finds out how to copy.
    Stage(0.3, 256, 4096, SHORT_SOURCES),
    Stage(0.88, 512, 4096, SHORT_SOURCES),
    # Long rows are slower; by tokens this is about a tenth.
    Stage(1.0, 2048, 4096, LONG_SOURCES),
)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run may use, and how it learns."""

    max_seconds: float = 3300.0
    max_tokens: int = 25_000_000
    warmup_share: float = 0.01
    decay_share: float = 0.2
    matrix_rate: float = 0.02
    vector_rate: float = 0.004
    seed: int = 1

    def rate(self, used: float) -> float:
        """The factor on the learning rates when a share `used` of the run is over."""
        warm = min(1.0, (used + 1e-4) / self.warmup_share)
        cool = min(1.0, max(0.0, 1.0 - used) / self.decay_share)
        return min(warm, cool)


@dataclass(slots=True)
class Progress:
    """How far a run has come; stored in checkpoints."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0


def batches(plan: Plan, stage: Stage, tokenizer_dir: Path, step: int) -> Iterator[Rows]:
    """Batches of packed rows of a stage; another `step` to begin at gives other documents."""
    seed = plan.seed * 1_000_003 + step
    texts = documents(seed, sources=stage.sources)
    chunks = packed_rows(texts, load_tokenizer(tokenizer_dir), stage.row_tokens, seed)
    rows = chain.from_iterable(chunks)
    while True:
        yield np.stack(list(islice(rows, stage.batch_tokens // stage.row_tokens)))


def loss_of(network: Network, ids: Tensor) -> Tensor:
    """Mean loss of predicting each token of `ids` `[batch, tokens]` from those before it."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = network(ids)[:, :-1]
    targets = ids[:, 1:]
    # The first end token of a row's padding is a real one; what follows it is not learned.
    is_padding = (targets == PAD_ID) & (ids[:, :-1] == PAD_ID)
    targets = targets.masked_fill(is_padding, -100)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class Trainer:
    """A network with its optimisers: Muon for matrices, AdamW for embeddings and norms."""

    def __init__(self, plan: Plan, out: Path) -> None:
        self.plan = plan
        self.out = out
        self.progress = Progress()
        torch.manual_seed(plan.seed)
        self.network = Network(Shape())
        layers = list(self.network.layers.parameters())
        matrices = [weight for weight in layers if weight.ndim == 2]
        others = [weight for weight in layers if weight.ndim < 2]
        others += [*self.network.embed_tokens.parameters(), *self.network.norm.parameters()]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=plan.matrix_rate, weight_decay=0.01),
            torch.optim.AdamW(
                others, lr=plan.vector_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
            ),
        ]

    @property
    def checkpoint(self) -> Path:
        """Where the run keeps its state."""
        return self.out / "checkpoint.pt"

    def used(self) -> float:
        """The share of the run that is over."""
        by_time = self.progress.seconds / self.plan.max_seconds
        return max(by_time, self.progress.tokens / self.plan.max_tokens)

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
        factor = self.plan.rate(self.used())
        rates = (self.plan.matrix_rate, self.plan.vector_rate)
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
        self.progress.tokens += batch.size
        return float(loss.detach())

    def run(self) -> None:
        """Train until time or tokens are used up, saving checkpoints on the way."""
        start = time.monotonic() - self.progress.seconds
        saved = self.progress.seconds
        for stage in STAGES:
            source = batches(self.plan, stage, self.out, self.progress.step)
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
        texts = islice(documents(seed), TOKENIZER_DOCUMENTS)
        train_tokenizer(texts, Shape().vocab_size).save(str(out / "tokenizer.json"))


def main() -> None:
    """Train as the command line says and write the model directory `OUT/model`."""
    parser = argparse.ArgumentParser(description="Train the demo model.")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    parser.add_argument("--minutes", type=float, default=55.0)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    plan = Plan(max_seconds=args.minutes * 60)
    prepare_tokenizer(args.out, plan.seed)
    trainer = Trainer(plan, args.out)
    trainer.resume()
    trainer.run()
    export(trainer.network, load_tokenizer(args.out), args.out / "model")
    print(trainer.report())


if __name__ == "__main__":
    main()
