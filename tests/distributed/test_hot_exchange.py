"""Hot replicas over real ranks: what is exchanged, what must not disturb it, corruption."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hotrec.embedding.convert import check_replicas
from hotrec.embedding.optimizers import hot_replicas
from hotrec.embedding.tables import gather_tables
from hotrec.types import HotExchange, OptimizerKind, WireType
from tests.distributed.setups import PARTITIONS, Setup, build, make_batch
from tests.helpers.checks import run_checks
from tests.helpers.ranks import run_ranks

NUM_STEPS = 4
SGD, ADAGRAD, ROWWISE, ADAM = (
    OptimizerKind.sgd,
    OptimizerKind.adagrad,
    OptimizerKind.rowwise_adagrad,
    OptimizerKind.adam,
)


def train(setup: Setup, num_steps: int = NUM_STEPS) -> list[float]:
    return [setup.step(make_batch(step)) for step in range(num_steps)]


def replica_bits(setup: Setup) -> list[torch.Tensor]:
    return [replica.rows.clone() for replica in hot_replicas(setup.model).values()]


def assert_replicas_equal(setup: Setup) -> None:
    """Bit for bit against rank 0's, without the checksum that is under test elsewhere."""
    differing = []
    for rows in replica_bits(setup):
        first = rows.clone()
        dist.broadcast(first, src=0)
        differing.append(not torch.equal(first, rows))
    # All ranks reach the same verdict, or the next collective would hang.
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, differing)
    assert not any(any(flags) for flags in of_ranks), of_ranks


def assert_tables_close(
    first: dict[str, torch.Tensor], second: dict[str, torch.Tensor], tolerance: float
) -> None:
    assert first.keys() == second.keys()
    for table, weight in first.items():
        worst = float((weight - second[table]).abs().max())
        assert worst <= tolerance, (table, worst)


def every_way_equals_the_dense_exchange() -> None:
    for kind, name in ((SGD, "mixed"), (ADAGRAD, "mixed"), (ROWWISE, "mixed"), (ADAM, "all_hot")):
        dense = build(kind, PARTITIONS[name], exchange=HotExchange.dense)
        expected = train(dense)
        for exchange in (HotExchange.touched_rows, HotExchange.owners, HotExchange.auto):
            other = build(kind, PARTITIONS[name], exchange=exchange)
            assert train(other) == pytest.approx(expected, abs=1e-6)
            assert_tables_close(gather_tables(other.model), gather_tables(dense.model), 1e-6)
            for setup in (other, dense):
                assert_replicas_equal(setup)
                check_replicas(setup.model)


def hook_rounds_gradients_in_16_bits() -> None:
    """Replicas stay equal, and near those of a 32-bit exchange."""
    for wire_type in (WireType.fp16, WireType.bf16):
        for exchange in HotExchange:
            plain = build(SGD, PARTITIONS["all_hot"], exchange=exchange)
            rounded = build(SGD, PARTITIONS["all_hot"], exchange=exchange)
            for replica in hot_replicas(rounded.model).values():
                replica._wire_type = wire_type
            train(plain, 2)
            train(rounded, 2)
            assert_replicas_equal(rounded)
            mine, other = gather_tables(plain.model), gather_tables(rounded.model)
            assert_tables_close(mine, other, 2e-3)
            assert any(not torch.equal(mine[table], other[table]) for table in mine)


def rerun_is_bitwise_equal() -> None:
    first, second = build(ROWWISE, PARTITIONS["mixed"]), build(ROWWISE, PARTITIONS["mixed"])
    assert train(first) == train(second)
    for one, two in zip(replica_bits(first), replica_bits(second), strict=True):
        assert torch.equal(one, two)
    assert_tables_close(gather_tables(first.model), gather_tables(second.model), 0.0)


def evaluation_does_not_disturb() -> None:
    """Forward passes without gradients, before, between and inside steps, on other rows."""
    for kind, name in ((ROWWISE, "mixed"), (ADAM, "all_hot")):
        plain, evaluated = build(kind, PARTITIONS[name]), build(kind, PARTITIONS[name])
        expected = train(plain)

        def evaluate(setup: Setup, step: int) -> None:
            setup.model.eval()
            with torch.no_grad():
                for other in range(2):
                    setup.model(make_batch(100 + 2 * step + other))
            setup.model.train()

        losses = []
        for step in range(NUM_STEPS):
            evaluate(evaluated, step)
            evaluated.optimizer.zero_grad()
            loss, _ = evaluated.model(make_batch(step))
            losses.append(loss.detach())
            evaluate(evaluated, 10 + step)
            loss.backward()
            evaluate(evaluated, 20 + step)
            evaluated.optimizer.step()
        for loss, wanted in zip(losses, expected, strict=True):
            dist.all_reduce(loss)
            assert float(loss) / dist.get_world_size() == wanted
        assert_tables_close(gather_tables(plain.model), gather_tables(evaluated.model), 0.0)


def gradients_of_two_batches_add_up() -> None:
    """All hot: two backwards and one step are one step on the sum, which one forward pair gives."""
    for exchange in HotExchange:
        accumulated = build(ADAGRAD, PARTITIONS["all_hot"], exchange=exchange)
        together = build(ADAGRAD, PARTITIONS["all_hot"], exchange=exchange)
        for pair in range(3):
            accumulated.optimizer.zero_grad()
            for step in (2 * pair, 2 * pair + 1):
                accumulated.model(make_batch(step))[0].backward()
            accumulated.optimizer.step()
            together.optimizer.zero_grad()
            losses = [together.model(make_batch(step))[0] for step in (2 * pair, 2 * pair + 1)]
            (losses[0] + losses[1]).backward()
            together.optimizer.step()
        assert_tables_close(gather_tables(accumulated.model), gather_tables(together.model), 1e-6)
        assert_replicas_equal(accumulated)
        assert_replicas_equal(together)


def accumulation_equals_one_large_batch() -> None:
    """Against a world where the two batches were one: SGD, whose update is the gradient itself."""
    accumulated = build(SGD, PARTITIONS["all_hot"])
    start = gather_tables(accumulated.model)
    accumulated.optimizer.zero_grad()
    for step in range(2):
        accumulated.model(make_batch(step))[0].backward()
    accumulated.optimizer.step()
    total = {table: weight.clone() for table, weight in start.items()}
    for step in range(2):
        single = build(SGD, PARTITIONS["all_hot"])
        single.step(make_batch(step))
        for table, weight in gather_tables(single.model).items():
            total[table] += weight - start[table]
    assert_tables_close(gather_tables(accumulated.model), total, 1e-6)


def skipped_step_leaves_nothing_behind() -> None:
    skipped, plain = build(ROWWISE, PARTITIONS["all_hot"]), build(ROWWISE, PARTITIONS["all_hot"])
    (skipped.model(make_batch(50))[0] * float("nan")).backward()  # and no step
    assert train(skipped) == train(plain)
    assert_tables_close(gather_tables(skipped.model), gather_tables(plain.model), 0.0)


def corruption_is_found_on_all_ranks() -> None:
    for wrong_rank in range(dist.get_world_size()):
        for index in range(2):  # the replicas of either dimension
            setup = build(SGD, PARTITIONS["mixed"])
            train(setup, 1)
            check_replicas(setup.model)
            replica = list(hot_replicas(setup.model).values())[index]
            if dist.get_rank() == wrong_rank:
                replica.rows[-1, -1] += 1e-6
            message = rf"^hot replicas of dimension {replica.dim}: expected equal checksums"
            with pytest.raises(RuntimeError, match=message):
                check_replicas(setup.model)
            replica.broadcast()
            check_replicas(setup.model)
            assert_replicas_equal(setup)


def sharding_makes_replicas_equal() -> None:
    """Each rank builds the model with weights of its own; rank 0's replicas are everybody's."""
    torch.manual_seed(dist.get_rank())
    setup = build(SGD, PARTITIONS["mixed"], seed=None)
    assert_replicas_equal(setup)
    assert all(rows.any() for rows in replica_bits(setup))


def untouched_rows_stay() -> None:
    """No rank reads the last rows in these batches; Adam and Adagrad must leave them bitwise."""
    for kind, name in ((ADAM, "all_hot"), (ROWWISE, "mixed"), (ADAGRAD, "all_cold")):
        setup = build(kind, PARTITIONS[name])
        start = gather_tables(setup.model)
        train(setup, 2)
        read = torch.zeros(90, dtype=torch.int64)
        for step in range(2):
            batch = make_batch(step)
            read.index_fill_(0, batch.sparse["e"].values(), 1)
        dist.all_reduce(read)
        moved = (gather_tables(setup.model)["t3"] != start["t3"]).any(1)
        assert torch.equal(moved, read > 0)


def slots_travel_as_bits() -> None:
    """A slot is a denormal float in the message, which a flushing processor mode must not lose."""
    flushed, plain = build(SGD, PARTITIONS["mixed"]), build(SGD, PARTITIONS["mixed"])
    expected = train(plain, 2)
    assert torch.set_flush_denormal(True)
    try:
        losses = train(flushed, 2)
    finally:
        torch.set_flush_denormal(False)
    assert losses == pytest.approx(expected, abs=1e-6)
    assert_tables_close(gather_tables(flushed.model), gather_tables(plain.model), 1e-6)


CHECKS: list[Callable[[], None]] = [
    every_way_equals_the_dense_exchange,
    hook_rounds_gradients_in_16_bits,
    rerun_is_bitwise_equal,
    evaluation_does_not_disturb,
    gradients_of_two_batches_add_up,
    accumulation_equals_one_large_batch,
    skipped_step_leaves_nothing_behind,
    corruption_is_found_on_all_ranks,
    sharding_makes_replicas_equal,
    untouched_rows_stay,
    slots_travel_as_bits,
]


@pytest.fixture(scope="module", params=[2, 3])
def verdicts(request: pytest.FixtureRequest) -> dict[str, str | None]:
    return run_ranks(run_checks, request.param, timeout_s=120, checks=CHECKS)[0]


@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_hot_exchange(verdicts: dict[str, str | None], check: str) -> None:
    assert verdicts[check] is None, verdicts[check]
