#!/usr/bin/env bash
# GPU tests and measurements in one go, in under 9 minutes, results as JSON in OUT and as one archive:
#     bench/gpu_suite.sh OUT [--prebuilt liblmi_cuda.so] [--plan] [--dry-run] [--only STAGE ...]
# Needs Python 3.11 or newer (PYTHON, python3) with torch, numpy, tokenizers, safetensors, jinja2,
# pybind11, pytest, pytest-timeout, transformers and jsonschema for the tests, cmake and ninja, and
# nvcc for the project's own kernels, or --prebuilt; with aiohttp, msgspec and prometheus-client,
# starts are those of the server; with llguidance, there are grammars. What is missing is said first.
# --plan says what each stage tells and may take. --dry-run, without a GPU, runs every stage on small
# shapes, by torch on the CPU and by the emulator of a GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-python3}" -m bench.gpu "$@"
