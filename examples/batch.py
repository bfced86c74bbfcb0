"""Many prompts at once inside a program: the engine batches them by itself.

python examples/batch.py [MODEL]
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from lmi_core import Engine

DEMO = Path(__file__).parents[1] / "lmi_core" / "demo" / "model"
QUESTIONS = [f"What is {a} + {b}?" for a in (3, 7) for b in (2, 5)]


async def main(model: Path) -> None:
    async with Engine(model) as engine:
        answers = await asyncio.gather(*(engine.chat(q, max_new_tokens=16) for q in QUESTIONS))
        for question, answer in zip(QUESTIONS, answers, strict=True):
            print(f"{question} {answer}")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]) if len(sys.argv) > 1 else DEMO))
