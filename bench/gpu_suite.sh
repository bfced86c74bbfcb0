#!/usr/bin/env bash
# GPU tests and measurements in one go, in under 9 minutes, results as JSON in OUT:
#     bench/gpu_suite.sh OUT [--prebuilt liblmi_cuda.so] [--plan] [--only STAGE ...]
# Needs Python 3.12 (PYTHON, python3) with torch, numpy, tokenizers, safetensors, jinja2, pybind11,
# pytest, pytest-timeout, cmake and ninja, and nvcc for the project's own kernels, or --prebuilt; with aiohttp, msgspec
# and prometheus-client, starts are those of the server. Without a GPU,
# --device cpu --tiny runs the same stages on small shapes, to see whether they work.
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-python3}" -m bench.gpu "$@"
