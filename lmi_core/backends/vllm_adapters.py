"""LoRA adapters that a vLLM engine holds, by our names."""

from __future__ import annotations

import asyncio
import importlib
import itertools
from pathlib import Path
from typing import Any

from lmi_core.backends.library_error import reason_of
from lmi_core.errors import ModelError


class VllmAdapters:
    """vLLM keeps cached blocks by an adapter's name; so each load has a name of its own there."""

    def __init__(self) -> None:
        self._requests: dict[str, Any] = {}
        self._serials = itertools.count(1)

    def find(self, name: str) -> Any:
        """What a request with the adapter carries; None for the base model."""
        return self._requests[name] if name else None

    async def load(self, engine: Any, name: str, path: Path) -> None:
        """Raises ModelError with vLLM's reason."""
        module = await asyncio.to_thread(importlib.import_module, "vllm.lora.request")
        serial = next(self._serials)
        request = module.LoRARequest(
            lora_name=f"{name}#{serial}", lora_int_id=serial, lora_path=str(path)
        )
        try:
            await engine.add_lora(request)
        except Exception as error:  # its processes may fail of anything
            message = f"vLLM can't load the adapter {path}: {reason_of(error)}"
            raise ModelError(message, field="adapter") from error
        self._requests[name] = request

    async def unload(self, engine: Any, name: str) -> None:
        """Requests that run with it go on: they carry what vLLM needs to load it again."""
        await engine.remove_lora(self._requests.pop(name).lora_int_id)
