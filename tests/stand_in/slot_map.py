"""What the map of slots starts on the device in a step: foresee a batch, reserve for another one.

    python -m tests.stand_in.slot_map

prints the operators of one rank's step by line, and the host's waits.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from tests.stand_in.log import Kind, note_step, recording, steps_of
from tests.stand_in.steps import figures, waits

NUM_STEPS, WINDOW, DEPTH = 12, 8, 1


@dataclass(frozen=True)
class Bookkeeping:
    """Of one step.

    Args:
        operators: By line.
        num_waits: How often the host waits.
        num_moved: Rows that leave, and as many that come.
    """

    operators: dict[str, int]
    num_waits: int
    num_moved: int

    @property
    def num_operators(self) -> int:
        return sum(self.operators.values())


def count() -> Bookkeeping:
    """The last of some steps; slots are full, and there are enough for the batches in flight."""
    import numpy as np
    import torch

    from hotrec.embedding.slots import SlotMap
    from hotrec.types import POPULAR_ROW

    device = torch.device("cuda", torch.cuda.current_device())
    generator = torch.Generator().manual_seed(0)
    slots = SlotMap(5000, 1000, np.empty(0, POPULAR_ROW), device)
    batches = [
        (torch.rand(150, generator=generator) ** 2 * 5000).long().unique().to(device)
        for _ in range(NUM_STEPS + WINDOW)
    ]
    for number in range(WINDOW):
        slots.foresee(batches[number], number)
    with recording() as log:
        for number in range(NUM_STEPS):
            note_step()
            slots.release(number - DEPTH - 1, is_changed=True)
            slots.foresee(batches[number + WINDOW], number + WINDOW)
            _, moves = slots.reserve(batches[number], number)
        note_step()
    entries = steps_of(log.entries)[-1]
    assert figures(entries).num_syncs == len(waits(entries))
    lines = Counter(f"{e.place} {e.name}" for e in entries if e.kind is Kind.OPERATOR)
    return Bookkeeping(dict(lines), len(waits(entries)), moves.out_rows.numel())


def main() -> None:
    from tests.stand_in.ranks import run_on_device

    (counted,) = run_on_device("tests.stand_in.slot_map:count")
    for line, num in sorted(counted.operators.items()):
        print(num, line)
    print(
        f"{counted.num_operators} operators, {counted.num_waits} waits, {counted.num_moved} rows "
        "moved"
    )


if __name__ == "__main__":
    main()
