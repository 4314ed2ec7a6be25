"""Kills ranks at random moments: do the others report the right rank, and does a restart resume?

    python benchmarks/faults.py --kills 20 base sparse_dist

For each pipeline one undisturbed run on a small synthetic dataset, then ``--kills`` runs in which a
random rank gets SIGKILL (``--signal STOP``: SIGSTOP) at a random moment between the first
checkpoint and the last step, and the run is restarted. Prints a line for each kill on stderr, a
table at the end, and one JSON object as the last line on stdout. Exits with 1 if the killed rank
was not reported, or the restart did not recover.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

DATA = "experiment=synthetic_smoke"
NUM_STEPS, SAVE_EVERY = 60, 10
STEPS = [f"trainer.max_steps={NUM_STEPS}", "trainer.num_epochs=2"]
CADENCE = [f"trainer.save_every_steps={SAVE_EVERY}", "trainer.log_every_steps=1"]
LIMIT_S = 300


@dataclass(frozen=True)
class Kill:
    """The result of one kill.

    Args:
        step: that was logged last when the signal was sent.
        ended_s: from the signal to the end of the last other rank.
        named: the message names the rank that was killed, and no other.
        staged: it says in which step and stage that rank was seen last.
        stage: that stage, in the message's words.
        resumed: the restarted run ended with the loss of the undisturbed one, bit for bit.
    """

    pipeline: str
    rank: int
    step: int
    ended_s: float
    named: bool
    staged: bool
    stage: str
    resumed: bool


def variables(run_dir: Path | None = None) -> dict[str, str]:
    kept = {**os.environ, "OMP_NUM_THREADS": "1"}
    kept.pop("HOTREC_RUN_DIR", None)
    return kept | ({} if run_dir is None else {"HOTREC_RUN_DIR": str(run_dir)})


def hotrec(*words: str, folder: Path, run_dir: Path | None = None) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hotrec", *words],
        cwd=folder,
        env=variables(run_dir),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    if done.returncode != 0:
        raise RuntimeError(f"hotrec {' '.join(words)}: exit code {done.returncode}\n{done.stderr}")


def train_words(pipeline: str, args: argparse.Namespace) -> list[str]:
    return [
        *("train", DATA, f"pipeline={pipeline}", *STEPS, *CADENCE),
        *("placement=saved", f"trainer.watchdog_s={args.watchdog_s}", "trainer.eval_splits=[]"),
        *args.overrides,
    ]


def rank_processes(launcher: int) -> dict[int, int]:
    """Process ids of the ranks that a launcher has started, by rank."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) != launcher or fields[0] == "Z":
                continue
            environ = (folder / "environ").read_bytes()
        except (OSError, ValueError):
            continue  # it has ended meanwhile
        if rank := re.search(rb"(?:^|\0)RANK=(\d+)", environ):
            found[int(rank[1])] = int(folder.name)
    return found


def num_logged(run_dir: Path) -> int:
    metrics = run_dir / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


def wait_for_step(run_dir: Path, step: int, running: subprocess.Popen[str]) -> None:
    until_s = time.monotonic() + LIMIT_S
    while num_logged(run_dir) < step:
        if running.poll() is not None or time.monotonic() > until_s:
            raise RuntimeError(f"no step {step}: {running.communicate()[1]}")
        time.sleep(0.01)


def final_loss(run_dir: Path) -> float:
    summary = json.loads((run_dir / "summary.json").read_text())
    return float(summary["loss"])


def kill_once(
    pipeline: str, number: int, args: argparse.Namespace, folder: Path, loss: float
) -> Kill:
    run_dir = folder / "runs" / f"{pipeline}-{number}"
    rank = random.randrange(args.ranks)
    launcher = [sys.executable, "-m", "hotrec.cli.ranks", "--standalone"]
    launcher += ["--local-addr", "localhost", "--nproc-per-node", str(args.ranks)]
    running = subprocess.Popen(
        [*launcher, "-m", "hotrec", *train_words(pipeline, args)],
        cwd=folder,
        env=variables(run_dir),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for_step(run_dir, random.randrange(SAVE_EVERY + 1, NUM_STEPS - SAVE_EVERY), running)
        time.sleep(random.random() * 0.1)  # anywhere in a step
        step, processes = num_logged(run_dir), rank_processes(running.pid)
        os.kill(processes[rank], getattr(signal, f"SIG{args.signal}"))
        start_s = time.monotonic()
        while set(rank_processes(running.pid)) - {rank}:
            if time.monotonic() - start_s > LIMIT_S:
                break
            time.sleep(0.01)
        ended_s = time.monotonic() - start_s
        if args.signal == "STOP":
            os.kill(processes[rank], signal.SIGKILL)  # else torchrun does, after half a minute
        _, err = running.communicate(timeout=LIMIT_S)
    finally:
        for process in rank_processes(running.pid).values():
            os.kill(process, signal.SIGKILL)
        running.kill()
    pattern = r"rank (\d+) \(process \d+ on \S+\) (?:has died|for \d+ s).*?last seen (.*?);"
    found = re.findall(pattern, err)
    stages = [re.sub(r"^.*? in |, at \S+:\d+ .*", "", stage) for _, stage in found]
    named = bool(found) and {int(told) for told, _ in found} == {rank}
    if not named:
        print(err, file=sys.stderr)
    hotrec(
        *train_words(pipeline, args),
        f"launch.num_ranks={args.ranks}",
        folder=folder,
        run_dir=run_dir,
    )
    return Kill(
        pipeline=pipeline,
        rank=rank,
        step=step,
        ended_s=ended_s,
        named=named,
        staged=bool(stages) and all(re.search(r"step \d+", stage) for stage in stages),
        stage=stages[0] if stages else "",
        resumed=final_loss(run_dir) == loss,
    )


def table(kills: Sequence[Kill]) -> str:
    lines = [
        "| pipeline | kills | others ended within s, median and most | rank named | stage named "
        "| resumed equal |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for pipeline in dict.fromkeys(kill.pipeline for kill in kills):
        own = [kill for kill in kills if kill.pipeline == pipeline]
        ended_s = sorted(kill.ended_s for kill in own)
        lines.append(
            f"| {pipeline} | {len(own)} | {ended_s[len(own) // 2]:.1f}, {ended_s[-1]:.1f} | "
            f"{sum(kill.named for kill in own)} | {sum(kill.staged for kill in own)} | "
            f"{sum(kill.resumed for kill in own)} |"
        )
    return "\n".join(lines)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Kill ranks at random moments.")
    parser.add_argument("pipelines", nargs="*", default=["base", "sparse_dist", "look_ahead"])
    parser.add_argument("--kills", type=int, default=20, help="of each pipeline")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--signal", choices=["KILL", "STOP"], default="KILL")
    parser.add_argument("--watchdog-s", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--overrides", nargs="*", default=[], help="more overrides for hotrec train; must come last"
    )
    return parser.parse_args()


def main() -> int:
    args = parsed()
    random.seed(args.seed)
    kills = []
    with tempfile.TemporaryDirectory(prefix="hotrec-faults-") as name:
        folder = Path(name)
        hotrec("prepare", DATA, folder=folder)
        hotrec(
            *("plan", DATA, "placement=coverage", f"plan.world_size={args.ranks}"), folder=folder
        )
        for pipeline in args.pipelines:
            whole = folder / "runs" / f"{pipeline}-whole"
            hotrec(
                *train_words(pipeline, args),
                f"launch.num_ranks={args.ranks}",
                folder=folder,
                run_dir=whole,
            )
            for number in range(args.kills):
                kill = kill_once(pipeline, number, args, folder, final_loss(whole))
                kills.append(kill)
                print(kill, file=sys.stderr, flush=True)
    print(table(kills), file=sys.stderr)
    print(json.dumps({"signal": args.signal, "kills": [asdict(kill) for kill in kills]}))
    return 0 if all(kill.named and kill.staged and kill.resumed for kill in kills) else 1


if __name__ == "__main__":
    sys.exit(main())
