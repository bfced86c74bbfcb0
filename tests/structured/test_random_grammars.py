"""A slice of the random grammars that ``random_grammars.py`` sends by the thousand."""

from __future__ import annotations

import asyncio

from tests.server.test_structured import serving_demo
from tests.structured.random_grammars import WRONG, ask_all


def test_no_text_is_invalid_and_nothing_holds_the_loop() -> None:
    async def use() -> None:
        async with serving_demo(api="openai") as served:
            outcomes = await ask_all(served, range(120))
        assert outcomes["stop"] > 60, outcomes
        assert not [what for what in outcomes if what.startswith(WRONG)]

    asyncio.run(use())
