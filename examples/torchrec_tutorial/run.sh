#!/usr/bin/env bash
# Runs the tutorial on this machine, on two processes.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"

# The interpreter: HYBRIDREC_PYTHON, else the environment that `make tutorial` sets up, else what is active.
python="${HYBRIDREC_PYTHON:-}"
if [[ -z "$python" ]]; then
    python=python3
    [[ -x "$root/.venv/bin/python" ]] && python="$root/.venv/bin/python"
fi

# The tutorial is found in this checkout, and nothing in the folder where it is started takes its place.
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONSAFEPATH=1
# All ranks are on this machine. gloo would look up the host's own name, which many containers cannot resolve.
export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}"
# torch's threads: results repeat bit for bit only with a fixed number.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$python" -m examples.torchrec_tutorial "$@"
