"""SIGKILL at random moments of every stage; the same command, started again, must make it good.

Half of the kills wait for a hidden directory, so that they fall into writing and renaming. The old
artifact stays at its place, so a kill may cost it or leave half of a new one.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults import workspace
from tests.faults.case import Case, Made, works
from tests.faults.judge import Findings, judge_latest, list_files, read_figures
from tests.faults.process import (
    Running,
    adopt_orphans,
    can_mount,
    descendants,
    end_descendants,
    isolate_mounts,
    start,
)
from tests.faults.run import (
    Result,
    fork_into,
    import_program,
    make_workspace,
    remove,
    take_answer,
    work_directory,
)
from tests.faults.workspace import (
    EVALUATE,
    PARTITION,
    PLAN,
    PREDICT,
    PREPARE,
    PROFILE,
    PROFILED,
    SERVED,
    TRAIN,
)

RUN = "runs/killed"
LOG, FIGURES = "data/large/dataset", "figures.json"
LARGE = f"{PREPARE} data.synthetic.num_train=200000 data.synthetic.rows_per_chunk=20000"
STEPS = f"{TRAIN} trainer.max_steps=16 trainer.num_epochs=4 trainer.save_every_steps=2"


def _same_quality(made: Made) -> str | None:
    expected = read_figures((made.reference / FIGURES).read_text())[-1]
    differing = [
        name for name in ("auc", "log_loss", "step") if made.figures[-1][name] != expected[name]
    ]
    return f"{differing} differ from an undisturbed evaluation" if differing else None


@dataclass(frozen=True)
class Stage:
    """A command that is killed.

    Args:
        watched: the hidden directories that show that it writes.
        weight: how often it is chosen.
    """

    case: Case
    watched: str
    weight: int = 1


def _stages() -> list[Stage]:
    run = workspace.in_run(RUN)
    artifacts = [
        ("prepare", f"{LARGE} paths.dataset={LOG}", LOG),
        ("profile", PROFILE, PROFILED),
        ("plan", PLAN, PARTITION),
        ("export", f"export run_dir={workspace.ONE} output={SERVED}", SERVED),
        ("predict", PREDICT, "data/new/scores"),
    ]
    stages = [
        Stage(
            works(f"kill/{name}", words, check=workspace.same_artifact(output)), f"{output}/../.*"
        )
        for name, words, output in artifacts
    ]
    stages.append(Stage(works("kill/evaluate", EVALUATE, check=_same_quality), "runs/evaluate/*"))
    for ranks in (1, 2, 3):
        words = f"{STEPS} launch.num_ranks={ranks}"
        case = works(
            f"kill/train-{ranks}",
            words,
            check=workspace.same_run(RUN),
            variables=run,
            limit_s=120,
        )
        stages.append(Stage(case, f"{RUN}/checkpoints/.*", weight=2))
    return stages


def run_kills(times: int, *, seed: int | None, kept: Path | None = None, jobs: int = 2) -> int:
    """Kill so many times, print each, and a table at the end; 1 if any was not made good."""
    seed = random.SystemRandom().randrange(1 << 30) if seed is None else seed
    chooser = random.Random(seed)
    print(f"seed {seed}")
    import_program()
    stages = _stages()
    results: list[Result] = []
    with work_directory() as directory:
        reference = make_workspace(directory, kept)
        lasted = {stage.case.name: _undisturbed(stage, reference, directory) for stage in stages}
        drawn = chooser.choices(stages, [stage.weight for stage in stages], k=times)
        under_way: dict[int, tuple[Stage, Path]] = {}
        for number, stage in enumerate([*drawn, *[None] * jobs]):
            if len(under_way) == jobs or stage is None:
                if not under_way:
                    continue
                pid, _ = os.wait()
                while pid not in under_way:
                    pid, _ = os.wait()  # that was an orphan
                ended, answer = under_way.pop(pid)
                results.append(_report(ended, answer, len(results) + 1, times))
            if stage is not None:
                answer = directory / f"{number}.json"
                delay_s = chooser.uniform(0.0, lasted[stage.case.name])
                kill = _killing(stage, directory, number, delay_s, chooser.randrange(1 << 30))
                under_way[fork_into(kill, answer)] = stage, answer
    counts = Counter((result.name, result.verdict) for result in results)
    for (name, verdict), count in sorted(counts.items()):
        print(f"{name:16} {verdict:8} {count}")
    return int(any(result.verdict != "ok" for result in results))


def _report(stage: Stage, answer: Path, number: int, times: int) -> Result:
    try:
        result = take_answer(answer)
    except (RuntimeError, OSError) as error:
        result = Result(stage.case.name, "unclear", "", "", [f"the harness failed: {error}"], 0.0)
    assert result is not None
    print(
        f"{number:4}/{times} {result.verdict:8} {result.seconds:6.1f} s {result.name} {result.got}"
    )
    for reason in result.reasons:
        print(f"{'':14}{reason}", flush=True)
    return result


def _undisturbed(stage: Stage, reference: Path, directory: Path) -> float:
    """Run the stage in a copy of the workspace that stays for comparison; its seconds."""
    folder = _undisturbed_folder(stage, directory)
    workspace.copy(reference, folder)
    scratch = folder.with_name(f"{folder.name}-s")
    (scratch / "tmp").mkdir(parents=True)

    def run() -> Result | None:
        adopt_orphans()
        running = start(stage.case, stage.case.words[0], folder, scratch)
        if running.wait(stage.case.limit_s) != 0:
            raise RuntimeError(f"{stage.case.name}: {(scratch / 'err').read_text()}")
        return None

    start_s = time.monotonic()
    answer = directory / "undisturbed.json"
    os.waitpid(fork_into(run, answer), 0)
    take_answer(answer)
    (folder / FIGURES).write_text((scratch / "out").read_text())
    return time.monotonic() - start_s


def _undisturbed_folder(stage: Stage, directory: Path) -> Path:
    return directory / stage.case.name.replace("/", "-")


def _killing(
    stage: Stage, directory: Path, number: int, delay_s: float, seed: int
) -> Callable[[], Result]:
    return lambda: _kill_once(stage, directory, number, delay_s, random.Random(seed))


def _kill_once(
    stage: Stage, directory: Path, number: int, delay_s: float, chooser: random.Random
) -> Result:
    start_s = time.monotonic()
    adopt_orphans()
    folder, scratch = directory / str(number) / "ws", directory / str(number) / "s"
    workspace.copy(directory / "reference", folder)
    (scratch / "tmp").mkdir(parents=True)
    if can_mount():
        isolate_mounts(1 << 30, None, None)
    before = list_files(folder)
    running = start(stage.case, stage.case.words[0], folder, scratch)
    moment = _wait(stage, running, delay_s, chooser)
    killed = _kill_some(running, chooser)
    running.wait(45)
    left = running.left(20)
    findings = Findings()
    for command in left:
        findings.add("left", f"process: {command[:200]}")
    end_descendants()
    judge_latest(findings, folder, before)
    (scratch / "out").unlink(missing_ok=True)
    again = start(stage.case, stage.case.words[0], folder, scratch)
    code = again.wait(stage.case.limit_s)
    end_descendants()
    if code != 0:
        last = (scratch / "err").read_text().strip().splitlines()[-1:]
        findings.add("hang" if code is None else "unclear", f"again: exit code {code}, {last}")
    else:
        made = Made(
            folder,
            _undisturbed_folder(stage, directory),
            read_figures((scratch / "out").read_text()),
        )
        complaint = stage.case.check(made) if stage.case.check else None
        if complaint is not None:
            findings.add("silent", str(complaint))
        for path in [*folder.glob("data/*/.*"), *folder.glob("runs/*/checkpoints/.*")]:
            findings.add("left", f"{path.relative_to(folder)} stays after the second start")
    remove(folder.parent)
    reasons = [f"{verdict}: {text}" for verdict, text in findings.found]
    seconds = round(time.monotonic() - start_s, 1)
    return Result(stage.case.name, findings.verdict, "", f"{killed} {moment}", reasons, seconds)


def _wait(stage: Stage, running: Running, delay_s: float, chooser: random.Random) -> str:
    """Wait for a random moment of the command, or of one of its writings."""
    if chooser.random() < 0.5:
        running.wait(delay_s)
        return f"after {delay_s:.2f} s"
    skipped = chooser.randrange(3)
    for _ in range(skipped + 1):
        running.wait_for(stage.watched, limit_s=30)
        running.wait(chooser.uniform(0.0, 0.03))
    return f"{skipped + 1} x in writing"


def _kill_some(running: Running, chooser: random.Random) -> str:
    """Kill one process of the command, or all."""
    alive = descendants(running.pid) if running.poll() is None else []
    chosen: list[Any] = alive if chooser.random() < 0.3 else alive[:1] and [chooser.choice(alive)]
    for pid in chosen:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return f"{len(chosen)} of {len(alive)} processes"
