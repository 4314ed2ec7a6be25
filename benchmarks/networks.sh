#!/usr/bin/env bash
# hotrec compare on several networks, all cases in turn in each: hosts are network namespaces of one
# machine, one rank in each or -g ranks, every link shaped to a rate both ways (see hosts.sh); and loopback.
#
#   benchmarks/networks.sh [-o DIR] [-n "NETWORK ..."] [-w "RANKS ..."] [-g RANKS] [-b "BATCH ..."]
#                          [-x CHOICE] [-k ROUNDS] [-c "CASE ..."] [-p] [hydra overrides of hotrec compare ...]
#
#   -o  directory of the JSON files, the page and the picture (default benchmarks/results/networks)
#   -n  loopback, or rates as tc writes them (default "loopback 10gbit 1gbit 250mbit")
#   -w  numbers of ranks (default "2 4")
#   -g  ranks of a host (default 1)
#   -b  samples per rank and step; conf/plans/<CHOICE>_b<BATCH>.yaml (default "2048 8192")
#   -x  the bench choice without its batch (default networks)
#   -k  timed blocks of each case (default: by batch and network, below 4 minutes for 2 ranks and
#       B = 2048)
#   -c  cases, names of the bench choice (default: all that it lists)
#   -p  only make the page from the files that are there
#
# Writes DIR/<network>-w<ranks>[-g<ranks of a host>]-b<batch>.json; files of other networks stay, and are on the page.
# Needs root (CAP_NET_ADMIN, CAP_SYS_ADMIN), ip and tc for the rates; skips those, saying so, where
# namespaces cannot be made. Environment: PYTHON, the interpreter (default: .venv, else python3).
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
. benchmarks/hosts.sh
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=1

output=benchmarks/results/networks
networks="loopback 10gbit 1gbit 250mbit"
worlds="2 4"
batches="2048 8192"
choice=networks
rounds=
per_host=1
cases=
page_only=
while getopts "o:n:w:g:b:x:k:c:p" option; do
  case $option in
    o) output=$OPTARG ;;
    n) networks=$OPTARG ;;
    w) worlds=$OPTARG ;;
    g) per_host=$OPTARG ;;
    b) batches=$OPTARG ;;
    x) choice=$OPTARG ;;
    k) rounds=$OPTARG ;;
    c) cases=$OPTARG ;;
    p) page_only=1 ;;
    *) exit 2 ;;
  esac
done
shift $((OPTIND - 1))

logs=$(mktemp -d)
clean_up_at_end "$logs"

# Blocks of each case: fewer where a step takes long.
default_rounds() {
  case $1 in
    loopback | 10gbit) if [ "$2" -le 2048 ]; then echo 8; else echo 4; fi ;;
    1gbit) if [ "$2" -le 2048 ]; then echo 6; else echo 3; fi ;;
    *) if [ "$2" -le 2048 ]; then echo 4; else echo 2; fi ;;
  esac
}

# measure NETWORK RANKS BATCH [hydra overrides ...]
measure() {
  local network=$1 ranks=$2 batch=$3 run_dir
  shift 3
  run_dir="runs/networks/$(date +%Y%m%d-%H%M%S)-$hosts_id-$network-w$ranks-b$batch"
  mkdir -p "$run_dir" "$output"
  local words=(-m hotrec compare "plans=${choice}_b$batch"
    "plans.rounds=${rounds:-$(default_rounds "$network" "$batch")}")
  if [ -n "$cases" ]; then words+=("plans.cases=[${cases// /,}]"); fi
  export HOTREC_RUN_DIR=$run_dir
  if [ "$network" = loopback ]; then
    "$(find_python)" -m torch.distributed.run --standalone --nproc-per-node "$ranks" \
      "${words[@]}" "plans.network=loopback" "$@" > "$logs/first" || return 1
  else
    if ! make_hosts "$network" "$((ranks / per_host))" 2> "$logs/hosts"; then
      echo "networks: skipped $network: $(tr '\n' ' ' < "$logs/hosts")" >&2
      remove_hosts
      return 0
    fi
    run_on_hosts "$logs" "$per_host" "${words[@]}" plans.interface=veth0 "plans.network=$network" "$@" \
      > "$logs/first" || return 1
    remove_hosts
  fi
  local hosts=
  if [ "$network" != loopback ] && [ "$per_host" -gt 1 ]; then hosts=-g$per_host; fi
  cp "$run_dir/compare.json" "$output/$network-w$ranks$hosts-b$batch.json"
}

if [ -z "$page_only" ]; then
  for network in $networks; do
    for ranks in $worlds; do
      for batch in $batches; do
        echo "networks: $network, $ranks ranks, B = $batch" >&2
        start=$SECONDS
        measure "$network" "$ranks" "$batch" "$@"
        echo "networks: $((SECONDS - start)) s" >&2
      done
    done
  done
fi
"$(find_python)" benchmarks/networks_page.py "$output"
