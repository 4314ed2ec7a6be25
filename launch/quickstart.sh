#!/usr/bin/env bash
# The chain of commands on the click log that comes with the project: make quickstart.
#
#   launch/quickstart.sh [BIN]     BIN: directory of hotrec and python; default .venv/bin
#
# Trains twice with two ranks, the same model on the same batches: as planned by measured costs and a
# trial, and by TorchRec's own plan on unsplit tables, to compare with.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bin=${1:-.venv/bin}
run=runs/quickstart/$(date +%Y%m%d-%H%M%S)

say() { printf '\n== %s\n' "$*" >&2; }
# Each command's last line on stdout is for programs; people read stderr and the end of this script.
hotrec() { HOTREC_RUN_DIR=$run/$1 "$bin/hotrec" "${@:2}" experiment=quickstart >"$run/$1.json"; }
train() {
    launch/torchrun.sh --python "$bin/python" --nproc-per-node 2 --run-dir "$run/$1" \
        train experiment=quickstart "${@:2}" >"$run/$1.json"
}

mkdir -p "$run"
say "1/8 prepare: the log becomes memory-mapped chunks"
hotrec prepare prepare
say "2/8 profile: how often is each row looked up"
hotrec profile profile
say "3/8 calibrate: what does this machine take for each part of a step"
"$bin/hotrec" calibrate experiment=quickstart launch.num_ranks=2 >"$run/calibrate.json"
say "4/8 plan: which rows are hot and which pipeline trains, by predicted time"
hotrec plan plan plan.world_size=2
say "5/8 train with two ranks: what a short trial finds to be fastest"
train hotcold
say "6/8 train with two ranks: TorchRec's own plan on unsplit tables"
train torchrec placement=torchrec
say "7/8 evaluate the checkpoint on the held-out days"
"$bin/hotrec" evaluate run_dir="$run/hotcold" launch.num_ranks=2 >"$run/evaluate.json"
say "8/8 report"
"$bin/hotrec" report "runs=[$run/hotcold,$run/torchrec]" output="$run/report" baseline=torchrec \
    >"$run/report.json"

say "done"
"$bin/python" - "$run" "$bin" <<'PY'
import json
import sys
from pathlib import Path

run, programs = map(Path, sys.argv[1:])
plan, ours, theirs, test = (
    json.loads((run / f"{name}.json").read_text().splitlines()[-1])
    for name in ("plan", "hotcold", "torchrec", "evaluate")
)
trained = json.loads((run / "hotcold" / "prediction.json").read_text())
report = json.loads((run / "report" / "report.json").read_text())
sent, sent_by_torchrec = ours["sent_bytes_total"], theirs["sent_bytes_total"]
print(f"predicted                  {plan['why']}")
print(f"chosen                     {trained['why']}")
for sentence in report["verdict"]:
    print(f"measured                   {sentence}")
print(f"AUC on the held-out days   {test['auc']:.4f} (TorchRec's plan: {theirs['auc']:.4f})")
print(f"hot rows                   {ours['hot_rows']:,} of {ours['total_rows']:,} "
      f"({ours['hot_rows_frac']:.1%}), which take {ours['hot_lookup_frac']:.1%} of the lookups")
change = sent / sent_by_torchrec - 1
print(f"sent per rank and step     {sent / 1e6:.2f} MB, {abs(change):.0%} "
      f"{'more' if change > 0 else 'less'} than TorchRec's plan ({sent_by_torchrec / 1e6:.2f} MB)")
print(f"report                     {run / 'report' / 'report.html'}")
print(f"next                       {programs}/hotrec train --help; docs/your_own_data.md")
PY
