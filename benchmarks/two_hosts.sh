#!/usr/bin/env bash
# hotrec compare on two hosts: two network namespaces joined by a veth pair, shaped to a given rate on
# both ends, one torchrun node in each.
#
#   benchmarks/two_hosts.sh [-r RATE] [-o DIR] [-c "CASE ..."] [hydra overrides of hotrec compare ...]
#
#   -r  rate of the link as tc writes it (default 1gbit)
#   -o  directory of the pages, one per case (default benchmarks/results/two_hosts)
#   -c  choices of plans= (default "criteo_like_b2048 criteo_like_b8192")
#
# Needs root (CAP_NET_ADMIN, CAP_SYS_ADMIN), ip and tc; exits with 77 and the reason where namespaces
# cannot be made. The last line on stdout is one JSON object: by case, the figures of hotrec compare.
# Environment: PYTHON, the interpreter (default: the project's .venv, else python3).
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
. benchmarks/hosts.sh

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

for program in ip tc; do
  command -v "$program" > /dev/null || skip "expected the program $program (iproute2), got none"
done

logs=$(mktemp -d)
clean_up_at_end "$logs"

make_hosts "$rate" 2 2> "$logs/hosts" \
  || skip "network namespaces cannot be made here: $(tr '\n' ' ' < "$logs/hosts")"

echo "two_hosts: namespaces ${host_names[*]}, $rate each way" >&2

mkdir -p "$output"
figures=()
for case in $cases; do
  run_dir="runs/two_hosts/$(date +%Y%m%d-%H%M%S)-$hosts_id-$case"
  mkdir -p "$run_dir"
  HOTREC_RUN_DIR=$run_dir run_on_hosts "$logs" 1 -m hotrec compare "plans=$case" \
    plans.interface=veth0 "plans.page=$output/$case.md" \
    "plans.network='two network namespaces of one machine, veth pair shaped to $rate each way'" \
    "$@" > "$logs/first" || {
    status=$?
    echo "two_hosts: $case failed with exit code $status" >&2
    exit "$status"
  }
  figures+=("\"$case\": $(tail -n 1 "$logs/first")")
  echo "two_hosts: page: $output/$case.md" >&2
done
(IFS=,; printf '{%s}\n' "${figures[*]}")
