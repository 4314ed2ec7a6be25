#!/usr/bin/env bash
# Start the ranks of a hotrec command on this host with torchrun. With several hosts, run it on each.
#
#   launch/torchrun.sh [options] COMMAND [overrides]
#
#   launch/torchrun.sh --nproc-per-node 8 train experiment=criteo_kaggle
#
#   # on host-a, then the same on host-b with --node-rank 1
#   launch/torchrun.sh --nnodes 2 --node-rank 0 --rdzv-endpoint host-a:29500 --rdzv-id first-try \
#       --nproc-per-node 8 train experiment=criteo_kaggle
#
# Options:
#   --nproc-per-node N    ranks on this host; default: one per GPU, or 1 without GPUs
#   --nnodes N            hosts; default 1
#   --node-rank N         this host's number; host 0 has the rendezvous. By default torchrun compares
#                         host names, which fails if a host has several names
#   --rdzv-endpoint H:P   host 0's address and a free port there; needed with several hosts
#   --rdzv-id ID          name of this run, the same on all hosts, and of its directory, in which the
#                         same id continues it; needed with several hosts, by default --run-dir
#   --local-addr ADDR     this host's address for the others, if its name does not resolve
#   --max-restarts N      restart all ranks after a failure, up to N times; default 0
#   --shutdown-timeout S  seconds for ranks to save and exit after SIGTERM; torchrun's default 30
#   --run-dir DIR         the run's directory; default $HOTREC_RUN_DIR, else
#                         runs/<experiment or command>/<rdzv-id, by default time and process>
#   --python PYTHON       default: the checkout's .venv, else python3
#
# Environment variables of ranks on GPUs, besides those of torch and NCCL:
#   CUDA_MODULE_LOADING   EAGER with several ranks: all kernels are loaded when CUDA starts, so that no
#                         load blocks in the middle of an exchange; LAZY saves the memory
#   CUDA_DEVICE_MAX_CONNECTIONS
#                         hardware queues for streams; default 32
#   TORCH_FR_BUFFER_SIZE  collectives kept by the flight recorder; default 2000, 0 for none. When a
#                         rank is lost, the others write them to the run's flight_recorder/
# Each rank is bound to the cores of its GPU's NUMA node, among those that the launcher allows.
#
# torchrun replaces this script (exec), so signals reach it. The exit code is that of the rank that
# failed first, or 128 + n after signal n.
set -euo pipefail

fail() {
    printf 'launch/torchrun.sh: %s\n' "$*" >&2
    exit 2
}

count() { # name value least
    [[ $2 =~ ^[0-9]+$ ]] && (($2 >= $3)) || fail "$1: expected a number of at least $3, got '$2'."
}

checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
nnodes=1 nproc_per_node='' node_rank='' endpoint='' rdzv_id='' local_addr='' max_restarts=0
shutdown_timeout='' run_dir=${HOTREC_RUN_DIR:-} python=''

while (($# > 0)); do
    case $1 in
        -h | --help)
            sed -n '2,/^set -euo/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
            exit 0
            ;;
        --*=*)
            set -- "${1%%=*}" "${1#*=}" "${@:2}"
            continue
            ;;
        --*) (($# > 1)) || fail "$1: expected a value, got nothing. See --help." ;;
        *) break ;;
    esac
    case $1 in
        --nproc-per-node) nproc_per_node=$2 ;;
        --nnodes) nnodes=$2 ;;
        --node-rank) node_rank=$2 ;;
        --rdzv-endpoint) endpoint=$2 ;;
        --rdzv-id) rdzv_id=$2 ;;
        --local-addr) local_addr=$2 ;;
        --max-restarts) max_restarts=$2 ;;
        --shutdown-timeout) shutdown_timeout=$2 ;;
        --run-dir) run_dir=$2 ;;
        --python) python=$2 ;;
        *) fail "option: expected one of those that --help lists, got '$1'." ;;
    esac
    shift 2
done

(($# > 0)) || fail "COMMAND: expected a hotrec command such as train, got nothing. See --help."
command=$1

if [ -z "$nproc_per_node" ]; then
    nproc_per_node=$(nvidia-smi --list-gpus 2>/dev/null | wc -l || true)
    ((nproc_per_node > 0)) || nproc_per_node=1
fi
count --nproc-per-node "$nproc_per_node" 1
count --nnodes "$nnodes" 1
count --max-restarts "$max_restarts" 0
if ((nnodes > 1)) && [ -z "$endpoint" ]; then
    fail "--rdzv-endpoint: expected host:port of host 0 for $nnodes hosts, got nothing."
fi
rdzv_id=${rdzv_id:-${run_dir//\//-}} # torch names a directory by it
if [ -n "$endpoint" ] && [ -z "$rdzv_id" ]; then
    fail "--rdzv-id: expected a name of this run for all its hosts, got nothing."
fi
if [ -n "$node_rank" ]; then
    count --node-rank "$node_rank" 0
    ((node_rank < nnodes)) || fail "--node-rank: expected less than --nnodes=$nnodes, got $node_rank."
fi

if [ -z "$python" ]; then
    python=python3
    [ ! -x "$checkout/.venv/bin/python" ] || python=$checkout/.venv/bin/python
fi
command -v "$python" >/dev/null || fail "--python: expected an interpreter, got '$python'."

if [ -n "$run_dir" ]; then
    export HOTREC_RUN_DIR=$run_dir
fi

options=(--nnodes "$nnodes" --nproc-per-node "$nproc_per_node" --max-restarts "$max_restarts")
if ((nnodes == 1)) && [ -z "$endpoint" ]; then
    # All ranks are on this host. By default torchrun uses the host's own name, and if that does not
    # resolve (a container, a laptop) the ranks wait for minutes and fail.
    endpoint=localhost:0 local_addr=${local_addr:-localhost}
    [ -n "$rdzv_id" ] || rdzv_id=$(date +%Y%m%d-%H%M%S)-$$
fi
options+=(--rdzv-backend c10d --rdzv-endpoint "$endpoint" --rdzv-id "$rdzv_id")
if [ -n "$node_rank" ]; then
    options+=(--rdzv-conf "is_host=$([ "$node_rank" = 0 ] && echo true || echo false)")
fi
[ -z "$local_addr" ] || options+=(--local-addr "$local_addr")
[ -z "$shutdown_timeout" ] || options+=(--shutdown-timeout "$shutdown_timeout")

# By default torchrun sets 1, with a warning. Ranks share the cores of their host.
cores=$(nproc)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > nproc_per_node ? cores / nproc_per_node : 1))}

exec "$python" -m hotrec.cli.ranks "${options[@]}" -m hotrec "$@"
