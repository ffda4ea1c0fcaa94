#!/usr/bin/env bash
# Installs Debian packages that are missing. Idempotent; when nothing is missing it needs no network.
#   tools/setup.sh          to build and run
#   tools/setup.sh --test   also what the tests and checks need
set -euo pipefail
cd "$(dirname "$0")/.."
packages=(build-essential cmake ninja-build ccache libspdlog-dev libfmt-dev nlohmann-json3-dev libtomlplusplus-dev libcli11-dev
  libgtest-dev librapidcheck-dev libdnnl-dev libssl-dev libseccomp-dev libicu-dev libboost1.81-dev busybox-static)
[[ "${1:-}" == "--test" ]] && packages+=(clang clang-tidy clang-format libclang-rt-14-dev python3 python3-numpy python3-torch libopenblas0-pthread tmux)
[[ "${1:-}" == "--test" ]] && packages+=(python3-venv)
[[ "${1:-}" == "--test" ]] && ! command -v npm >/dev/null && packages+=(nodejs npm)

missing=()
for package in "${packages[@]}"; do
  [[ "$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null)" == installed ]] || missing+=("$package")
done
if ((${#missing[@]})); then
  sudo=()
  if ((EUID != 0)); then
    command -v sudo >/dev/null || { echo "setup: root or sudo is needed to install: ${missing[*]}" >&2; exit 1; }
    sudo=(sudo)
  fi
  echo "setup: installing ${missing[*]}"
  "${sudo[@]}" apt-get update -qq
  DEBIAN_FRONTEND=noninteractive "${sudo[@]}" apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi
[[ "${1:-}" != "--test" ]] || tools/clients.sh
