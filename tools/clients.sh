#!/usr/bin/env bash
# The official OpenAI and E2B clients that the servers are tested with, below build/clients, at the versions that tests/clients
# pins. Idempotent: when they are there, no network is needed.
set -euo pipefail
cd "$(dirname "$0")/.."
stamp=build/clients/installed
wanted=$(cat tests/clients/requirements.txt tests/clients/npm.txt)
[[ -f "$stamp" && "$(<"$stamp")" == "$wanted" ]] && exit
echo "setup: installing the OpenAI and E2B clients into build/clients"
rm -rf build/clients
mkdir -p build/clients
/usr/bin/python3 -m venv build/clients/python
build/clients/python/bin/pip install --quiet --disable-pip-version-check --no-deps -r tests/clients/requirements.txt
mapfile -t packages <tests/clients/npm.txt
npm install --prefix build/clients/node --silent --no-save --no-package-lock --no-audit --no-fund --ignore-scripts "${packages[@]}"
echo "$wanted" >"$stamp"
