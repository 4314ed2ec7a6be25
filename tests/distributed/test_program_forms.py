"""Models and batches of unusual form: every choice trains them as the unsplit model, or refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import groupby, product
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from torchrec.streamable import Pipelineable

import hotrec
from hotrec.embedding.packed import PackedJaggedTensor
from hotrec.types import Partition, PipelineKind, TorchrecPlan
from tests.distributed.test_program import DENSE, EMBEDDING, mean_over_ranks
from tests.helpers.ranks import run_ranks
from tests.helpers.samples import sample
from tests.unit.planner.situations import torchrec_plan

GLOBAL_BATCH, NUM_STEPS = 24, 4
ROWS = {"user": 90, "item": 40}
CHOICES = ("look_ahead", "sparse_dist", "base", "hand_tuned", "off")


@dataclass
class Batch(Pipelineable):
    dense: torch.Tensor
    ids: KeyedJaggedTensor
    labels: torch.Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return Batch(*(part.to(device) for part in (self.dense, self.ids, self.labels)))  # type: ignore[attr-defined]

    def record_stream(self, stream: torch.Stream) -> None:
        for part in (self.dense, self.ids, self.labels):
            part.record_stream(stream)


def make_batch(
    step: int,
    rank: int,
    world_size: int,
    *,
    features: tuple[str, ...] = ("user", "item"),
    is_weighted: bool = False,
    most: int = 3,
    dtype: torch.dtype = torch.int64,
) -> Batch:
    """A rank's slice of the step's global batch, which is the same at any world size."""
    rng = np.random.default_rng((7, step))
    size = GLOBAL_BATCH // world_size
    mine = range(rank * size, (rank + 1) * size)
    dense = rng.standard_normal((GLOBAL_BATCH, 2)).astype(np.float32)
    labels = rng.integers(0, 2, GLOBAL_BATCH).astype(np.float32)
    lengths, ids, weights = [], [np.empty(0, np.int64)], [np.empty(0, np.float32)]
    for name in features:
        bags = [
            (rng.random(n) ** 3 * ROWS.get(name, 5)).astype(np.int64)
            for n in rng.integers(0, most + 1, GLOBAL_BATCH)
        ]
        factors = [rng.random(bag.size).astype(np.float32) + 0.5 for bag in bags]
        lengths += [bags[at].size for at in mine]
        ids += [bags[at] for at in mine]
        weights += [factors[at] for at in mine]
    return Batch(
        torch.from_numpy(dense[mine.start : mine.stop]),
        KeyedJaggedTensor(
            list(features),
            torch.from_numpy(np.concatenate(ids)).to(dtype),
            torch.from_numpy(np.concatenate(weights)) if is_weighted else None,
            lengths=torch.tensor(lengths),
        ),
        torch.from_numpy(labels[mine.start : mine.stop]),
    )


def shared_bags(step: int, rank: int, world_size: int, *, is_variable: bool) -> Batch:
    """The last feature, or both, have bags for half of the samples, which two samples share."""
    batch = make_batch(step, rank, world_size)
    size = len(batch.labels)
    strides = [size if is_variable else size // 2, size // 2]
    parts = [batch.ids[name].lengths()[:num] for name, num in zip(ROWS, strides, strict=True)]
    ids = [
        batch.ids[name].values()[: int(lengths.sum())]
        for name, lengths in zip(ROWS, parts, strict=True)
    ]
    inverse = torch.stack([torch.arange(size) % num for num in strides])
    features = KeyedJaggedTensor(
        list(ROWS),
        torch.cat(ids),
        lengths=torch.cat(parts),
        stride_per_key_per_rank=[[num] for num in strides] if is_variable else None,
        inverse_indices=(list(ROWS), inverse),
    )
    return Batch(batch.dense, features, batch.labels)


def other_keys(step: int, rank: int, world_size: int) -> Batch:
    """In another order in each step and on each rank; one that no table reads is in some."""
    batch = make_batch(step, rank, world_size, features=("zoo", "item", "user"))
    order = [[1, 2], [0, 1, 2], [2, 1], [2, 0, 1]][(step + rank) % 4]
    return Batch(batch.dense, batch.ids.permute(order), batch.labels)


def table(name: str, features: list[str] | None = None, **given: Any) -> EmbeddingBagConfig:
    given = {"num_embeddings": ROWS[name], "embedding_dim": 8} | given
    return EmbeddingBagConfig(name=name, feature_names=features or [name], **given)


class Model(nn.Module):
    """(batch) -> (loss, (loss,)); cases change a part of it."""

    def __init__(
        self,
        tables: list[EmbeddingBagConfig] | None = None,
        keys: tuple[str, ...] = ("user", "item"),
        *,
        is_weighted: bool = False,
    ) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.keys = list(keys)
        tables = tables or [table("user"), table("item")]
        self.bags = EmbeddingBagCollection(tables, is_weighted=is_weighted)
        self.hidden = nn.Linear(2 + 8 * len(keys), 8)
        self.out = nn.Linear(8, 1)

    def pooled(self, batch: Batch) -> list[torch.Tensor]:
        found = self.bags(batch.ids)
        return [found[name] for name in self.keys]

    def head(self, values: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.out(torch.tanh(self.hidden(values)))
        return logits.squeeze(-1)

    def loss(self, batch: Batch) -> torch.Tensor:
        logits = self.head(torch.cat([batch.dense, *self.pooled(batch)], dim=1))
        return nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)

    def forward(self, batch: Batch) -> Any:
        loss = self.loss(batch)
        return loss, (loss.detach(),)


class NoLayers(Model):
    def __init__(self) -> None:
        super().__init__()
        del self.hidden, self.out

    def head(self, values: torch.Tensor) -> torch.Tensor:
        return (values[:, 2:10] * values[:, 10:]).sum(1)


class HeldTwice(Model):
    """The collection is at three places of the tree, and called at the last."""

    def __init__(self) -> None:
        super().__init__()
        self.others = nn.ModuleDict({"again": nn.ModuleList([self.bags])})

    def pooled(self, batch: Batch) -> list[torch.Tensor]:
        found = self.others["again"][0](batch.ids)  # type: ignore[index]
        return [found[name] for name in self.keys]


class Sequences(Model):
    """With a table whose rows are not pooled, which stays TorchRec's."""

    def __init__(self) -> None:
        super().__init__(keys=("user", "item", "seen"))
        torch.manual_seed(4)
        config = EmbeddingConfig(
            name="seen", num_embeddings=40, embedding_dim=8, feature_names=["item"]
        )
        self.rows = EmbeddingCollection(tables=[config])

    def pooled(self, batch: Batch) -> list[torch.Tensor]:
        found, rows = self.bags(batch.ids), self.rows(batch.ids)["item"]
        sums = torch.segment_reduce(rows.values(), "sum", lengths=rows.lengths(), initial=0.0)
        return [found["user"], found["item"], sums]


class OfRank(Model):
    """Another model on each rank, as without a seed; the first rank's counts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8 + (dist.get_rank() if Shared.is_sharded else 0))
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -0.3, 0.3)


class Shared:
    """Whether the model that is made next is sharded."""

    is_sharded = False


class Gapped(Model):
    """Rows of each feature are read in one call, and twice."""

    def pooled(self, batch: Batch) -> list[torch.Tensor]:
        return [self.bags(batch.ids)["user"], self.bags(batch.ids)["item"]]


class LossAlone(Model):
    def forward(self, batch: Batch) -> Any:
        return self.loss(batch)


class LossInTuple(Model):
    def forward(self, batch: Batch) -> Any:
        return (self.loss(batch).reshape(1),)


class LossByName(Model):
    def forward(self, batch: Batch) -> Any:
        return {"loss": self.loss(batch)}


class Three(Model):
    def forward(self, batch: Batch) -> Any:
        return self.loss(batch), 1, None


class Detached(Model):
    def forward(self, batch: Batch) -> Any:
        return self.loss(batch).detach()


class OfSamples(Model):
    def forward(self, batch: Batch) -> Any:
        return self.loss(batch).expand(2, 2)


def frozen(*paths: str) -> Model:
    model = Model()
    for path in paths:
        model.get_submodule(path).requires_grad_(False)
    return model


MEAN = PoolingType.MEAN
weighted_batch = partial(make_batch, is_weighted=True)
ONE_CALL = "embedding module bags: expected one call in a forward of the model, got a second"
NO_WEIGHTS = "features weights: expected per-sample weights since is_weighted=True, got none"
NO_LAYERS = "pipeline look_ahead: expected trained dense layers, got none"
OWN_BAGS = "features: expected a bag of each feature for every sample, got bags "
NO_LOSS = "model: expected forward to return (loss, anything), or the loss"
# Model, batches, and by choice how the line begins that refuses them; "" for those not named.
CASES: dict[str, tuple[Callable[[], Model], Any, dict[str, str]]] = {
    "frozen layer": (lambda: frozen("hidden"), make_batch, {}),
    "frozen layers": (lambda: frozen("hidden", "out"), make_batch, {"look_ahead": NO_LAYERS}),
    "no layers": (NoLayers, make_batch, {"look_ahead": NO_LAYERS}),
    "weights undeclared": (Model, weighted_batch, {}),
    "weights": (partial(Model, is_weighted=True), weighted_batch, {}),
    "no weights": (
        partial(Model, is_weighted=True),
        make_batch,
        dict.fromkeys(CHOICES, NO_WEIGHTS),
    ),
    "no feature": (
        Model,
        partial(make_batch, features=("user",)),
        dict.fromkeys(CHOICES, "features: expected 'item' among the batch's features"),
    ),
    "other keys": (Sequences, other_keys, {}),
    "int32": (Model, partial(make_batch, dtype=torch.int32), {}),
    "mean of none": (
        lambda: Model([table("user", pooling=MEAN), table("item", pooling=MEAN)]),
        partial(make_batch, most=1),
        {},
    ),
    "one row": (lambda: Model([table("user"), table("item", num_embeddings=40)]), make_batch, {}),
    "own initial weights": (
        lambda: Model([table("user", init_fn=nn.init.ones_), table("item")]),
        make_batch,
        {},
    ),
    "one feature, two tables": (
        lambda: Model([table("user", ["user", "item"]), table("item")], ("item@user", "item@item")),
        make_batch,
        {},
    ),
    "output unused": (lambda: Model(keys=("user",)), make_batch, {}),
    "held twice": (HeldTwice, make_batch, {}),
    "called twice": (
        Gapped,
        make_batch,
        {name: ONE_CALL for name in CHOICES if name != "look_ahead"},
    ),
    "sequences": (Sequences, make_batch, {}),
    "unseeded": (OfRank, make_batch, {}),
    "variable batch size": (
        Model,
        partial(shared_bags, is_variable=True),
        dict.fromkeys(CHOICES, OWN_BAGS),
    ),
    "shared bags": (
        Model,
        partial(shared_bags, is_variable=False),
        dict.fromkeys(CHOICES, OWN_BAGS),
    ),
    "loss alone": (LossAlone, make_batch, {}),
    "loss in a tuple": (LossInTuple, make_batch, {}),
    "loss by name": (LossByName, make_batch, dict.fromkeys(CHOICES, f"{NO_LOSS}, got dict.")),
    "three values": (
        Three,
        make_batch,
        dict.fromkeys(CHOICES, f"{NO_LOSS}, got tuple of Tensor, int, NoneType."),
    ),
    "detached": (
        Detached,
        make_batch,
        dict.fromkeys(CHOICES, "model: expected a loss with a gradient, got one without."),
    ),
    "of samples": (
        OfSamples,
        make_batch,
        dict.fromkeys(CHOICES, "model: expected a scalar loss, got one of shape (2, 2)"),
    ),
}


def reference(make: Callable[[], Model], batch: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and parameters of the unsplit model on the global batches, in one process."""
    model = make()
    kinds = (EmbeddingBagCollection, EmbeddingCollection)
    of_tables = {p for m in model.modules() if isinstance(m, kinds) for p in m.parameters()}
    named = [p for p in model.parameters() if p.requires_grad]
    tables = [parameter for parameter in named if parameter in of_tables]
    layers = [parameter for parameter in named if parameter not in of_tables]
    optimizers = [RowWiseAdagrad(tables, lr=0.2, eps=1e-8)] + ([DENSE(layers)] if layers else [])
    losses = []
    for step in range(NUM_STEPS):
        output = model(batch(step, 0, 1))
        loss = output if isinstance(output, torch.Tensor) else output[0]
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def trained(make: Callable[[], Model], batch: Any, choice: str) -> tuple[list[float], Any]:
    hot: Any = Partition(ROWS, {name: np.arange(7) for name in ROWS})
    given: dict[str, Any] = {"pipeline": choice}
    if choice not in PipelineKind.__members__:
        plan = TorchrecPlan.__members__.get(choice)
        kind = PipelineKind.sparse_dist
        hot = hotrec.Choice(torchrec_plan(plan, kind), "asked") if plan else "off"
        given = {}
    Shared.is_sharded = True
    model, optimizer = hotrec.parallelize(
        make(), hot, embedding_optimizer=EMBEDDING, dense_optimizer=DENSE, **given
    )
    Shared.is_sharded = False
    rank, size = dist.get_rank(), dist.get_world_size()
    with hotrec.Pipeline(model, optimizer, torch.device("cpu")) as pipeline:
        data = iter([batch(step, rank, size) for step in range(NUM_STEPS)])
        losses = []
        for _ in range(NUM_STEPS):
            output = pipeline.progress(data)
            loss = output if isinstance(output, torch.Tensor) else output[0]
            losses.append(mean_over_ranks(loss.squeeze()))
        with pytest.raises(StopIteration):
            pipeline.progress(data)
    return losses, model


def train_all() -> None:
    """On one rank or on three; all on both where tables run whole."""
    # The number of choices is odd: a form is on one rank under one choice, on three under the next.
    assert len(CHOICES) % 2 == 1
    pairs = sample([*product(CASES, CHOICES)], int(dist.get_world_size() > 1), 2)
    for case, choices in groupby(pairs, key=lambda pair: pair[0]):
        make, batch, refused = CASES[case]
        expected = None if len(refused) == len(CHOICES) else reference(make, batch)
        for _, choice in choices:
            name = f"{case} {choice}"
            if choice in refused:
                with pytest.raises((ValueError, RuntimeError)) as caught:
                    trained(make, batch, choice)
                assert refused[choice] in str(caught.value), (name, caught.value)
                continue
            losses, model = trained(make, batch, choice)
            assert expected is not None
            np.testing.assert_allclose(losses, expected[0], rtol=1e-5, err_msg=name)
            gathered = hotrec.gather_tables(model)
            layers = {key: p for key, p in model.named_parameters() if "bags" not in key}
            for key, value in expected[1].items():
                found = gathered[key.split(".")[-2]] if "bags" in key else layers.get(key)
                if found is not None and found.shape == value.shape:
                    found = found.detach()
                    np.testing.assert_allclose(found, value, atol=1e-5, err_msg=f"{name} {key}")


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_choice_trains_every_form_or_says_why_not(world_size: int) -> None:
    run_ranks(train_all, world_size, timeout_s=300)


class Drops(Model):
    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.hidden = nn.Linear(18, 8, device=device)
        torch.manual_seed(77)

    def head(self, values: torch.Tensor) -> torch.Tensor:
        return super().head(self.drop(values))


def train_at_random() -> dict[str, list[list[float]]]:
    makes = {"cpu": Drops, "meta": partial(Drops, "meta")}
    return {
        name: [trained(make, make_batch, choice)[0] for choice in CHOICES]
        for name, make in makes.items()
    }


def test_what_a_model_draws_does_not_depend_on_the_choice() -> None:
    """Dropout in training, and layers on the device meta, which get their weights when sharded."""
    for found in run_ranks(train_at_random, 2, timeout_s=120):
        for losses in found.values():
            for other in losses[1:]:
                np.testing.assert_allclose(other, losses[0], rtol=1e-5)


def own_rules() -> None:
    """Tables that TorchRec's plan replicates follow their own rule under "off"."""
    expected, parameters = reference(Model, make_batch)
    losses, model = trained(Model, make_batch, "off")
    sharding = model.plan.plan["bags"]
    assert "data_parallel" in {sharding[name].sharding_type for name in ROWS}
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


def test_off_trains_replicated_tables_by_their_rule() -> None:
    run_ranks(own_rules, 2, timeout_s=60)


def other_tables() -> str:
    rows = {"user": 90, "item": 40 + dist.get_rank()}
    model = Model([table(name, num_embeddings=num) for name, num in rows.items()])
    with pytest.raises(ValueError, match="table item") as caught:
        hotrec.parallelize(model, "off", embedding_optimizer=EMBEDDING, dense_optimizer=DENSE)
    return str(caught.value)


def test_all_ranks_hear_of_tables_that_differ() -> None:
    first, second = run_ranks(other_tables, 2, timeout_s=60)
    assert first == second
    assert "table item: expected the same on every rank, got" in first


FORM_ROWS = {"few": 5, "many": 90, "only": 1, "less": 7, "more": 40}


class Slotted:
    """A batch of no base class, found by its slots, whose ``to`` has its own names."""

    __slots__ = ("ids", "labels")

    def __init__(self, ids: KeyedJaggedTensor, labels: torch.Tensor) -> None:
        self.ids, self.labels = ids, labels

    def to(self, target: torch.device, non_blocking: bool = False) -> Slotted:
        return Slotted(self.ids.to(target), self.labels.to(target))

    def record_stream(self, _: torch.Stream) -> None:
        raise NotImplementedError


def form_batch(step: int, ranks: list[int], sizes: list[int]) -> Slotted:
    """The samples of these ranks; ids in int32 on the first, where it is alone."""
    ids: dict[str, list[torch.Tensor]] = {name: [torch.empty(0).long()] for name in FORM_ROWS}
    lengths: dict[str, list[torch.Tensor]] = {name: [] for name in FORM_ROWS}
    labels = []
    for rank in ranks:
        drawn = torch.Generator().manual_seed(100 * step + rank)
        labels.append(torch.randint(2, (sizes[rank],), generator=drawn).float())
        for name, num_rows in FORM_ROWS.items():
            of_rank = torch.randint(4, (sizes[rank],), generator=drawn)
            lengths[name].append(of_rank)
            ids[name].append(torch.randint(num_rows, (int(of_rank.sum()),), generator=drawn))
    values = torch.cat([part for name in FORM_ROWS for part in ids[name]])
    features = KeyedJaggedTensor(
        list(FORM_ROWS),
        values.int() if ranks == [0] else values,
        torch.linspace(0.5, 1.5, 97)[values],
        lengths=torch.cat([part for name in FORM_ROWS for part in lengths[name]]),
    )
    return Slotted(features, torch.cat(labels))


def sum_rows(found: JaggedTensor) -> torch.Tensor:
    if isinstance(found, PackedJaggedTensor):
        found = found.materialize()
    lengths = found.lengths().long()
    sample = torch.repeat_interleave(torch.arange(lengths.numel()), lengths)
    zeros = torch.zeros(lengths.numel(), found.values().shape[1])
    return zeros.index_add(0, sample, torch.tanh(found.values()))


@torch.fx.wrap
def read_all(bags: Any, *sequences: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Everything in the order of the outputs, (B, 32), and by key."""
    sums = {name: sum_rows(rows) for found in sequences for name, rows in found.items()}
    by_key = {name: bags[name].detach() for name in list(bags.keys())} | sums
    return torch.cat([bags.values(), *sums.values()], dim=1), by_key


class ReadsAll(nn.Module):
    """Reads every output in its order: ``values()`` of bags, the dictionary of sequences."""

    def __init__(self, *, is_weighted: bool, is_packed: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        pooling = PoolingType.SUM if is_weighted else PoolingType.MEAN
        few = EmbeddingBagConfig(
            name="few",
            num_embeddings=5,
            embedding_dim=4,
            feature_names=["few"],
            pooling=pooling,
        )
        many = EmbeddingBagConfig(
            name="many", num_embeddings=90, embedding_dim=8, feature_names=["many", "few"]
        )
        self.bags = EmbeddingBagCollection([few, many], is_weighted=is_weighted)
        only, less, more = [
            EmbeddingConfig(
                name=name,
                num_embeddings=FORM_ROWS[name],
                embedding_dim=4,
                feature_names=[name],
            )
            for name in ("only", "less", "more")
        ]
        self.first, self.second = EmbeddingCollection([only]), EmbeddingCollection([less, more])
        if is_packed:
            hotrec.use_packed_jagged_tensor(self.second)
        self.out = nn.Linear(20 + 12, 1)

    def forward(self, batch: Any) -> Any:
        found = read_all(self.bags(batch.ids), self.first(batch.ids), self.second(batch.ids))
        logits = self.out(found[0]).squeeze(-1)
        return nn.functional.binary_cross_entropy_with_logits(logits, batch.labels), found[1]


def read_in_every_way() -> None:
    """On two and three ranks, one of which has no samples in each step."""
    world_size, me = dist.get_world_size(), dist.get_rank()
    rule: Any = partial(torch.optim.SGD, lr=0.5)
    hot = Partition(FORM_ROWS, {name: np.arange(2) for name in ("many", "less")})
    for is_weighted, choice in product((False, True), (*CHOICES, "planner", "table_wise")):
        make = partial(ReadsAll, is_weighted=is_weighted, is_packed=is_weighted)
        plan = TorchrecPlan.__members__.get(choice)
        given: dict[str, Any] = {"hot": hot, "pipeline": choice}
        if choice not in PipelineKind.__members__:
            kind = PipelineKind.base
            made = hotrec.Choice(torchrec_plan(plan, kind), "asked") if plan else "off"
            given = {"hot": made}
        model, optimizer = hotrec.parallelize(
            make(), embedding_optimizer=rule, dense_optimizer=rule, batch_size=4, **given
        )
        unsplit = make()
        expected = rule(unsplit.parameters())
        sizes = [
            [4 if step % world_size != rank else 0 for rank in range(world_size)]
            for step in range(NUM_STEPS)
        ]
        mine = [form_batch(step, [me], of_ranks) for step, of_ranks in enumerate(sizes)]
        with hotrec.Pipeline(model, optimizer, torch.device("cpu")) as pipeline:
            data = iter(mine)
            for step, of_ranks in enumerate(sizes):
                everything = form_batch(step, list(range(world_size)), of_ranks)
                loss, wanted = unsplit(everything)
                begin = sum(of_ranks[:me])
                found = pipeline.progress(data)
                name = f"{choice} weighted {is_weighted} step {step}"
                assert list(found) == list(wanted), name
                for key, values in wanted.items():
                    values = values[begin : begin + of_ranks[me]]
                    torch.testing.assert_close(found[key], values, rtol=1e-5, atol=1e-6, msg=name)
                expected.zero_grad()
                loss.backward()
                expected.step()
        tables = hotrec.gather_tables(model)
        for key, weight in unsplit.state_dict().items():
            if not key.startswith("out"):
                found = tables[key.split(".")[-2]]
                torch.testing.assert_close(found, weight, rtol=1e-5, atol=1e-5, msg=f"{name} {key}")


@pytest.mark.parametrize("world_size", [2, 3])
def test_outputs_have_the_form_of_the_unsplit_models_under_every_choice(world_size: int) -> None:
    run_ranks(read_in_every_way, world_size, timeout_s=200)
