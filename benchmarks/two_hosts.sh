#!/usr/bin/env bash
# hotrec bench on two hosts: two network namespaces joined by a veth pair, shaped to a given rate on
# both ends, one torchrun node in each.
#
#   benchmarks/two_hosts.sh [-r RATE] [-o DIR] [-c "CASE ..."] [hydra overrides of hotrec bench ...]
#
#   -r  rate of the link as tc writes it (default 1gbit)
#   -o  directory of the pages, one per case (default benchmarks/results/two_hosts)
#   -c  choices of bench= (default "criteo_like_b2048 criteo_like_b8192")
#
# Needs root (CAP_NET_ADMIN, CAP_SYS_ADMIN), ip and tc; exits with 77 and the reason where namespaces
# cannot be made. The last line on stdout is one JSON object: by case, the figures of hotrec bench.
# Environment: PYTHON, the interpreter (default: the project's .venv, else python3).
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."

skip() {
  echo "two_hosts: skipped: $1" >&2
  exit 77
}

rate=1gbit
output=benchmarks/results/two_hosts
cases="criteo_like_b2048 criteo_like_b8192"
while getopts "r:o:c:" option; do
  case $option in
    r) rate=$OPTARG ;;
    o) output=$OPTARG ;;
    c) cases=$OPTARG ;;
    *) exit 2 ;;
  esac
done
shift $((OPTIND - 1))

python=${PYTHON:-}
if [ -z "$python" ]; then
  python=python3
  if [ -x .venv/bin/python ]; then python=.venv/bin/python; fi
fi

for program in ip tc; do
  command -v "$program" > /dev/null || skip "expected the program $program (iproute2), got none"
done

# Unique names: runs side by side must not meet.
id="$$$((RANDOM % 1000))"
first="hotrec-$id-0"
second="hotrec-$id-1"
logs=$(mktemp -d)
second_pid=

cleanup() {
  if [ -n "$second_pid" ]; then kill "$second_pid" 2> /dev/null || true; fi
  # Deleting a namespace deletes its end of the pair, and with it the other end.
  ip netns del "$first" 2> /dev/null || true
  ip netns del "$second" 2> /dev/null || true
  rm -rf "$logs"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

make_hosts() {
  ip netns add "$first" && ip netns add "$second" || return 1
  # Each end is made inside its namespace, so the name is free in both.
  ip link add veth0 netns "$first" type veth peer name veth0 netns "$second" || return 1
  local host=1 namespace
  for namespace in "$first" "$second"; do
    ip -n "$namespace" address add "10.77.0.$host/24" dev veth0 || return 1
    ip -n "$namespace" link set veth0 up || return 1
    ip -n "$namespace" link set lo up || return 1
    tc -n "$namespace" qdisc add dev veth0 root tbf rate "$rate" burst 256kb latency 50ms || return 1
    host=$((host + 1))
  done
}
make_hosts 2> "$logs/hosts" \
  || skip "network namespaces cannot be made here: $(tr '\n' ' ' < "$logs/hosts")"

# node RANK NAMESPACE CASE RUN_DIR [overrides ...]
node() {
  local rank=$1 namespace=$2 case=$3 run_dir=$4
  shift 4
  exec ip netns exec "$namespace" env \
    GLOO_SOCKET_IFNAME=veth0 \
    OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" \
    HOTREC_RUN_DIR="$run_dir" \
    "$python" -m torch.distributed.run --nnodes 2 --node-rank "$rank" --nproc-per-node 1 \
    --master-addr 10.77.0.1 --master-port 29500 \
    -m hotrec bench "bench=$case" bench.interface=veth0 \
    "bench.network='two network namespaces of one machine, veth pair shaped to $rate each way'" "$@"
}

echo "two_hosts: namespaces $first and $second, $rate each way" >&2

mkdir -p "$output"
figures=()
for case in $cases; do
  run_dir="runs/two_hosts/$(date +%Y%m%d-%H%M%S)-$id-$case"
  mkdir -p "$run_dir"
  node 1 "$second" "$case" "$run_dir" "$@" > "$logs/second" 2>&1 &
  second_pid=$!
  status=0
  (node 0 "$first" "$case" "$run_dir" "bench.page=$output/$case.md" "$@") \
    > "$logs/first" || status=$?
  # Without its peer the second host would wait for it.
  if [ "$status" -ne 0 ]; then kill "$second_pid" 2> /dev/null || true; fi
  wait "$second_pid" || status=$?
  second_pid=
  if [ "$status" -ne 0 ]; then
    echo "two_hosts: $case failed with exit code $status; the second host said:" >&2
    tail -n 40 "$logs/second" >&2
    exit "$status"
  fi
  figures+=("\"$case\": $(tail -n 1 "$logs/first")")
  echo "two_hosts: page: $output/$case.md" >&2
done
(IFS=,; printf '{%s}\n' "${figures[*]}")
