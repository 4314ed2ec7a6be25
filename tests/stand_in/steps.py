"""Whole training steps on the stand-in: who makes the host wait, and what kernels are given.

    python -m tests.stand_in.steps --pipeline sparse_dist --routing loader --world-size 2

prints, for the last of the steps, the host synchronisations by stream and line, the operators, and
the longest bag or segment that a lookup, an exchange of ids or a pooling kernel was given. Options:
--pipeline sparse_dist|base|look_ahead, --routing loader|device, --optimizer sgd|adagrad|
rowwise_adagrad|adam, --kind dlrm|hstu|sasrec|packed, --dims 1|2, --world-size, --steps, --rank
(whose figures are printed), --operators (the operators by name and line as well).
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.stand_in.build import why_not
from tests.stand_in.lifetimes import violations
from tests.stand_in.log import Entry, Kind, note_step, recording, steps_of, stream_name
from tests.stand_in.order import Calls, calls, differences

# Operators that start no kernel.
NO_KERNEL = ("c10d::", "aten::set_", "aten::unfold")


@dataclass(frozen=True)
class Step:
    """Figures of one step on one rank.

    Args:
        syncs: host synchronisations by (stream, thread, what, line).
        num_operators: kernels started, copies among them.
        operators: by name.
        longest: by kernel, the longest bag or segment.
        pageable: copies to the device that ask not to block, from memory that is not pinned.
    """

    syncs: dict[tuple[str, str, str, str], int]
    num_operators: int
    operators: dict[str, int]
    longest: dict[str, int]
    pageable: dict[str, int]

    @property
    def num_syncs(self) -> int:
        return sum(self.syncs.values())

    @property
    def num_main_syncs(self) -> int:
        return sum(num for (stream, *_), num in self.syncs.items() if stream == "main")


def waits(entries: Sequence[Entry]) -> list[Entry]:
    """The synchronisations; without those of a stream that was given nothing since its last."""
    found = []
    is_done: dict[int, bool] = {}
    for entry in entries:
        if entry.kind in (Kind.OPERATOR, Kind.COLLECTIVE):
            is_done[entry.stream] = False
        elif entry.kind is Kind.SYNC:
            if not (entry.name == "stream.synchronize" and is_done.get(entry.stream)):
                found.append(entry)
            is_done[entry.stream] = True
    return found


def figures(entries: Sequence[Entry]) -> Step:
    """What the log of one step says."""
    operators = [
        entry
        for entry in entries
        if entry.kind is Kind.OPERATOR and not entry.name.startswith(NO_KERNEL)
    ]
    longest: dict[str, int] = {}
    for entry in operators:
        if entry.value:
            longest[entry.name] = max(longest.get(entry.name, 0), entry.value)
    return Step(
        dict(
            Counter(
                (stream_name(entry.stream), entry.thread, entry.name, entry.place)
                for entry in waits(entries)
            )
        ),
        len(operators),
        dict(Counter(entry.name for entry in operators)),
        longest,
        dict(Counter(e.place for e in entries if e.kind is Kind.PAGEABLE_COPY)),
    )


@dataclass(frozen=True)
class Trained:
    """What one rank says of a training.

    Args:
        losses: of each step.
        steps: figures of each step. A step is one call of ``progress``: the batch's own work, and
            with a pipeline the part of the next batches' that it does.
        lifetimes: blocks that were freed too early, from the model's making to its end.
        calls: collectives of the steps.
    """

    losses: list[float]
    steps: list[Step]
    lifetimes: list[str]
    calls: Calls


def train(runs: Sequence[dict[str, Any]], num_steps: int) -> list[Trained]:
    """On every rank: the trainings, one after the other."""
    return [_train(run, num_steps) for run in runs]


def _train(run: dict[str, Any], num_steps: int) -> Trained:
    import torch

    from tests.stand_in.model import Run, Training

    losses = []
    with recording() as log:
        training = Training(Run(**run), torch.device("cuda", torch.cuda.current_device()))
        stream = training.batches(0, num_steps + 8)
        note_step()
        for _ in range(num_steps):
            loss, _, _ = training.pipeline.progress(stream)
            if training.run.pipeline == "look_ahead":
                wait_for_thread(training.pipeline)
            note_step()
            losses.append(loss)
        del loss
        training.close()
    steps = steps_of(log.entries)[1:]
    return Trained(
        [float(loss) for loss in losses],
        [figures(entries) for entries in steps],
        violations(log.entries),
        calls([entry for entries in steps for entry in entries]),
    )


def wait_for_thread(pipeline: Any) -> None:
    """Have the communication thread's tasks of the step in its log; nothing of it is counted."""
    import threading

    done = threading.Event()
    pipeline._rows._thread.submit(done.set)
    done.wait()


def _print(step: Step, is_long: bool) -> None:
    print(f"{step.num_syncs} synchronisations, {step.num_main_syncs} of them on the main stream:")
    for (stream, thread, what, place), num in sorted(step.syncs.items()):
        print(f"  {num} x {stream} ({thread}): {what}, {place}")
    print(f"{step.num_operators} operators")
    if is_long:
        for name, num in sorted(step.operators.items(), key=lambda item: -item[1]):
            print(f"  {num} x {name}")
    for place, num in step.pageable.items():
        print(f"  {num} x copy from pageable memory: {place}")
    print("longest bag or segment:")
    for name, value in sorted(step.longest.items()):
        print(f"  {value} {name}")


def main() -> None:
    from tests.stand_in.ranks import run_on_device

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pipeline", default="sparse_dist")
    parser.add_argument("--routing", default="loader")
    parser.add_argument("--optimizer", default="sgd")
    parser.add_argument("--tier", default="device")
    parser.add_argument("--kind", default="dlrm")
    parser.add_argument("--dims", type=int, default=1)
    parser.add_argument("--depth", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--world-size", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--operators", action="store_true")
    options = vars(parser.parse_args())
    if (reason := why_not()) is not None:
        raise SystemExit(reason)
    world_size, num_steps = options.pop("world_size"), options.pop("steps")
    rank, is_long = options.pop("rank"), options.pop("operators")
    results = run_on_device(
        "tests.stand_in.steps:train", world_size, timeout_s=120, runs=[options], num_steps=num_steps
    )
    trained = results[rank][0]
    print("losses", trained.losses)
    _print(trained.steps[-1], is_long)
    for text in trained.lifetimes:
        print("freed too early:", text)
    for text in differences([of_rank[0].calls for of_rank in results]):
        print("collectives differ:", text)


if __name__ == "__main__":
    main()
