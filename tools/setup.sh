#!/usr/bin/env bash
# Installs Debian packages that are missing, and unpacks (does not install) the kernel for microVM guests. Idempotent; when nothing is missing it needs no network.
#   tools/setup.sh          to build and run
#   tools/setup.sh --test   also what the tests and checks need
set -euo pipefail
cd "$(dirname "$0")/.."
packages=(build-essential cmake ninja-build ccache libspdlog-dev libfmt-dev nlohmann-json3-dev libtomlplusplus-dev libcli11-dev
  libgtest-dev librapidcheck-dev libdnnl-dev libssl-dev libseccomp-dev libicu-dev zlib1g-dev libboost1.81-dev libxxhash-dev liburing-dev busybox-static
  qemu-system-x86 e2fsprogs python3 python3-venv)
[[ "${1:-}" == "--test" ]] && packages+=(qemu-utils clang clang-tidy clang-format libclang-rt-14-dev python3-jsonschema python3-numpy python3-torch libopenblas0-pthread tmux)
[[ "${1:-}" == "--test" ]] && ! command -v npm >/dev/null && packages+=(nodejs npm)
[[ "${1:-}" == "--test" ]] && ! command -v git >/dev/null && packages+=(git)

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

# The guests' kernel: Debian's own for virtual machines. Only its image and modules are taken out of the package; nothing
# of this host's way to boot changes. The program looks in the same places (src/sandbox/vm/kernel.cpp).
kernel=$HOME/.local/share/tidelock/kernel
((EUID == 0)) && kernel=/var/lib/tidelock/kernel
if ! compgen -G "$kernel/boot/vmlinuz-*cloud*" >/dev/null && ! compgen -G "/boot/vmlinuz-*cloud*" >/dev/null; then
  unpacked=$(mktemp -d)
  trap 'rm -rf "$unpacked"' EXIT
  chmod 755 "$unpacked"
  package=$(apt-cache depends linux-image-cloud-amd64 | awk '$1 == "Depends:" && /cloud/ { print $2; exit }')
  [[ -n "$package" ]] || { echo "setup: no package linux-image-cloud-amd64 is known; run apt-get update" >&2; exit 1; }
  echo "setup: unpacking $package to $kernel"
  (cd "$unpacked" && apt-get download -qq "$package" >/dev/null 2>&1 && dpkg-deb -x ./*.deb root)
  mkdir -p "$kernel"
  cp -r "$unpacked/root/boot" "$unpacked/root/lib" "$kernel/"
fi

tools/fetch_xgrammar.sh
[[ "${1:-}" != "--test" ]] || { tools/clients.sh && tools/fetch_llama.sh; }
