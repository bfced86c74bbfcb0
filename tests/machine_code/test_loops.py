"""tests/machine_code/loops.py reads loops from what the disassembler prints."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
# A loop of five instructions with a product, one without, and one that holds both.
LISTING = """
		Function : _Z6kernelv
        /*0000*/                   S2R R0, SR_TID.X ;          /* 0x0000000000007919 */
                                                               /* 0x000fe40000000800 */
        /*0010*/                   LDG.E R2, desc[UR4][R4.64] ;    /* 0x0000000404027981 */
                                                               /* 0x000ea2000c1e1900 */
        /*0020*/                   HMMA.16816.F32.BF16 R8, R4, R2, R8 ;  /* 0x0000000204087218 */
                                                               /* 0x000ff60000041808 */
        /*0030*/                   VIADD R4, R4, 0x1 ;         /* 0x0000000104047836 */
                                                               /* 0x000fca0000000000 */
        /*0040*/              @!P0 BRA 0x10 ;                  /* 0xffffffc000f08947 */
                                                               /* 0x000fea000383ffff */
        /*0050*/                   FADD R6, R6, R8 ;           /* 0x0000000806067221 */
                                                               /* 0x000fe40000000000 */
        /*0060*/               @P1 BRA P2, 0x50 ;              /* 0xffffffc000f08947 */
                                                               /* 0x000fea000383ffff */
        /*0070*/               @P3 BRA 0x0 ;                   /* 0xffffffc000f08947 */
                                                               /* 0x000fea000383ffff */
"""


@pytest.fixture
def loops(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    import loops

    yield loops
    for name in ("loops",):
        sys.modules.pop(name, None)


def test_loops_with_products_are_found_and_counted(loops, monkeypatch):
    monkeypatch.setattr(loops, "find_disassembler", lambda: "cuobjdump")
    run = subprocess.run

    def disassemble(command, **options):
        if command[0] != "cuobjdump":
            return run(command, **options)
        return subprocess.CompletedProcess(command, 0, LISTING, "")

    monkeypatch.setattr(subprocess, "run", disassemble)
    kernels = loops.read_kernels(Path("kernel.cu.o"))
    assert list(kernels) == ["kernel"]
    assert [line.kind for line in kernels["kernel"]] == [
        "S2R", "LDG", "HMMA", "VIADD", "BRA", "FADD", "BRA", "BRA",
    ]  # fmt: skip
    found = loops.find_loops(kernels["kernel"])
    assert [[line.address for line in loop.body] for loop in found] == [[0x10, 0x20, 0x30, 0x40]]
    assert found[0].num_products == 1
    assert found[0].describe().startswith("    4 instructions,    22 cycles,    1 products: ")


def test_a_missing_disassembler_is_named(loops, monkeypatch):
    monkeypatch.setattr(loops.shutil, "which", lambda name: None)
    monkeypatch.setattr(loops, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="cuobjdump"):
        loops.find_disassembler()
