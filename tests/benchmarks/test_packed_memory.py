"""The benchmark of packed output: what it measures and shows."""

from __future__ import annotations

import pytest
import torch

from benchmarks import packed_memory, packed_training


@pytest.mark.parametrize("case", [c for c in packed_memory.CASES if c != "expanded"])
def test_late_saves_nothing_for_backward(case: str) -> None:
    num_threads = torch.get_num_threads()
    try:
        found = packed_memory.measure(case, num_ids=3000, dim=64, width=8)
    finally:
        torch.set_num_threads(num_threads)
    assert found["num_rows"] == 72 + 45 + 18
    assert found["saved_bytes"] == (0 if case == "packed, late" else 3 * 3000 * 64 * 4)
    assert found["peak_bytes"] >= found["forward_peak_bytes"]
    # Of a process whose memory other tests have used before, the peak says nothing.
    cases = [
        found | {"case": name, "peak_bytes": n} for name, n in (("expanded", 6e6), (case, 2e6))
    ]
    page = packed_memory.render(cases, [{"case": "late", "peak_bytes": 7e6, "loss": 0.5}])
    assert "| 6.00 MB |   1.0 |" in page
    assert "| 2.00 MB |   3.0 |" in page


def test_cases_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = []

    def keep(output: packed_memory.Output, others: set[torch.Tensor]) -> int:
        outputs.append(output())
        return 0

    monkeypatch.setattr(packed_memory, "saved_bytes", keep)
    for case in packed_memory.CASES:
        torch.manual_seed(4)
        packed_memory.measure(case, num_ids=3000, dim=8, width=4)
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0], rtol=0, atol=1e-5)


def test_ranks_train_the_same_weights() -> None:
    losses = [
        packed_training.measure(case, (4000, 16, 4), packed_memory.DISTINCT_FRAC)["loss"]
        for case in ("TorchRec's own", "packed, late")
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[0] > 0
