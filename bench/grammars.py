"""What grammars cost at a vocabulary of 128,000 tokens: until the first token, and per mask.

    python -m bench.grammars                  a table, a line per grammar
    python -m bench.grammars --tokens 32000

The vocabulary is made of the standard library's source text: words with and without a blank before
them, their beginnings, digits, blanks and every byte. Texts are random walks through a grammar.
"""

from __future__ import annotations

import argparse
import random
import re
import statistics
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lmi_core.structured.grammar import Grammar
from lmi_core.structured.guidance import GuidanceLibrary
from lmi_core.structured.structural_tag import structural_tag

_PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 9},
        "home": {
            "type": "object",
            "properties": {"street": {"type": "string", "maxLength": 40}, "no": {"type": "number"}},
            "required": ["street", "no"],
        },
    },
    "required": ["name", "age", "tags", "home"],
    "additionalProperties": False,
}
_TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<f=a>", "schema": _PERSON, "end": "</f>"}],
    "triggers": ["<f="],
}
GRAMMARS: Mapping[str, Grammar] = {
    "a person by JSON schema": Grammar.json_schema(_PERSON),
    "any JSON object": Grammar.json_object(),
    "a regex": Grammar.regex(r"[a-z]{2,20}(@[a-z0-9.-]{1,40}){0,4}"),
    "a regex of any 500 characters": Grammar.regex(r"(.|\n){1,500}"),
    "1 of 500 choices": Grammar.choice([f"{i * 7919 % 1000}-way {i}" for i in range(500)]),
    "arithmetic (Lark)": Grammar.context_free(
        'start: sum\nsum: one (("+" | "-") one)*\none: /[0-9]{1,6}/ | "(" sum ")"'
    ),
    "arithmetic (GBNF)": Grammar.context_free(
        'root ::= one (("+" | "-") one)*\none ::= [0-9]{1,6} | "(" root ")"'
    ),
    "text with a structural tag": structural_tag(_TAG, field="tag"),
    "the worst repetition that is taken": Grammar.regex(r".{1,39990}"),
    "nested repetitions": Grammar.regex(r"(a{90}b){100}"),
}


class Vocabulary:
    """What the library asks of a tokenizer."""

    bos_token_id = None

    def __init__(self, num_tokens: int) -> None:
        self.special_tokens = {"</s>": 256}
        self.special_ids = frozenset((256,))
        texts = [bytes([byte]) for byte in range(256)] + [b"</s>"]
        texts += _words(num_tokens - len(texts), set(texts))
        self.token_bytes = dict(enumerate(texts))
        self._longest = max(map(len, texts))
        self._ids = {text: i for i, text in enumerate(texts)}

    def encode_now(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The longest token at every place."""
        data, ids, start = text.encode(), [], 0
        while start < len(data):
            end = min(len(data), start + self._longest)
            while data[start:end] not in self._ids:
                end -= 1
            ids.append(self._ids[data[start:end]])
            start = end
        return ids


def _words(wanted: int, known: set[bytes]) -> list[bytes]:
    """The commonest first."""
    counts: Counter[str] = Counter()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        text = path.read_text(errors="ignore")
        for word in re.findall(r"[A-Za-z]+|[0-9]{1,3}|\n[ ]*|[^A-Za-z0-9\s]{1,4}", text):
            counts[word] += 1
            counts[f" {word}"] += 1
        if len(counts) > wanted:
            break
    for word in list(counts):
        for size in range(2, len(word)):
            counts[word[:size]] += 1
    texts = (word.encode() for word, _ in counts.most_common())
    return [text for text in dict.fromkeys(texts) if text not in known][:wanted]


@dataclass(frozen=True, slots=True)
class Cost:
    """Milliseconds but for masks and the loop's part, which are in microseconds."""

    compile_ms: float
    first_ms: float
    """Of a grammar that is compiled: a matcher, and its first mask."""
    mask_us: float
    mask_p99_us: float
    mask_max_us: float
    loop_p99_us: float
    """What the loop itself does for a token: ``accept``, and ``forced_tokens`` for drafts."""
    loop_max_us: float


def measure(library: GuidanceLibrary, grammar: Grammar, vocab_size: int, num_walks: int) -> Cost:
    compile_ms = _seconds(lambda: library.compile(grammar)) * 1e3
    compiled = library.compile(grammar)
    mask = np.zeros(-(-vocab_size // 32), np.uint32)
    firsts, masks, loops = [], [], []
    for seed in range(num_walks):
        rng = random.Random(seed)
        started = time.thread_time()
        matcher = compiled.matcher()
        matcher.fill_mask(mask)
        firsts.append(time.thread_time() - started)
        for _ in range(100):
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocab_size]
            token_id = int(rng.choice(np.flatnonzero(bits)))
            started = time.thread_time()
            matcher.accept(token_id)
            matcher.forced_tokens()
            loops.append(time.thread_time() - started)
            if matcher.is_complete:
                break
            masks.append(_seconds(partial(matcher.fill_mask, mask)))
    return Cost(
        compile_ms,
        statistics.median(firsts) * 1e3,
        statistics.median(masks) * 1e6,
        _p99(masks) * 1e6,
        max(masks) * 1e6,
        _p99(loops) * 1e6,
        max(loops) * 1e6,
    )


def _seconds(work: Callable[[], object]) -> float:
    """Of the thread's processor time: a machine that others use changes nothing."""
    started = time.thread_time()
    work()
    return time.thread_time() - started


def _p99(values: list[float]) -> float:
    return sorted(values)[len(values) * 99 // 100]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=128_000)
    parser.add_argument("--walks", type=int, default=20)
    arguments = parser.parse_args()
    vocabulary = Vocabulary(arguments.tokens)
    size = len(vocabulary.token_bytes)
    made: list[GuidanceLibrary] = []

    def read() -> None:
        made.append(GuidanceLibrary(vocabulary, vocab_size=size, eos_token_ids=[256]))  # type: ignore[arg-type]

    print(f"{size} tokens are read in {_seconds(read):.2f} s of processor time")
    print("| grammar | compile ms | first ms | mask us | p99 | max | loop us p99 | max |")
    print("|---|---|---|---|---|---|---|---|")
    for name, grammar in GRAMMARS.items():
        cost = measure(made[0], grammar, size, arguments.walks)
        print(
            f"| {name} | {cost.compile_ms:.1f} | {cost.first_ms:.2f} | {cost.mask_us:.0f} | "
            f"{cost.mask_p99_us:.0f} | {cost.mask_max_us:.0f} | {cost.loop_p99_us:.0f} | "
            f"{cost.loop_max_us:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
