"""Whether a kernel has left a GPU that this process can't use any more."""

from __future__ import annotations

import sys

EXIT_CODE = 70
"""Of a process that ends because of it."""


def is_lost() -> bool:
    """False where nothing has used the GPU yet."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        print(f"the device is lost: {error}")
        return True
    return False
