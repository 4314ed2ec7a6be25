#!/usr/bin/env bash
# Install the CUDA lock into a throw-away environment (8 GB of disk), import what it holds and look for
# CUDA kernels. No GPU and no driver are needed.
#
# The wheels bring CUDA's libraries, and torch looks for the driver only when a device is used; but
# fbgemm's CUDA build is linked with one library of the driver, NVIDIA's management library. Where there
# is no driver, a stub of it is made with the C compiler, as the CUDA toolkit has them: each of its
# functions returns NVML_ERROR_LIBRARY_NOT_FOUND.
#
# Environment: as in make_venv.sh.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=$(mktemp -d)
trap 'rm -rf "$venv"' EXIT

"$here/make_venv.sh" "$venv" cuda
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
if ! ldconfig -p | grep -q libnvidia-ml.so.1; then
    echo "hotrec: no driver here; libnvidia-ml.so.1 is a stub" >&2
    nm -D --undefined-only "$site/fbgemm_gpu/fbgemm_gpu_py.so" |
        sed -n 's/^ *U \(nvml[A-Za-z0-9_]*\)$/int \1(void) { return 12; }/p' |
        cc -shared -fPIC -Wl,-soname,libnvidia-ml.so.1 -o "$venv/lib/libnvidia-ml.so.1" -x c -
    export LD_LIBRARY_PATH="$venv/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
fi

# Out of the checkout, as in a program that uses hotrec.
cd "$venv"
bin/python - <<'PY'
import importlib.metadata

import fbgemm_gpu
import hotrec
import torch
import torchrec

print("hotrec: imported", hotrec.__name__, *(
    f"{name} {importlib.metadata.version(name)}" for name in ("torch", "torchrec", "fbgemm-gpu")
))
if torch.version.cuda is None:
    raise SystemExit(f"torch: expected the CUDA build, got {torch.__version__}.")
# The CPU build of fbgemm would import as well; it has no kernel for CUDA.
for name in ("block_bucketize_sparse_features", "permute_2D_sparse_data", "lxu_cache_lookup"):
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"fbgemm::{name}", "CUDA"):
        raise SystemExit(f"fbgemm::{name}: expected a CUDA kernel in {fbgemm_gpu.__file__}, got none.")
PY
bin/hotrec doctor
