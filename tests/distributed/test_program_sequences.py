"""Programs with pooled and unpooled tables: one look-ahead, checkpoints, adaptive hot rows."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ShardingType
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor

import hotrec
from hotrec.embedding.tables import sharded_collections
from hotrec.types import Exchange, Partition, Placement, TablePlacement
from tests.distributed import programs
from tests.distributed.programs import LOOK_AHEAD, Batch, Check, Choice, Model, Program, mine, whole
from tests.distributed.test_program_forms import sum_rows, unpooled
from tests.helpers.ranks import run_ranks

torch.fx.wrap("sum_rows")
SEQUENCE_ROWS = {"seen": 40, "shop": 90}
ALL_ROWS = {**programs.ROWS, **SEQUENCE_ROWS}
RULES = (programs.EMBEDDING, programs.DENSE)


def unpooled_tables() -> EmbeddingCollection:
    return EmbeddingCollection([unpooled("seen", "item", 40), unpooled("shop", "user", 90)])


class Both(Model):
    """The same features are read pooled and unpooled."""

    def __init__(self) -> None:
        super().__init__(keys=("user", "item", "seen", "shop"))
        self.sequences = unpooled_tables()

    def pooled(self, batch: Batch) -> list[torch.Tensor]:
        bags, rows = self.bags(batch.ids), self.sequences(batch.ids)
        return [bags["user"], bags["item"], sum_rows(rows["item"]), sum_rows(rows["user"])]


class Packed(Model):
    """Sequences alone; packed, if they are hotrec's."""

    def __init__(self) -> None:
        super().__init__()
        del self.bags
        self.sequences, self.late = unpooled_tables(), hotrec.LateLinear([8], 8)
        hotrec.use_packed_jagged_tensor(self.sequences)
        self.kinds: set[type] = set()

    def pooled(self, batch: Batch) -> list[torch.Tensor]:
        rows = self.sequences(batch.ids)
        item, user = rows["item"], rows["user"]
        self.kinds |= {type(item), type(user)}
        late = JaggedTensor(self.late([item]), lengths=item.lengths())
        return [sum_rows(late), sum_rows(user)]


MAKES: Mapping[str, tuple[type[Model], Mapping[str, int]]] = {
    "both": (Both, ALL_ROWS),
    "pooled hot": (Both, programs.ROWS),  # sequences stay TorchRec's
    "packed": (Packed, SEQUENCE_ROWS),
}


def trains(name: str, choice: Choice, **given: Any) -> None:
    make, rows = MAKES[name]
    program = Program(choice, make, RULES, rows, **given)
    with program.pipeline():
        program.go(iter(mine(4)))
    program.check(whole(4))
    if make is Packed and callable(choice.hot):
        [of_model] = [part for part in program.model.modules() if isinstance(part, Packed)]
        assert of_model.kinds - {torch.fx.Proxy} == {hotrec.PackedJaggedTensor}


def pooled_item(rows: Mapping[str, int]) -> Placement:
    """Bags as TorchRec exchanges them beside sequences, which have no such exchange."""
    placed = dict.fromkeys(rows, TablePlacement())
    placed["item"] = TablePlacement(Exchange.POOLED)
    return Placement(Partition(rows, {"seen": np.arange(7)}), placed)


def counted(rows: Mapping[str, int]) -> hotrec.Profile:
    found = hotrec.profile(mine(4), Both())
    assert found.num_rows == rows
    assert set(found.reuse) == set(rows)
    return found


def stale(rows: Mapping[str, int]) -> Partition:
    """The batches read low rows most."""
    return Partition(rows, {"seen": np.arange(30, 37), "user": np.arange(60, 70)})


def adapts(choice: Choice) -> None:
    program = Program(choice, Both, RULES, ALL_ROWS)
    hot_set = hotrec.AdaptiveHotSet(program.model, program.optimizer)
    with program.pipeline(hot_set=hot_set, adapt_every=2):
        program.go(iter(mine(4)))
    program.check(whole(4))
    for table, collection in zip(("user", "seen"), sharded_collections(program.model), strict=True):
        assert min(collection[1].partition.hot(table)) < 30


def test_bags_and_sequences_train_as_unsplit() -> None:
    choices = [choice for of_kind in programs.CHOICES.values() for choice in of_kind]
    checks = [Check(partial(trains, name), choice) for name in MAKES for choice in choices]
    for kind in (LOOK_AHEAD, programs.SPARSE_DIST):
        pooled = Choice(f"pooled item {kind.name}", kind, pooled_item)
        checks.append(Check(partial(trains, "both"), pooled))
    checks.append(Check(adapts, Choice("stale", LOOK_AHEAD, stale)))
    programs.run_all(
        [*checks, Check(partial(trains, "both"), Choice("counted", LOOK_AHEAD, counted))], 2
    )


def resumes(folder: Path, first: int) -> None:
    """Trains two steps and saves, or all steps, the last two from the checkpoint."""
    for name, (make, rows) in MAKES.items():
        program = Program(programs.CHOICES["look_ahead"][0], make, RULES, rows)
        if first:
            found = hotrec.load_checkpoint(folder / name, program.model, program.optimizer)
            assert found == (first, {})
            program.expect(whole(first))
            program.expected.clear()
        with program.pipeline():
            program.go(iter(mine(range(first, first + 2))))
        hotrec.save_checkpoint(folder / name, program.model, program.optimizer, first + 2)
        program.check(whole(range(first, first + 2)))


def test_checkpoints_go_on_on_other_ranks(tmp_path: Path) -> None:
    run_ranks(resumes, 2, folder=tmp_path, first=0)
    run_ranks(resumes, 3, folder=tmp_path, first=2)


def test_a_table_of_bags_and_of_sequences_is_refused(one_rank: Any) -> None:
    class Twice(Both):
        def __init__(self) -> None:
            super().__init__()
            self.sequences = EmbeddingCollection([unpooled("item", "item", 40)])

    with pytest.raises(ValueError, match=r"^tables \['item'\]: expected "):
        hotrec.parallelize(
            Twice(),
            programs.some_hot(ALL_ROWS),
            **programs.RULES,
        )


def test_replicated_sequences_are_refused_on_a_cpu(one_rank: Any) -> None:
    """TorchRec returns wrong rows of them there."""
    model: nn.Module = Packed()
    sharding = ParameterConstraints(
        sharding_types=[ShardingType.DATA_PARALLEL.value],
        compute_kernels=[EmbeddingComputeKernel.DENSE.value],
    )
    topology = Topology(world_size=1, compute_device="cpu")
    planner = EmbeddingShardingPlanner(topology=topology, constraints={"seen": sharding})
    plan = planner.plan(model, [EmbeddingCollectionSharder()])
    with pytest.raises(ValueError, match=r"^table seen plan: .* got data_parallel"):
        hotrec.parallelize(model, "off", plan=plan, **programs.RULES)
