#!/usr/bin/env bash
# What the tests run in: an aarch64 Python 3.11 of Debian's packages below build/arm/root, and what
# they import in build/arm/site. Fetched once; nothing is installed on this machine.
set -euo pipefail
cd "$(dirname "$0")/../.."
arm=$PWD/build/arm
[ -e "$arm/.ready" ] && exit 0
mkdir -p "$arm/apt/lists/partial" "$arm/apt/cache/archives/partial" "$arm/debs" "$arm/root" "$arm/site"

# Lists and a status file of its own, so that apt knows of no other architecture but Arm's.
: >"$arm/apt/status"
cat >"$arm/apt/sources.list" <<'SOURCES'
deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian bookworm main
SOURCES
apt=(apt-get -qq -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o APT::Sandbox::User=
  -o "Dir::Etc::SourceList=$arm/apt/sources.list" -o Dir::Etc::SourceParts=/dev/null
  -o "Dir::State::status=$arm/apt/status" -o "Dir::State::Lists=$arm/apt/lists"
  -o "Dir::Cache=$arm/apt/cache")
"${apt[@]}" update
(cd "$arm/debs" && "${apt[@]}" download libc6 libgcc-s1 libstdc++6 libgomp1 zlib1g libexpat1 libssl3 libffi8 \
  libbz2-1.0 liblzma5 libsqlite3-0 libuuid1 libcrypt1 python3.11-minimal libpython3.11-minimal \
  libpython3.11-stdlib libpython3.11-dev)
for package in "$arm"/debs/*.deb; do dpkg-deb -x "$package" "$arm/root"; done

# What lmi_core imports of pyproject.toml, and pytest, as wheels for Arm.
"${PYTHON:-python3}" -m pip install --quiet --target "$arm/site" --python-version 3.11 --only-binary=:all: \
  --platform manylinux2014_aarch64 --platform manylinux_2_28_aarch64 \
  numpy safetensors tokenizers jinja2 msgspec pytest pytest-timeout hypothesis
touch "$arm/.ready"
