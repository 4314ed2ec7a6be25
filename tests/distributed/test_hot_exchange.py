"""Hot replicas over real ranks: their gradients through DDP's hook, and corruption."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.embedding import ShardedEmbeddingCollection

from hotrec.embedding.convert import check_replicas
from hotrec.embedding.hot_reduce import HotReducer
from hotrec.embedding.optimizers import hot_replicas
from hotrec.embedding.tables import gather_tables
from hotrec.types import HotExchange, OptimizerKind
from tests.distributed.setups import (
    PARTITIONS,
    Setup,
    assert_same_on_ranks,
    assert_tables_close,
    build,
    make_batch,
)
from tests.helpers.checks import run_checks
from tests.helpers.ranks import run_ranks
from tests.helpers.samples import on_ranks

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
    """Without the checksum that is under test elsewhere."""
    for rows in replica_bits(setup):
        assert_same_on_ranks(rows)


def backward_raises_what_the_reduction_raised() -> None:
    setup = build(SGD, PARTITIONS["all_hot"])
    train(setup, 1)
    with mock.patch.object(HotReducer, "reduce", side_effect=ValueError("not these rows")):
        loss, _ = setup.model(make_batch(1))
        with pytest.raises(Exception, match="not these rows"):
            loss.backward()


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
    """Two backward passes before a step, or one of two forward passes, move rows by the sum.

    SGD's update is the gradient itself, so the sum is that of two single steps.
    """
    batches = [make_batch(step) for step in range(2)]
    start = gather_tables(build(SGD, PARTITIONS["all_hot"]).model)
    expected = {table: weight.clone() for table, weight in start.items()}
    for batch in batches:
        single = build(SGD, PARTITIONS["all_hot"])
        single.step(batch)
        for table, weight in gather_tables(single.model).items():
            expected[table] += weight - start[table]
    for exchange in HotExchange:
        accumulated = build(SGD, PARTITIONS["all_hot"], exchange=exchange)
        together = build(SGD, PARTITIONS["all_hot"], exchange=exchange)
        for batch in batches:
            accumulated.model(batch)[0].backward()
        sum(together.model(batch)[0] for batch in batches).backward()
        for setup in (accumulated, together):
            setup.optimizer.step()
            assert_tables_close(gather_tables(setup.model), expected, 1e-6)
            assert_replicas_equal(setup)
        # Nothing of the two batches is left for the next steps.
        assert train(accumulated, 2) == pytest.approx(train(together, 2), rel=0, abs=1e-6)


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


def hot_rows_are_sent_once() -> None:
    """By ``shard``; TorchRec and DDP would send them before, which takes long on slow links.

    The constructor of torchrec 1.6 leaves nothing to override, so there DDP sends them.
    """
    with (
        mock.patch("torch.nn.parallel.distributed._sync_module_states") as sync,
        mock.patch("torch.distributed.broadcast", wraps=dist.broadcast) as broadcast,
    ):
        setup = build(SGD, PARTITIONS["all_hot"], data_parallel=False)
    assert sync.called is not hasattr(ShardedEmbeddingCollection, "init_data_parallel")
    sent = sum(call.args[0].numel() for call in broadcast.call_args_list)
    replicas = list(hot_replicas(setup.model).values())
    assert sent == sum(replica.weight.numel() for replica in replicas) > 0
    assert_replicas_equal(setup)


def ddp_keeps_its_bucket() -> None:
    """A second one, made in the third step, was as large as all hot rows once more."""
    setup = build(SGD, PARTITIONS["all_hot"])
    gradients = set()
    for _ in range(4):
        train(setup, 1)
        gradients.add(tuple(r.weight.grad.data_ptr() for r in hot_replicas(setup.model).values()))
    assert len(gradients) == 1


CHECKS: list[Callable[[], None]] = [
    evaluation_does_not_disturb,
    gradients_of_two_batches_add_up,
    corruption_is_found_on_all_ranks,
    sharding_makes_replicas_equal,
    hot_rows_are_sent_once,
    ddp_keeps_its_bucket,
    backward_raises_what_the_reduction_raised,  # last: DDP is of no more use
]


@pytest.fixture(scope="module", params=[2, 3])
def verdicts(request: pytest.FixtureRequest) -> dict[str, str | None]:
    checks = on_ranks(CHECKS, request.param)
    return run_ranks(run_checks, request.param, timeout_s=120, checks=checks)[0]


def test_hot_exchange(verdicts: dict[str, str | None]) -> None:
    failed = {name: verdict for name, verdict in verdicts.items() if verdict is not None}
    assert verdicts
    assert not failed
