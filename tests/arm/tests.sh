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
configure() {
  "$bin/cmake" -S . -B "$arm/build" -GNinja "-DCMAKE_MAKE_PROGRAM=$bin/ninja" -DCMAKE_SYSTEM_NAME=Linux \
    -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ "$@" >"$arm/configure.log"
}
mkdir -p "$arm"

configure -DLMI_PYTHON=OFF
"$bin/cmake" --build "$arm/build" --target lmi_tests
# A level that is named must be there, so that each processor is seen to have its own. First: no dot
# products; then those of bytes; then those of bf16 and i8mm's.
while read -r cpu level; do
  echo "$cpu, $level:"
  LMI_INSTRUCTION_SET=$level qemu-aarch64 -L /usr/aarch64-linux-gnu -cpu "$cpu" \
    "$arm/build/lmi_tests"
done <<'CPUS'
cortex-a72 neon
neoverse-n1 neon_dotprod
max neon_bf16
CPUS
[ "${1-}" = python ] || exit 0

PYTHON=$python tests/arm/environment.sh
configure -DLMI_PYTHON=ON "-DPython_EXECUTABLE=$python" \
  "-DPython_INCLUDE_DIR=$arm/root/usr/include/python3.11" \
  -DPYTHON_MODULE_EXTENSION=.cpython-311-aarch64-linux-gnu.so \
  "-Dpybind11_DIR=$("$python" -m pybind11 --cmakedir)"
# Debian's pyconfig.h includes that of the processor from beside its own directory. Not by a flag: every
# file would be compiled anew for it.
CPLUS_INCLUDE_PATH=$arm/root/usr/include "$bin/cmake" --build "$arm/build" --target _native
cp "$arm/build/_native.cpython-311-aarch64-linux-gnu.so" lmi_core/
"$python" -m tests.arm.references "$arm/checkpoints"
PYTHONHOME=$arm/root/usr PYTHONPATH=$PWD:$arm/site PYTHONDONTWRITEBYTECODE=1 \
  LMI_TEST_CHECKPOINTS=$arm/checkpoints \
  qemu-aarch64 -L "$arm/root" -cpu max "$arm/root/usr/bin/python3.11" -m pytest -q \
  -p no:cacheprovider --timeout 900 \
  ${ARM_TESTS:-tests/arm/emulated.py tests/kernels/test_linear.py tests/kernels/test_attention.py}
