"""Whole training steps on the stand-in: who makes the host wait, and what kernels are given."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.stand_in.lifetimes import violations
from tests.stand_in.log import Entry, Kind, note_step, recording, steps_of, stream_name
from tests.stand_in.order import Calls, calls

# Operators that start no kernel.
SLOW_S = 0.01
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
    import pytest
    import torch
    import torch.distributed as dist

    from hotrec.runtime.ranks import all_gather_object
    from hotrec.train.watch import check_up
    from tests.stand_in.model import Run, Training

    losses: list[torch.Tensor] = []
    with pytest.MonkeyPatch.context() as patch, recording() as log:
        _keep_apart(patch, dist.get_rank())
        training = Training(Run(**run), torch.device("cuda", torch.cuda.current_device()))
        stream = training.batches(0, num_steps + 8)
        note_step()
        for step in range(num_steps):
            losses.append(training.pipeline.progress(stream)[0])
            if training.run.pipeline == "look_ahead":
                wait_for_thread(training.pipeline)
            if step == 1:  # collectives of the main thread's own
                check_up({step: losses[-1]}, {}, dist.get_world_size())
                all_gather_object(step)
            note_step()
        training.close()
    steps = steps_of(log.entries)[1:]
    return Trained(
        [float(loss) for loss in losses],
        [figures(entries) for entries in steps],
        violations(log.entries),
        calls([entry for entries in steps for entry in entries]),
    )


def _keep_apart(patch: Any, rank: int) -> None:
    """Slow down the threads of one rank, and the main thread of the other."""
    from hotrec.runtime.comm_thread import CommunicationThread

    submit = CommunicationThread.submit

    def late(self: Any, task: Callable[[], Any]) -> Any:
        def run() -> Any:
            time.sleep(SLOW_S)
            return task()

        if rank:
            time.sleep(SLOW_S)
        return submit(self, task if rank else run)

    patch.setattr(CommunicationThread, "submit", late)


def wait_for_thread(pipeline: Any) -> None:
    """Have the communication thread's tasks of the step in its log; nothing of it is counted."""
    done = threading.Event()
    pipeline._rows._thread.submit(done.set)
    done.wait()
