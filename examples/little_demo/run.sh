#!/usr/bin/env bash
# Starts the Little Demo on this machine: run.sh [--ranks W] [other options, see run.sh --help]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

# The interpreter: HYBRIDREC_PYTHON, else the environment that `make demo` sets up, else what is active.
python="${HYBRIDREC_PYTHON:-}"
if [[ -z "$python" ]]; then
    python=python3
    [[ -x .venv/bin/python ]] && python=.venv/bin/python
fi

# torchrun has to know the number of processes before the program reads its options.
ranks=2
previous=""
for argument in "$@"; do
    case "$argument" in
        -h | --help) exec "$python" -m examples.little_demo --help ;;
        --ranks=*) ranks="${argument#--ranks=}" ;;
    esac
    [[ "$previous" == --ranks ]] && ranks="$argument"
    previous="$argument"
done
if [[ ! "$ranks" =~ ^[1-9][0-9]*$ ]]; then
    echo "run.sh: --ranks '$ranks' is not a number of processes. Pass 1 or more." >&2
    exit 2
fi

# All ranks are on this machine. gloo would look up the host's own name, which many containers cannot resolve.
export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}"
# torch's threads: batches are small, and losses repeat bit for bit only with a fixed number.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$python" -m torch.distributed.run --standalone --nproc-per-node="$ranks" -m examples.little_demo "$@"
