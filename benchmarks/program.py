"""Compares a TorchRec program that uses hotrec with the same program without it.

    python benchmarks/program.py [--rate 1gbit] [--batch 2048] [--steps 100] [--rounds 3]

Alternates runs of examples/dlrm.py and examples/dlrm_torchrec.py on two hosts: network namespaces
of one machine with one rank each, the link shaped to the rate (needs root, ip and tc); "loopback":
both ranks on this host. Prints the median step of each, over the rounds, after the first 20 steps;
the last line on stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROGRAMS = ("dlrm", "dlrm_torchrec")
NUM_SKIPPED = 20


def run_program(name: str, batch_size: int, num_steps: int) -> None:
    """Run an example on this rank; rank 0 prints its median step in seconds."""
    sys.path.insert(0, str(ROOT / "examples"))
    program = importlib.import_module(name)
    program.BATCH_SIZE, program.NUM_BATCHES = batch_size, num_steps + NUM_SKIPPED + 1
    times: list[float] = []
    program.print = lambda *_: times.append(time.perf_counter())
    program.main()
    if times:
        steps = [b - a for a, b in zip(times, times[1:], strict=False)]
        print(json.dumps({"step_s": statistics.median(steps[NUM_SKIPPED:])}), flush=True)


def measure(name: str, rate: str, batch_size: int, num_steps: int) -> float:
    """The median step of a program on two ranks."""
    words = [str(Path(__file__)), "--program", name, "--batch", str(batch_size)]
    words += ["--steps", str(num_steps)]
    command = [str(ROOT / "benchmarks" / "on_hosts.sh"), rate, "2", *words]
    if rate == "loopback":
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command = [sys.executable, *launch, *words]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHON": sys.executable}
    variables["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, check=True)
    lines = [line for line in done.stdout.decode().splitlines() if line.startswith("{")]
    return float(json.loads(lines[-1])["step_s"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", default="1gbit", help="of the link, as tc writes it; loopback")
    parser.add_argument("--batch", type=int, default=2048, help="samples of a rank and step")
    parser.add_argument("--steps", type=int, default=100, help="timed steps of a run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--program", choices=PROGRAMS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.program:
        run_program(given.program, given.batch, given.steps)
        return
    found: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for _ in range(given.rounds):
        for name in PROGRAMS:
            found[name].append(measure(name, given.rate, given.batch, given.steps))
    medians = {name: statistics.median(steps) for name, steps in found.items()}
    for name, step_s in medians.items():
        print(f"{name}: {1e3 * step_s:.1f} ms per step at {given.rate}", file=sys.stderr)
    ratios = [a / b for a, b in zip(*found.values(), strict=True)]
    print(json.dumps({"rate": given.rate, "step_s": found, "ratio": statistics.median(ratios)}))


if __name__ == "__main__":
    main()
