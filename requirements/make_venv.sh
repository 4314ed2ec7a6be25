#!/usr/bin/env bash
# Make (or bring up to date) a virtual environment with one of the locks and hotrec in it.
#
#   requirements/make_venv.sh VENV [auto|cpu|cuda] [run|test|dev|pins]
#
# run: the lock and hotrec, editable (the default); test: and test.lock; dev: and dev.lock too; pins:
# the lock alone.
#
# Environment: PYTHON, the interpreter to use (else the first that works of 3.12, 3.11, 3.13);
# TORCH_INDEX, one more package index, for torch's CPU build; TORCH, the minor version of another torch
# than the pinned one, with its torchrec and fbgemm (requirements/README.md).
set -euo pipefail

venv=${1:?usage: make_venv.sh VENV [auto|cpu|cuda] [run|test|dev|pins]}
device=${2:-auto}
purpose=${3:-run}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

fail() {
    printf '%s\n' "$*" >&2
    exit 1
}

# A name on PATH may be a shim without a Python behind it, or a Python that cannot make an
# environment, so each candidate is run.
usable() {
    "$1" - >/dev/null 2>&1 <<'PY'
import ensurepip, sys, venv
sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PY
}

find_python() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        usable "$PYTHON" || fail "PYTHON: expected Python 3.11 to 3.13 with venv and ensurepip," \
            "got '$PYTHON' ($("$PYTHON" --version 2>&1 | head -n 1)). Name another, or install its venv package" \
            "(on Debian: apt-get install python3-venv)."
        printf '%s\n' "$PYTHON"
        return
    fi
    for candidate in python3.12 python3.11 python3.13 python3 python; do
        if command -v "$candidate" >/dev/null && usable "$candidate"; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    fail "python: expected 3.11, 3.12 or 3.13 with venv and ensurepip on PATH, got none that runs" \
        "(tried python3.12 python3.11 python3.13 python3 python). Install one (on Debian:" \
        "apt-get install python3 python3-venv) or name it: make PYTHON=/path/to/python3.12 ..."
}

case $device in
    auto) if nvidia-smi >/dev/null 2>&1; then device=cuda; else device=cpu; fi ;;
    cpu | cuda) ;;
    *) fail "DEVICE: expected auto, cpu or cuda, got '$device'." ;;
esac
case $purpose in
    run | test | dev | pins) ;;
    *) fail "purpose: expected run, test, dev or pins, got '$purpose'." ;;
esac
pair=${TORCH:+$here/torch-$TORCH.lock}
if [ -n "$pair" ] && [ ! -e "$pair" ]; then
    others=("$here"/torch-*.lock)
    others=("${others[@]##*/torch-}")
    fail "TORCH: expected one of ${others[*]%.lock}, or nothing for the pinned one, got '$TORCH'."
fi

if [ -e "$venv/bin/python" ] && ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    echo "hotrec: $venv is broken (its Python or pip does not run); making it again" >&2
    rm -rf "$venv"
fi
if [ ! -e "$venv/bin/python" ]; then
    python=$(find_python)
    echo "hotrec: making $venv with $("$python" --version)" >&2
    "$python" -m venv "$venv"
fi

pip() {
    "$venv/bin/python" -m pip install --disable-pip-version-check --no-deps \
        ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "$@"
}

# Install locks, with the versions of the pair where it has others. === keeps pip from a +cpu build of
# torch, which it would prefer wherever it sees one, when the CUDA build is wanted.
install() {
    local pins
    pins=$(awk -F== -v pair="$pair" -v device="$device" '
        BEGIN { while (pair && (getline < pair) > 0) pins[$1] = $0 }
        /^[^#]*==/ {
            pin = $1 in pins ? pins[$1] : $0
            if (device == "cuda" && $1 == "torch") sub("==", "===", pin)
            print pin
        }' "$@")
    pip -r <(printf '%s\n' "$pins")
}

# The two fbgemm packages fill one folder, so the other device's must go first.
case $device in
    cpu) other=fbgemm-gpu ;;
    cuda) other=fbgemm-gpu-cpu ;;
esac
if "$venv/bin/python" -m pip show -q "$other" 2>/dev/null; then
    "$venv/bin/python" -m pip uninstall -y "$other" fbgemm-gpu-cpu fbgemm-gpu
fi

echo "hotrec: installing the $device set (requirements/$device.lock${pair:+ with ${pair##*/}})" >&2
mapfile -t included < <(sed -n 's/^-r //p' "$here/$device.lock")
install "${included[@]/#/$here/}" "$here/$device.lock"
needs_cuda_libs=$("$venv/bin/python" -c '
import importlib.metadata
needs = importlib.metadata.requires("torch") or []
print(any(need.startswith(("nvidia-", "cuda-")) for need in needs))')
if [ "$device" = cpu ] && [ "$needs_cuda_libs" = True ]; then
    echo "hotrec: pip chose torch's CUDA build, which works here but needs its CUDA libraries (3 GB)." \
        "For the CPU build see TORCH_INDEX in requirements/README.md." >&2
    install "$here/cuda-libs.lock"
fi
case $purpose in
    test) install "$here/test.lock" ;;
    dev) install "$here/test.lock" "$here/dev.lock" ;;
esac
if [ "$purpose" != pins ]; then
    pip --editable "$here/.."
fi
