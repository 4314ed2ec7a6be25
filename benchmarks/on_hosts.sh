#!/usr/bin/env bash
# One command on several hosts: network namespaces of one machine, one rank in each, every link shaped
# to a rate both ways (see hosts.sh). The namespaces are made for it and are gone when it ends.
#
#   benchmarks/on_hosts.sh RATE NUMBER words ...     e.g. 1gbit 2 -m hotrec train experiment=quickstart
#
# Needs root (CAP_NET_ADMIN, CAP_SYS_ADMIN), ip and tc; exits with 77 and the reason where namespaces
# cannot be made. Environment: PYTHON, the interpreter (default: .venv, else python3).
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
. benchmarks/hosts.sh
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

rate=$1
number=$2
shift 2
logs=$(mktemp -d)
clean_up_at_end "$logs"
if ! make_hosts "$rate" "$number" 2> "$logs/hosts"; then
  echo "on_hosts: skipped: network namespaces cannot be made here: $(tr '\n' ' ' < "$logs/hosts")" >&2
  exit 77
fi
run_on_hosts "$logs" 1 "$@"
