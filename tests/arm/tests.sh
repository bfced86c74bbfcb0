#!/usr/bin/env bash
# make test-arm: builds for aarch64 and runs it under qemu. See README.md.
#
#     tests/arm/tests.sh [python]
set -euo pipefail
cd "$(dirname "$0")/../.."
for tool in aarch64-linux-gnu-g++ qemu-aarch64; do
  if ! command -v "$tool" >/dev/null; then
    echo "no $tool: Arm is not tested here (apt install g++-aarch64-linux-gnu qemu-user)"
    exit 0
  fi
done
arm=$PWD/build/arm python=$PWD/.venv/bin/python
bin=$(dirname "$python")
configure=("$bin/cmake" -S . -GNinja "-DCMAKE_MAKE_PROGRAM=$bin/ninja" -DCMAKE_SYSTEM_NAME=Linux
  -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++)
mkdir -p "$arm"

"${configure[@]}" -B "$arm/cpp" -DLMI_PYTHON=OFF >"$arm/configure.log"
"$bin/cmake" --build "$arm/cpp" --target lmi_tests
# A level that is named must be there, so that each processor is seen to have its own. First: no dot
# products; then those of bytes; then those of bf16 and i8mm's.
while read -r cpu level; do
  echo "$cpu, $level:"
  LMI_INSTRUCTION_SET=$level qemu-aarch64 -L /usr/aarch64-linux-gnu -cpu "$cpu" \
    "$arm/cpp/lmi_tests" "${ARM_CPP_TESTS-linears}"
done <<'CPUS'
cortex-a72 neon
neoverse-n1 neon_dotprod
max neon_bf16
CPUS
[ "${1-}" = python ] || exit 0

PYTHON=$python tests/arm/environment.sh
"${configure[@]}" -B "$arm/native" "-DPython_EXECUTABLE=$python" \
  "-DPython_INCLUDE_DIR=$arm/root/usr/include/python3.11" \
  "-DCMAKE_CXX_FLAGS=-isystem $arm/root/usr/include" \
  -DPYTHON_MODULE_EXTENSION=.cpython-311-aarch64-linux-gnu.so \
  "-Dpybind11_DIR=$("$python" -m pybind11 --cmakedir)" >"$arm/configure.log"
"$bin/cmake" --build "$arm/native" --target _native
cp "$arm/native/_native.cpython-311-aarch64-linux-gnu.so" lmi_core/
"$python" -m tests.arm.references "$arm/checkpoints"
PYTHONHOME=$arm/root/usr PYTHONPATH=$PWD:$arm/site PYTHONDONTWRITEBYTECODE=1 \
  LMI_TEST_CHECKPOINTS=$arm/checkpoints \
  qemu-aarch64 -L "$arm/root" -cpu max "$arm/root/usr/bin/python3.11" -m pytest -q \
  -p no:cacheprovider --timeout 900 \
  ${ARM_TESTS:-tests/arm/emulated.py tests/kernels/test_linear.py tests/kernels/test_attention.py}
