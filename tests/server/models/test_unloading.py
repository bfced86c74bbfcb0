"""What unloading a model takes of the others' time."""

from __future__ import annotations

import asyncio
import gc
import os
import signal

from lmi_server.http.lifecycle import run_server
from lmi_server.http.metrics import Metrics
from lmi_server.http.options import ServerOptions
from lmi_server.models.model_registry import ModelRegistry


def test_the_collection_of_a_models_parts_leaves_modules_out() -> None:
    """To look at every object of every module would hold the loop for 40 ms."""
    num_looked_at: list[int] = []

    def announce(_: str) -> None:
        num_looked_at.append(len(gc.get_objects()))
        os.kill(os.getpid(), signal.SIGTERM)

    num_before = len(gc.get_objects())
    try:
        models = ModelRegistry(ServerOptions(host="127.0.0.1", port=0), Metrics())
        asyncio.run(run_server(models, announce=announce))
    finally:
        gc.unfreeze()
    assert num_looked_at[0] < num_before / 4
