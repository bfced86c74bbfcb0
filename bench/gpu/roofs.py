"""What the device can do at this minute: copy and read rates, and bf16 matrix products.

    python -m bench.gpu.roofs

The copy rate counts bytes read and bytes written.
"""

from __future__ import annotations

import json

import torch

from bench.gpu.measure import median_s, parse, write


def measure_roofs(device: str, *, tiny: bool) -> dict[str, float]:
    num_bytes, size = (1 << 20, 64) if tiny else (4 << 30, 8192)
    source = torch.zeros(num_bytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    copy_s = median_s(lambda: target.copy_(source), device)
    read_s = median_s(lambda: source.sum(), device)
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    product_s = median_s(lambda: a @ b, device)
    return {
        "copy_gb_per_s": 2 * num_bytes / copy_s * 1e-9,
        "read_gb_per_s": num_bytes / read_s * 1e-9,
        "bf16_tflops": 2 * size**3 / product_s * 1e-12,
    }


if __name__ == "__main__":
    arguments = parse(__doc__)
    roofs = measure_roofs(arguments.device, tiny=arguments.tiny)
    print(json.dumps(roofs))
    write(arguments.json, roofs)
