"""Of the smoke: kernels that only steps launched by C++ call."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.gpu.comparison import ALLOWED, randoms, within
from bench.gpu.measure import Item
from lmi_core.ops.device.adapter_table import AdapterTable
from lmi_core.ops.device.torch_weights import DeviceWeight


def rank_items(device: str) -> list[Item]:
    """Of one rank, which meets nobody: what it gives is its own."""
    from lmi_core.ops.kernels.cuda import library

    own = randoms(device, 5, 96)
    ids = torch.arange(5, dtype=torch.int32, device=device)

    def meet(name: str, given: Tensor, result: Tensor, **arguments: object) -> dict[str, Any]:
        from lmi_core.ops.kernels.cuda.nccl import NcclRanks, make_id

        ranks = NcclRanks(make_id(), 0, 1, torch.device(device))
        library.call(name, given, ranks=ranks.address, num_rows=5, **arguments)
        difference = (result - given).abs().max().item()
        ranks.close()
        return within(difference, 0.0)

    def all_reduce() -> dict[str, Any]:
        x = own.clone()
        return meet("all_reduce", own, x, x=x, num_columns=96)

    def gather_columns() -> dict[str, Any]:
        parts, y = torch.empty_like(own), torch.empty_like(own)
        firsts = torch.tensor([0, 96], dtype=torch.int32, device=device)
        columns = {"first_columns": firsts, "num_columns": 96, "most_columns": 96}
        return meet("gather_columns", own, y, x=own, parts=parts, y=y, **columns)

    def share_tokens() -> dict[str, Any]:
        shared = ids.clone()
        return meet("share_tokens", ids, shared, token_ids=shared)

    def norm_all_heads() -> dict[str, Any]:
        """64 columns of queries and 16 of keys, of 96."""
        x, weight = own.clone(), randoms(device, 80)
        shared = {"x": x, "means": own.new_empty(5, 2), "num_rows": 5}
        shared |= {"stride": 96, "num_q": 64, "num_k": 16}
        library.call("square_heads", own, num_ranks=1, **shared)
        library.call("scale_heads", own, weight=weight, eps=1e-5, **shared)
        expected = own.clone()
        for part in (slice(0, 64), slice(64, 80)):
            mean = own[:, part].square().mean(1, keepdim=True)
            expected[:, part] *= torch.rsqrt(mean + 1e-5) * weight[part]
        return within((x - expected).abs().max().item(), 1e-5)

    return [
        Item("square_heads, scale_heads", norm_all_heads),
        Item("all_reduce", all_reduce),
        Item("gather_columns", gather_columns),
        Item("share_tokens", share_tokens),
    ]


def adapter_items(device: str) -> list[Item]:
    from lmi_core.ops.kernels.cuda import library

    def lora_add() -> dict[str, Any]:
        """Of five rows with one adapter."""
        x = randoms(device, 5, 256).bfloat16()
        a = randoms(device, 16, 256).bfloat16() / 16
        b = randoms(device, 96, 16).bfloat16() / 4
        table = AdapterTable(16)
        table.set(0, [[(DeviceWeight(a), DeviceWeight(b), 0)]])
        described = table.described(0)
        layout = np.dtype([("parts", "u8"), ("first_row", "i4"), ("num_rows", "i4")])
        tiles = np.array([(described.data_ptr(), 0, 5)], layout).view(np.uint8)
        num_splits = -(-256 // library.load().interface.numbers["LORA_SPLIT_INPUTS"])
        partials = torch.empty(5, num_splits, 3, 16, device=device)
        y = torch.zeros(5, 96, device=device)
        sizes = {"linear_id": 0, "num_inputs": 256, "num_outputs": 96, "max_rank": 16}
        packed = torch.from_numpy(tiles).to(device)
        given = {"x": x, "y": y, "partials": partials, "tiles": packed, "num_tiles": 1}
        library.call("lora_add", x, dtype=x.dtype, **given, **sizes)
        expected = (x.double() @ a.double().T).bfloat16().double() @ b.double().T
        largest = expected.abs().max()
        return within(((y - expected).abs().max() / largest).item(), ALLOWED["bf16"])

    return [Item("lora_add", lora_add)]
