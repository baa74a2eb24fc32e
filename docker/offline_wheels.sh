#!/usr/bin/env bash
# Installs hybridrec with a whole stack on a machine without a network: fetch where there is one, carry, install.
#   docker/offline_wheels.sh fetch   cpu|cuda|npu FOLDER   downloads and builds every wheel into FOLDER
#   docker/offline_wheels.sh install cpu|cuda|npu FOLDER   makes .venv-offline from FOLDER alone
# PYTHON names the interpreter (default python3); both machines need the same version of it and the same processor.
set -euo pipefail
usage() { sed -n '2,5s/^# \{0,1\}//p' "$0" >&2; exit 2; }
[[ $# -eq 3 && $1 =~ ^(fetch|install)$ && $2 =~ ^(cpu|cuda|npu)$ ]] || usage
action=$1 stack=$2
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
mkdir -p "$3"
folder="$(cd "$3" && pwd)"
python="${PYTHON:-python3}"

if [[ $action == fetch ]]; then
    "$python" -m pip wheel --no-deps --wheel-dir "$folder" "$root"
    wanted=("$(ls -t "$folder"/hybridrec-*.whl | head -n 1)[$stack]")
    if [[ $stack != cuda ]]; then # the CUDA stack has fbgemm-gpu itself; the others have an empty stand-in
        "$python" -m pip wheel --no-deps --wheel-dir "$folder" "$root/device_backends/fbgemm_cpu"
        wanted+=("$(ls -t "$folder"/fbgemm_gpu-*.whl | head -n 1)")
    fi
    "$python" -m pip download --only-binary=:all: --dest "$folder" "${wanted[@]}"
else
    "$python" -m venv "$root/.venv-offline"
    "$root/.venv-offline/bin/python" -m pip install --no-index --find-links "$folder" "hybridrec[$stack]"
fi
