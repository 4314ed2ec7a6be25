#!/usr/bin/env bash
# Proof and figures from one GPU in half an hour: ten stages, each with a JSON document and a page.
#
#   benchmarks/gpu_day.sh [--stages 0,2] [--out DIR] [--archive FILE] [--from ARCHIVE] [--rehearse]
#
# hotrec need not be installed: packages brought as wheels come from PYTHONPATH, and hotrec from
# this checkout. benchmarks/README.md says how to bring them, and what comes out.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# Absolute: stages start commands in directories of their own.
paths=
IFS=: read -ra given <<<"${PYTHONPATH:-}"
for path in ${given[@]+"${given[@]}"}; do
    [[ -z $path ]] || paths+=$(realpath -m "$path"):
done
export PYTHONPATH=$paths$root PYTHONUNBUFFERED=1
exec "${PYTHON:-python3}" -m benchmarks.gpu_day "$@"
