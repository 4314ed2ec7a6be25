"""Whole training steps on the stand-in: who makes the host wait, and what kernels are given.

    python -m tests.stand_in.steps --pipeline sparse_dist --routing loader --world-size 2

prints, for the last of the steps, the host synchronisations by stream and line, the operators, and
the longest bag or segment that a lookup, an exchange of ids or a pooling kernel was given. Options:
--pipeline sparse_dist|base|look_ahead, --routing loader|device, --optimizer sgd|adagrad|
rowwise_adagrad|adam, --dims 1|2, --world-size, --steps, --rank (whose figures are printed),
--operators (the operators by name and line as well).
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import dataclass
from typing import Any

from tests.stand_in.log import Entry, Kind, Log, stream_name

# Operators that start no kernel.
_NO_KERNEL = ("c10d::", "aten::set_", "aten::unfold")


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


def waits(log: Log) -> list[Entry]:
    """The synchronisations; without those of a stream that was given nothing since its last."""
    found = []
    is_done: dict[int, bool] = {}
    for entry in log.entries:
        if entry.kind in (Kind.OPERATOR, Kind.COLLECTIVE):
            is_done[entry.stream] = False
        elif entry.kind is Kind.SYNC:
            if not (entry.name == "stream.synchronize" and is_done.get(entry.stream)):
                found.append(entry)
            is_done[entry.stream] = True
    return found


def figures(log: Log) -> Step:
    """What a log of one step says."""
    operators = [
        entry for entry in log.of(Kind.OPERATOR) if not entry.name.startswith(_NO_KERNEL)
    ]
    longest: dict[str, int] = {}
    for entry in operators:
        if entry.value:
            longest[entry.name] = max(longest.get(entry.name, 0), entry.value)
    return Step(
        dict(
            Counter(
                (stream_name(entry.stream), entry.thread, entry.name, entry.place)
                for entry in waits(log)
            )
        ),
        len(operators),
        dict(Counter(entry.name for entry in operators)),
        longest,
        dict(Counter(entry.place for entry in log.of(Kind.PAGEABLE_COPY))),
    )


def train(run: dict[str, Any], num_steps: int) -> dict[str, Any]:
    """On every rank: train, and return losses and the figures of each step.

    The log of a step is that of one ``progress``: the batch's own steps and, with a pipeline, the
    part of the next batches' that it does.
    """
    import torch

    from tests.stand_in.log import recording
    from tests.stand_in.model import Run, Training

    training = Training(Run(**run), torch.device("cuda", torch.cuda.current_device()))
    stream = training.batches(0, num_steps + 8)
    losses, steps = [], []
    for _ in range(num_steps):
        with recording() as log:
            loss, _, _ = training.pipeline.progress(stream)
            if run.get("pipeline") == "look_ahead":
                _wait_for_lane(training)
        losses.append(float(loss))
        steps.append(figures(log))
    training.close()
    return {"losses": losses, "steps": steps}


def _wait_for_lane(training: Any) -> None:
    """Have the communication thread's tasks of the step in its log; nothing of it is counted."""
    import threading

    done = threading.Event()
    training.pipeline._rows._lane.submit(done.set)
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
    parser.add_argument("--exchange", default="auto")
    parser.add_argument("--tier", default="device")
    parser.add_argument("--dims", type=int, default=1)
    parser.add_argument("--depth", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--world-size", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--operators", action="store_true")
    options = vars(parser.parse_args())
    world_size, num_steps = options.pop("world_size"), options.pop("steps")
    rank, is_long = options.pop("rank"), options.pop("operators")
    results = run_on_device(
        "tests.stand_in.steps:train", world_size, timeout_s=120, run=options, num_steps=num_steps
    )
    print("losses", results[rank]["losses"])
    _print(results[rank]["steps"][-1], is_long)


if __name__ == "__main__":
    main()
