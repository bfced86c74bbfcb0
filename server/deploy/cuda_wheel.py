"""The wheel ``lmi-cuda``: the library of the CUDA kernels, for any Python, beside lmi-core's.

    python server/deploy/cuda_wheel.py build/cuda-all/liblmi_cuda.so dist

``lmi_core.ops.kernels.library_file`` finds it in the installed package. The wheel has lmi-core's
version, and its tag the oldest glibc that the library runs on; one that wants the C++ library of
the machine it was built on is for machines like that one only. The format is that of PEP 427.
"""

from __future__ import annotations

import base64
import hashlib
import platform
import re
import runpy
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_INIT = '"""The CUDA kernels of lmi-core, a shared library: see lmi_core.ops.kernels.cuda."""\n'


def tag_of(library: bytes) -> str:
    """What of the platform the library wants."""
    machine = platform.machine()
    versions = [int(minor) for minor in re.findall(rb"GLIBC_2\.(\d+)\b", library)]
    if b"libstdc++.so" in library or not versions:
        return f"py3-none-linux_{machine}"
    return f"py3-none-manylinux_2_{max(17, *versions)}_{machine}"


def build(library: Path, dist: Path) -> Path:
    """Write the wheel; returns its file."""
    version = runpy.run_path(str(ROOT / "lmi_core/version.py"))["__version__"]
    content = library.read_bytes()
    tag, info = tag_of(content), f"lmi_cuda-{version}.dist-info"
    metadata = (
        f"Metadata-Version: 2.1\nName: lmi-cuda\nVersion: {version}\n"
        "Summary: CUDA kernels of lmi-core\nLicense: Apache-2.0\n"
    )
    wheel = f"Wheel-Version: 1.0\nGenerator: lmi-core\nRoot-Is-Purelib: false\nTag: {tag}\n"
    files = {
        "lmi_cuda/__init__.py": _INIT.encode(),
        "lmi_cuda/liblmi_cuda.so": content,
        f"{info}/METADATA": metadata.encode(),
        f"{info}/WHEEL": wheel.encode(),
    }
    record = [f"{name},sha256={_digest(data)},{len(data)}\n" for name, data in files.items()]
    files[f"{info}/RECORD"] = "".join([*record, f"{info}/RECORD,,\n"]).encode()
    dist.mkdir(parents=True, exist_ok=True)
    target = dist / f"lmi_cuda-{version}-{tag}.whl"
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return target


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


if __name__ == "__main__":
    made = build(Path(sys.argv[1]), Path(sys.argv[2]))
    print(f"{made}: {made.stat().st_size / 2**20:.1f} MiB")
