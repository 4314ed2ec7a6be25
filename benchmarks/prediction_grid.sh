#!/usr/bin/env bash
# benchmarks/prediction_grid.py on several networks: loopback, and two network namespaces joined by a
# veth pair that is shaped to a rate on both ends; with 2 and 4 ranks.
#
#   benchmarks/prediction_grid.sh [-o DIR] [-n "NETWORK ..."] [-w "RANKS ..."]
#
#   -o  directory of the JSON files, the page and the picture (default benchmarks/results/prediction)
#   -n  loopback, or rates as tc writes them (default "loopback 10gbit 1gbit 100mbit")
#   -w  numbers of ranks, even (default "2 4"); half of them in each namespace
#
# Needs root (CAP_NET_ADMIN, CAP_SYS_ADMIN), ip and tc for the rates; skips those, saying so, where
# namespaces cannot be made. Environment: PYTHON, the interpreter (default: .venv, else python3).
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

output=benchmarks/results/prediction
networks="loopback 10gbit 1gbit 100mbit"
worlds="2 4"
while getopts "o:n:w:" option; do
  case $option in
    o) output=$OPTARG ;;
    n) networks=$OPTARG ;;
    w) worlds=$OPTARG ;;
    *) exit 2 ;;
  esac
done

python=${PYTHON:-}
if [ -z "$python" ]; then
  python=python3
  if [ -x .venv/bin/python ]; then python=.venv/bin/python; fi
fi

id="$$$((RANDOM % 1000))"
first="hotrec-$id-0"
second="hotrec-$id-1"
log=$(mktemp)
second_pid=

cleanup() {
  if [ -n "$second_pid" ]; then kill "$second_pid" 2> /dev/null || true; fi
  ip netns del "$first" 2> /dev/null || true
  ip netns del "$second" 2> /dev/null || true
  rm -f "$log"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

make_hosts() {
  ip netns add "$first" && ip netns add "$second" || return 1
  ip link add veth0 netns "$first" type veth peer name veth0 netns "$second" || return 1
  local host=1 namespace
  for namespace in "$first" "$second"; do
    ip -n "$namespace" address add "10.77.0.$host/24" dev veth0 || return 1
    ip -n "$namespace" link set veth0 up || return 1
    ip -n "$namespace" link set lo up || return 1
    tc -n "$namespace" qdisc add dev veth0 root tbf rate "$1" burst 256kb latency 50ms || return 1
    host=$((host + 1))
  done
}

# node RANK NAMESPACE RANKS_PER_HOST arguments ...
node() {
  local rank=$1 namespace=$2 local=$3
  shift 3
  exec ip netns exec "$namespace" env GLOO_SOCKET_IFNAME=veth0 \
    "$python" -m torch.distributed.run --nnodes 2 --node-rank "$rank" --nproc-per-node "$local" \
    --master-addr 10.77.0.1 --master-port 29500 benchmarks/prediction_grid.py "$@"
}

for network in $networks; do
  for ranks in $worlds; do
    file=$output/$network-w$ranks.json
    echo "prediction_grid: $network, $ranks ranks" >&2
    if [ "$network" = loopback ]; then
      "$python" -m torch.distributed.run --standalone --nproc-per-node "$ranks" \
        benchmarks/prediction_grid.py --network "loopback of one host" --output "$file"
      continue
    fi
    if ! make_hosts "$network" 2> "$log"; then
      echo "prediction_grid: skipped $network: $(tr '\n' ' ' < "$log")" >&2
      cleanup
      continue
    fi
    words=(--network "two namespaces, $network each way" --output "$file")
    if [ "$network" = 100mbit ]; then words+=(--rounds 4); fi
    node 1 "$second" $((ranks / 2)) "${words[@]}" > "$log" 2>&1 &
    second_pid=$!
    status=0
    (node 0 "$first" $((ranks / 2)) "${words[@]}") || status=$?
    if [ "$status" -ne 0 ]; then kill "$second_pid" 2> /dev/null || true; fi
    wait "$second_pid" || status=$?
    second_pid=
    if [ "$status" -ne 0 ]; then
      echo "prediction_grid: $network, $ranks ranks: exit code $status; the second host said:" >&2
      tail -n 40 "$log" >&2
      exit "$status"
    fi
    ip netns del "$first"
    ip netns del "$second"
  done
done
"$python" benchmarks/prediction_grid.py --page "$output"
