#!/usr/bin/env bash
# benchmarks/prediction_grid.py on several networks: loopback, and two network namespaces joined by a
# veth pair that is shaped to a rate on both ends; with 2 and 4 ranks.
#
#   benchmarks/prediction_grid.sh [-o DIR] [-n "NETWORK ..."] [-w "RANKS ..."] [-p PIPELINE]
#
#   -o  directory of the JSON files, the page and the picture (default benchmarks/results/prediction)
#   -n  loopback, or rates as tc writes them (default "loopback 10gbit 1gbit 100mbit")
#   -w  numbers of ranks, even (default "2 4"); half of them in each namespace
#   -p  of hot and cold rows: sparse_dist (default) or look_ahead; a page holds one
#
# Needs root (CAP_NET_ADMIN, CAP_SYS_ADMIN), ip and tc for the rates; skips those, saying so, where
# namespaces cannot be made. Environment: PYTHON, the interpreter (default: .venv, else python3).
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
. benchmarks/hosts.sh
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

output=benchmarks/results/prediction
networks="loopback 10gbit 1gbit 100mbit"
worlds="2 4"
pipeline=sparse_dist
while getopts "o:n:w:p:" option; do
  case $option in
    o) output=$OPTARG ;;
    n) networks=$OPTARG ;;
    w) worlds=$OPTARG ;;
    p) pipeline=$OPTARG ;;
    *) exit 2 ;;
  esac
done

logs=$(mktemp -d)
clean_up_at_end "$logs"

for network in $networks; do
  for ranks in $worlds; do
    file=$output/$network-w$ranks.json
    echo "prediction_grid: $network, $ranks ranks" >&2
    if [ "$network" = loopback ]; then
      "$(find_python)" -m torch.distributed.run --standalone --nproc-per-node "$ranks" \
        benchmarks/prediction_grid.py --network "loopback of one host" --output "$file" \
        --pipeline "$pipeline"
      continue
    fi
    if ! make_hosts "$network" 2 2> "$logs/hosts"; then
      echo "prediction_grid: skipped $network: $(tr '\n' ' ' < "$logs/hosts")" >&2
      remove_hosts
      continue
    fi
    words=(--network "two namespaces, $network each way" --output "$file" --pipeline "$pipeline")
    if [ "$network" = 100mbit ]; then words+=(--rounds 4); fi
    run_on_hosts "$logs" $((ranks / 2)) benchmarks/prediction_grid.py "${words[@]}"
    remove_hosts
  done
done
"$(find_python)" benchmarks/prediction_grid.py --page "$output"
