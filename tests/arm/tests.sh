#!/usr/bin/env bash
# make test-arm: builds for aarch64 and runs it under qemu. See README.md.
set -euo pipefail
cd "$(dirname "$0")/../.."
for tool in aarch64-linux-gnu-g++ qemu-aarch64 dpkg-deb; do
  if ! command -v "$tool" >/dev/null; then
    echo "no $tool: Arm is not tested here (apt install g++-aarch64-linux-gnu qemu-user)"
    exit 0
  fi
done
arm=$PWD/build/arm python=${PYTHON:-.venv/bin/python}
bin=$(dirname "$python")

PYTHON=$python bash tests/arm/environment.sh
"$bin/cmake" -S . -B "$arm/native" -GNinja "-DCMAKE_MAKE_PROGRAM=$bin/ninja" \
  -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
  -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ \
  "-DPython_EXECUTABLE=$python" "-DPython_INCLUDE_DIR=$arm/root/usr/include/python3.11" \
  "-DCMAKE_CXX_FLAGS=-isystem $arm/root/usr/include" \
  -DPYTHON_MODULE_EXTENSION=.cpython-311-aarch64-linux-gnu.so \
  "-Dpybind11_DIR=$("$python" -m pybind11 --cmakedir)" >"$arm/configure.log"
"$bin/cmake" --build "$arm/native" --target lmi_tests _native
cp "$arm/native/_native.cpython-311-aarch64-linux-gnu.so" lmi_core/

emulated_python() { # CPU, arguments
  local cpu=$1
  shift
  PYTHONHOME=$arm/root/usr PYTHONPATH=$PWD:$arm/site PYTHONDONTWRITEBYTECODE=1 \
    qemu-aarch64 -L "$arm/root" -cpu "$cpu" "$arm/root/usr/bin/python3.11" "$@"
}

# No dot products; those of bytes; those of bf16 and i8mm's, too.
while read -r cpu level; do
  qemu-aarch64 -L /usr/aarch64-linux-gnu -cpu "$cpu" "$arm/native/lmi_tests"
  got=$(emulated_python "$cpu" -c 'from lmi_core import _native; print(_native.default_instruction_set())' </dev/null)
  [ "$got" = "$level" ] || { echo "on $cpu the level is $got, not $level"; exit 1; }
done <<'CPUS'
cortex-a72 neon
neoverse-n1 neon_dotprod
max neon_bf16
CPUS

"$python" -m tests.arm.references "$arm/checkpoints"
LMI_TEST_CHECKPOINTS=$arm/checkpoints emulated_python max -m pytest -q -p no:cacheprovider \
  -p no:randomly --timeout 600 ${ARM_TESTS:-tests/arm/emulated.py tests/kernels tests/graph/test_argmax.py tests/common/test_cpu_info.py}
