#!/usr/bin/env bash
# Build the wheel, install it with the extra cpu into a bare environment by pip alone, and train with it,
# outside of the checkout: as someone would who has pip and no more.
#
# Environment: PYTHON, the interpreter of the environment; TORCH_INDEX, one more package index, for torch's
# CPU build (without it pip takes torch's CUDA build, 3 GB, which computes on the CPU as well).
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

"${PYTHON:-python3}" -m venv "$folder/venv"
pip=("$folder/venv/bin/python" -m pip --disable-pip-version-check)
"${pip[@]}" wheel --quiet --no-deps --wheel-dir "$folder" "$here"
wheel=$(echo "$folder"/hotrec-*.whl)
"${pip[@]}" install --quiet ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "$wheel[cpu]"

cd "$folder"
export PATH="$folder/venv/bin:$PATH" OMP_NUM_THREADS=1
unset PYTHONPATH
# One thing is missing, and the doctor names the command.
fix=$({ hotrec doctor 2>&1 || true; } | grep -o 'pip install --no-deps torchrec==[0-9.]*' | head -n 1)
echo "hotrec: $fix" >&2
$fix
hotrec doctor
hotrec --version
cp "$here"/examples/*.py .
torchrun --standalone --nproc-per-node 2 several_collections.py
for step in prepare profile "train launch.num_ranks=2"; do
    hotrec $step experiment=synthetic_smoke
done
