"""A TorchRec program in two lines: every choice trains as the unsplit model in one process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

import hotrec
from hotrec.embedding.initialize import set_unsplit
from hotrec.embedding.tables import sharded_collections
from hotrec.types import (
    Exchange,
    Partition,
    PipelineKind,
    Placement,
    TablePlacement,
    TorchrecPlan,
)
from tests.distributed import programs
from tests.distributed.programs import LOOK_AHEAD, SPARSE_DIST, Batch, Choice, Program, mine, whole
from tests.helpers.ranks import run_ranks

ALL_ROWS = {**programs.ROWS, "tag": 60, "shop": 7}
FEATURES = {"user": ("user",), "item": ("seen", "item"), "tag": ("tag",), "shop": ("shop",)}
RULES = (programs.EMBEDDING, programs.DENSE)
KINDS = (LOOK_AHEAD, SPARSE_DIST, programs.BASE)


class TwoSets(programs.Model):
    """An unweighted and a weighted collection, whose features are of two kinds."""

    def __init__(self, device: str = "cpu") -> None:
        item = programs.table("item", FEATURES["item"], embedding_dim=4, pooling=PoolingType.MEAN)
        width = 2 + 8 + 2 * 4 + 2 * 8
        super().__init__(
            [programs.table("user"), item], ("user", "seen", "item"), device=device, width=width
        )
        tags = [programs.table(name, num_embeddings=ALL_ROWS[name]) for name in ("tag", "shop")]
        self.weighted = EmbeddingBagCollection(tags, is_weighted=True, device=torch.device(device))

    def pooled(self, batch: Batch) -> list[torch.Tensor]:
        weighted = self.weighted(batch.other)
        return [*super().pooled(batch), weighted["tag"], weighted["shop"]]


def two_sets(step: int, part: slice = slice(None), size: int = programs.GLOBAL_BATCH) -> Batch:
    plain, weighted = (
        programs.make_batch(step + first, part, size, features=rows, is_weighted=bool(first))
        for first, rows in ((0, {"user": 90, "seen": 40, "item": 40}), (99, {"tag": 60, "shop": 7}))
    )
    return replace(plain, other=weighted.ids)


def counted(_: Mapping[str, int]) -> hotrec.Profile:
    return hotrec.profile(mine(6, two_sets), TwoSets())


def mixed(rows: Mapping[str, int]) -> Placement:
    """Of each exchange two, with hot rows and without."""
    hot = {
        name: of for name, of in programs.some_hot(rows).hot_rows.items() if name in ("user", "tag")
    }
    pooled = TablePlacement(Exchange.POOLED)
    placed = {"user": TablePlacement(), "item": pooled, "tag": TablePlacement(), "shop": pooled}
    return Placement(Partition(rows, hot), placed)


HOT = (programs.some_hot, mixed)


def stale(rows: Mapping[str, int]) -> Partition:
    """The batches read low rows most."""
    return Partition(rows, {"user": np.arange(60, 80), "tag": np.arange(50, 60)})


def program_of(choice: Choice, **given: Any) -> Program:
    return Program(choice, TwoSets, RULES, ALL_ROWS, **given)


def trains(choice: Choice, **given: Any) -> None:
    program = program_of(choice, **given)
    with program.pipeline():
        program.go(iter(mine(6, two_sets)))
    program.check(whole(6, two_sets))
    if given.get("may_decline") is False:
        assert hotrec.choice_of(program.model).name == f"hot_cold {choice.kind.name}"


@pytest.mark.parametrize("world_size", [1, 2])
def test_every_choice_trains_as_the_unsplit_model(world_size: int) -> None:
    made = [
        Choice("auto", PipelineKind.auto, counted),
        programs.CHOICES["off"][0],
        *(Choice(f"{hot.__name__} {k.name}", k, hot) for k, hot in product(KINDS, HOT)),
        *(programs.of_plan(*of) for of in product(TorchrecPlan, KINDS[1:])),
    ]
    pays = partial(trains, may_decline=False, hot_budget_mib=0.002)
    of_counts = [programs.Check(pays, Choice(f"counted {k.name}", k, counted)) for k in KINDS]
    programs.run_all([*(programs.Check(trains, choice) for choice in made), *of_counts], world_size)


def train_without_naming_a_backend(folder: str) -> None:
    """As many programs do: torch then has a backend for each kind of device."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group(store=store, rank=rank, world_size=size)
    for kind in (LOOK_AHEAD, SPARSE_DIST):
        trains(Choice(kind.name, kind))


def test_a_group_without_a_named_backend_will_do(tmp_path: Path) -> None:
    run_ranks(train_without_naming_a_backend, 2, folder=str(tmp_path))


def in_backward() -> tuple[Any, ShardingPlan]:
    """The model with its update rules, and a plan of TorchRec's."""
    model: Any = TwoSets()
    plan = {}
    for name in ("bags", "weighted"):
        bags = getattr(model, name)
        _apply_optimizer_in_backward(RowWiseAdagrad, bags.parameters(), {"lr": 0.2})
        owners = {key: table_wise(rank=at % 2) for at, key in enumerate(bags.embedding_bags)}
        plan[name] = construct_module_sharding_plan(
            bags, owners, local_size=2, world_size=2, device_type="cpu"
        )
    return model, ShardingPlan(plan)


def plain_torchrec() -> TrainPipelineSparseDist:
    """The recipe of TorchRec's own examples, and the model's weights, which TorchRec draws anew."""
    model, plan = in_backward()
    bags = [*model.bags.embedding_bags.items(), *model.weighted.embedding_bags.items()]
    weights = {name: bag.weight for name, bag in bags}
    model = DistributedModelParallel(model, device=programs.CPU, plan=plan)
    set_unsplit(model, weights)
    rest = dict(in_backward_optimizer_filter(model.named_parameters()))
    optimizer = CombinedOptimizer(
        [model.fused_optimizer, KeyedOptimizerWrapper(rest, programs.DENSE)]
    )
    return TrainPipelineSparseDist(model, optimizer, programs.CPU)


def compare_with_plain() -> None:
    model, plan = in_backward()
    model, optimizer = hotrec.parallelize(model, "off", dense_optimizer=programs.DENSE, plan=plan)
    found, expected = (
        [float(pipeline.progress(data)[0]) for _ in range(6)]
        for pipeline in (hotrec.Pipeline(model, optimizer, programs.CPU), plain_torchrec())
        for data in [iter(mine(6, two_sets))]
    )
    assert found == expected


def test_off_is_plain_torchrec_bit_for_bit() -> None:
    run_ranks(compare_with_plain, 2)


def initial_tables() -> None:
    """Tables on the device meta start alike whatever is chosen, and as their bounds say."""
    found = []
    plan = programs.of_plan(TorchrecPlan.planner, programs.BASE).hot
    for hot in (programs.some_hot(ALL_ROWS), mixed(ALL_ROWS), plan, "off"):
        model, _ = hotrec.parallelize(TwoSets("meta"), hot, **programs.RULES, seed=1)
        found.append(hotrec.gather_tables(model))
    for name, rows in ALL_ROWS.items():
        assert 0.8 * rows**-0.5 < float(found[0][name].abs().max()) <= rows**-0.5
        assert all(torch.equal(other[name], found[0][name]) for other in found[1:])


def test_new_tables_do_not_depend_on_the_choice() -> None:
    run_ranks(initial_tables, 2)


def count_on_each_rank() -> None:
    counted = hotrec.profile(mine(4, two_sets), TwoSets(), num_batches=2)
    assert (counted.num_samples, counted.batch_size) == (
        2 * programs.GLOBAL_BATCH,
        programs.GLOBAL_BATCH // 2,
    )
    read = [part for batch in whole(2, two_sets) for part in (batch.ids, batch.other)]
    for name, rows in ALL_ROWS.items():
        of_table = [
            ids[key].values() for ids in read for key in list(ids.keys()) if key in FEATURES[name]
        ]
        expected = torch.bincount(torch.cat(of_table), minlength=rows)
        assert counted.counts[name].tolist() == expected.tolist()


def test_a_profile_sums_what_the_ranks_read() -> None:
    run_ranks(count_on_each_rank, 2)


def state_of(program: Program) -> dict[str, Any]:
    return {"optimizer": program.optimizer.state_dict(), "model": program.model.state_dict()}


def resumes(choice: Choice, other: Choice | None, folder: str) -> None:
    """After half of the steps: as a TorchRec user would, or hotrec's file under another choice."""
    program = program_of(choice)
    with program.pipeline():
        program.go(iter(mine(3, two_sets)))
    if other is None:
        dcp.save(state_of(program), checkpoint_id=folder)
        program.choice = replace(choice, hot=hotrec.choice_of(program.model))
        program.parallelize(partial(TwoSets, "meta"))
        state = state_of(program)
        dcp.load(state, checkpoint_id=folder)
        program.model.load_state_dict(state["model"])
        program.optimizer.load_state_dict(state["optimizer"])
    else:
        saved = {"seen": 3}
        hotrec.save_checkpoint(folder, program.model, program.optimizer, 3, state=saved)
        program.choice = other
        program.parallelize(partial(TwoSets, "meta"))
        assert hotrec.load_checkpoint(folder, program.model, program.optimizer) == (3, saved)
    # Layers on the device meta got other weights, all of which the checkpoint has replaced.
    with program.pipeline():
        program.go(iter(mine(range(3, 6), two_sets)))
    program.check(whole(6, two_sets))


def resume_all(folder: str) -> None:
    choices = [Choice(hot.__name__, k, hot) for hot, k in product(HOT, KINDS[:2])]
    for at, choice in enumerate(choices):
        resumes(choice, None, f"{folder}/{at}")
        resumes(choice, choices[3 - at], f"{folder}/other{at}")


def test_checkpoints_of_hotrec_and_of_torch_resume(tmp_path: Path) -> None:
    run_ranks(resume_all, 2, timeout_s=100, folder=str(tmp_path))


def hot_users(program: Program) -> list[int]:
    collections = dict(sharded_collections(program.model))
    found: list[int] = collections["bags."].partition.hot("user").tolist()
    return found


def adapts(choice: Choice, folder: str) -> None:
    """Rows move, also while one iterator follows another, and resume."""
    program = program_of(choice)
    hot_set = hotrec.AdaptiveHotSet(program.model, program.optimizer)
    with pytest.raises(ValueError, match="^adapt_every: .* 0"):
        program.pipeline(hot_set=hot_set, adapt_every=0)
    with program.pipeline(hot_set=hot_set, adapt_every=2):
        program.go(iter(mine(1, two_sets)))
        program.go(iter(mine(range(1, 4), two_sets)))
        hotrec.save_checkpoint(folder, program.model, program.optimizer, 4, hot_set=hot_set)
    hot = hot_users(program)
    assert min(hot) < 60
    program.parallelize(TwoSets)
    hot_set = hotrec.AdaptiveHotSet(program.model, program.optimizer)
    given = (folder, program.model, program.optimizer)
    assert hotrec.load_checkpoint(*given, hot_set=hot_set) == (4, {})
    assert hot_users(program) == hot
    with program.pipeline(hot_set=hot_set, adapt_every=2):
        program.go(iter(mine([4, 5], two_sets)))
    program.check(whole(6, two_sets))
    refuse_state(hot_set)


def refuse_state(hot_set: hotrec.AdaptiveHotSet) -> None:
    state = hot_set.state_dict()
    key = next(name for name in state if name.endswith("user.weight/counts"))
    hot = key.replace("/counts", "/hot_rows")
    wrong = (
        (key, state[key][1:]),
        (hot, state[hot] - ALL_ROWS["user"]),
        (hot, state[hot].double()),
    )
    for name, value in wrong:
        with pytest.raises(ValueError, match="rows of table user: expected"):
            hot_set.load_state_dict([{**state, name: value}])


def adapt_all(folder: str) -> None:
    for kind in KINDS:
        adapts(Choice("stale", kind, stale), f"{folder}/{kind.name}")


def test_hot_rows_follow_the_batches(tmp_path: Path) -> None:
    run_ranks(adapt_all, 2, timeout_s=100, folder=str(tmp_path))
