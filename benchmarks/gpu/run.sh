#!/usr/bin/env bash
# Prove ddpopt on a device:  bash benchmarks/gpu/run.sh [cuda|cpu] [FOLDER] [OPTION...]
#
# Nothing has to be installed but torch and pytest; PYTHON names the interpreter. The page is written
# to FOLDER/gpu.md and FOLDER/gpu.json (default: build/gpu). `-m benchmarks.gpu --help` has options.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
device=${1:-cuda}
folder=$(realpath -m "${2:-$root/build/gpu}")
cd "$root"
export PYTHONPATH="$root/src:$root${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" -m benchmarks.gpu --device "$device" --output "$folder" "${@:3}"
