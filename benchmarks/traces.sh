#!/usr/bin/env bash
# A picture of steps with and without look-ahead: hotrec train on two hosts (network namespaces) with
# profiler=trace, once for each pipeline, on the synthetic log with the tables of Criteo Kaggle.
#
#   benchmarks/traces.sh [-r RATE] [-o DIR] [hydra overrides of hotrec train ...]
#
#   -r  rate of the link as tc writes it (default 1gbit)
#   -o  directory of the picture (default benchmarks/results/traces)
#
# Prepares and profiles 300,000 samples of the log in data/ if that has not been done. Needs root, ip
# and tc; exits with 77 and the reason where namespaces cannot be made.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
source benchmarks/hosts.sh

rate=1gbit
output=benchmarks/results/traces
while getopts "r:o:" option; do
  case $option in
    r) rate=$OPTARG ;;
    o) output=$OPTARG ;;
    *) exit 2 ;;
  esac
done
shift $((OPTIND - 1))

logs=$(mktemp -d)
clean_up_at_end "$logs"

export PYTHONPATH=${PYTHONPATH:-$PWD} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
python=$(find_python)
data=(experiment=synthetic_criteo_like dataset_name=traces data.synthetic.num_train=300000
  data.synthetic.num_valid=10000 data.synthetic.num_test=10000)
if [ ! -d data/traces/profile ]; then
  "$python" -m hotrec prepare "${data[@]}" > /dev/null
  "$python" -m hotrec profile "${data[@]}" > /dev/null
fi

make_hosts "$rate" 2 2> "$logs/hosts" || {
  echo "traces: skipped: namespaces cannot be made here: $(tr '\n' ' ' < "$logs/hosts")" >&2
  exit 77
}
mkdir -p "$output"
traces=()
for pipeline in sparse_dist look_ahead; do
  run_dir="runs/traces/$(date +%Y%m%d-%H%M%S)-$hosts_id-$pipeline"
  mkdir -p "$run_dir"
  HOTREC_RUN_DIR=$run_dir run_on_hosts "$logs" 1 -m hotrec train "${data[@]}" \
    placement=all_cold "pipeline=$pipeline" profiler=trace profiler.num_steps=8 \
    trainer.max_steps=40 "trainer.eval_splits=[]" "$@" > "$logs/first"
  traces+=("$pipeline=$run_dir/traces/rank0.json.gz")
done
"$python" benchmarks/trace_picture.py -o "$output/traces-$rate.png" "${traces[@]}"
