"""What a program may do to the model that ``parallelize`` returned: right, or refused in a line.

Under every choice that ``auto`` can make it ends with the losses and weights of the unsplit model
on the concatenated batches, or with an error on every rank.
"""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import hotrec
from hotrec.runtime.ranks import RankError, broadcast_object
from hotrec.types import Placement, Tier, TorchrecPlan
from tests.distributed import programs
from tests.distributed.programs import Batch, Choice, Model, Program, mine, once, refused, whole
from tests.helpers.ranks import run_ranks
from tests.helpers.samples import is_whole

SIZES = (programs.equal, programs.rising, programs.one_empty, programs.rising)


class Output(NamedTuple):
    loss: torch.Tensor
    parts: tuple[torch.Tensor, torch.Tensor]


class Named(Model):
    def forward(self, batch: Batch) -> Any:
        return Output(*super().forward(batch))


class Apart(Model):
    """Reads items in features of their own: several bags of each sample, or one bag of a batch."""

    def __init__(self, num_bags: int | None) -> None:
        super().__init__()
        self.bags = EmbeddingBagCollection([programs.table("user")])
        self.items = EmbeddingBagCollection([programs.table("item")])
        self.num_bags = num_bags

    def pooled(self, batch: Batch) -> list[torch.Tensor]:
        items = self.items(batch.other).values()
        if self.num_bags is not None:
            items = items.view(-1, self.num_bags, programs.DIM).sum(1)
        return [self.bags(batch.ids).values(), items * torch.ones_like(batch.dense[:, :1])]

    def features(self, batch: Batch) -> Batch:
        """Items that depend on the sample, or on none."""
        ids = torch.arange(40)[3:4]
        if self.num_bags is not None:
            drawn = (batch.dense[:, :1] * 100).long()
            ids = ((drawn + 7 * torch.arange(self.num_bags)) % 40).flatten()
        other = KeyedJaggedTensor(["item"], ids, lengths=torch.ones_like(ids))
        return replace(batch, ids=batch.ids.permute([0]), other=other)


class Sometimes(Model):
    """Uses its last layer in some steps."""

    is_used = True

    def head(self, values: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.hidden(values))
        return self.out(hidden).squeeze(-1) if Sometimes.is_used else hidden.sum(1)


class Switching(Model):
    """Reads other features in evaluation than in training."""

    def pooled(self, batch: Batch) -> list[torch.Tensor]:
        return [self.bags(batch.ids if self.training else batch.other).values()]


def last_rank() -> int:
    return dist.get_world_size() - 1


def trains_in_a_loop_of_its_own(choice: Choice) -> None:
    """Before, between and after the steps of a pipeline, which holds batches meanwhile."""
    if choice.is_ahead:
        return
    program = Program(choice)
    found: list[weakref.ref[torch.Tensor]] = []
    program.model.register_forward_hook(lambda *of: found.append(weakref.ref(of[-1][0])))
    first, second = mine(2)
    program.by_hand(first)
    with torch.no_grad():  # trains nothing
        program.model(first)
    program.by_hand(replace(second, ids=second.ids.permute([1, 0])))  # in another order of keys
    with program.pipeline():
        data = iter(mine(range(2, 5)))
        program.go(data, 1)
        if not choice.is_plain:
            with refused(r"optimizer.step\(\)", "got none"):
                program.optimizer.step()
        for batch in mine([9, 10]):
            program.by_hand(batch)
        program.go(data)

    def closure() -> torch.Tensor:
        program.optimizer.zero_grad()
        loss: torch.Tensor = program.model(mine([8])[0])[0]
        loss.backward()
        return loss.detach()

    program.losses.append(programs.mean_over_ranks(program.optimizer.step(closure)))
    gc.collect()
    assert not any(loss() is not None for loss in found)  # with their graphs
    program.check(whole([0, 1, 2, 9, 10, 3, 4, 8]))
    with refused("batches", "got list"):
        program.pipeline().progress(mine(1))  # type: ignore[arg-type]


def is_not_trained_outside(choice: Choice) -> None:
    """Under look-ahead: without a pipeline, beside one, and after one."""
    if not choice.is_ahead:
        return
    program, [batch] = Program(choice), mine(1)
    model, optimizer = program.model, program.optimizer

    def pipeline_of(kind: Any) -> Any:
        return kind(model, optimizer, programs.CPU).progress(iter(mine(5)))

    ways: list[Callable[[], Any]] = [
        lambda: model(batch),
        lambda: model.module(batch),
        lambda: model.module.bags(batch.ids),
        lambda: nn.Sequential(model)(batch),
        optimizer.step,
        partial(pipeline_of, TrainPipelineSparseDist),
        partial(pipeline_of, TrainPipelineBase),
    ]

    def refuses(ways: Iterable[Callable[[], Any]]) -> None:
        for way in ways:
            with refused("pipeline look_ahead"):
                way()

    refuses(ways)
    for num in (4, 2):
        with program.pipeline():
            data = iter(mine(num))
            program.go(data, 1)
            with refused("hotrec.Pipeline", "second"):
                program.pipeline()
            refuses(ways[:-2])
            program.go(data)
        program.check(whole(num))
        refuses(ways)


def is_trained_step_by_step(choice: Choice) -> None:
    """Rows are updated in backward: by one pass through the whole model."""
    if choice.is_ahead or choice.is_plain:
        return
    first, second = mine(2)

    def twice(program: Program) -> None:
        loss = program.model(first)[0]
        loss.backward(retain_graph=True)
        loss.backward()

    def add_up(program: Program) -> None:
        sum(program.model(batch)[0] for batch in (first, second)).backward()  # type: ignore[union-attr]

    def keep_gradients(program: Program) -> None:
        for batch in (first, second):
            program.model(batch)[0].backward()

    def clear(program: Program) -> None:
        program.by_hand(first, program.optimizer.zero_grad)

    def keep_after_step(program: Program) -> None:
        program.by_hand(first)
        program.model(second)[0].backward()

    ways: list[tuple[str, str, Callable[[Program], Any]]] = [
        ("parameter out.bias", "earlier", keep_after_step),
        ("embedding module bags", "part", lambda of: of.model.module(first)),
        ("embedding module bags", "got a second", add_up),
        ("embedding module bags", "got a second", keep_gradients),
        ("(?:parameter .+|embedding rows)", "got a second", twice),
        (r"optimizer.step\(\)", "got none", clear),
    ]
    for key, got, way in ways:
        with refused(key, got):
            way(Program(choice))


def clip(parameters: Iterable[torch.Tensor]) -> None:
    nn.utils.clip_grad_norm_(parameters, 0.01)


def clips_gradients(choice: Choice) -> None:
    """Those of the dense layers, since rows are updated in backward."""
    if choice.is_ahead or choice.is_plain:
        return
    # Of two tables TorchRec replicates the one that has fewer rows than a batch.
    mixed = programs.of_plan(TorchrecPlan.hand_tuned)
    for program in (Program(choice), Program(mixed, batch_size=60)):
        layers = [p for name, p in program.unsplit.named_parameters() if "bags" not in name]
        for one in mine(2):
            program.by_hand(one, partial(clip, [*program.model.parameters()]))
        program.expect(whole(2), partial(clip, layers))
        program.check()


def follows_a_schedule(choice: Choice) -> None:
    """Of torch's, which also writes into the groups of the optimizer."""
    program, data = Program(choice), iter(mine(4))
    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(one, lambda step: 0.5**step)
        for one in (program.optimizer, *program.unsplit_rules)
    ]
    with program.pipeline():
        for step in range(4):
            program.go(data, 1)
            program.expect(whole([step]))
            for scheduler in schedulers:
                scheduler.step()
    program.check()


def has_ranks_with_other_numbers_of_batches(choice: Choice) -> None:
    last = last_rank()
    for fewer in (0, 1, 3) if last else ():
        program, is_last = Program(choice), dist.get_rank() == last
        with program.pipeline():
            with refused("batches", f"got {fewer} on rank {last} and more than {fewer}"):
                program.go(iter(mine(fewer if is_last else 5)))
            program.go(iter(mine([7, 8])))
            with refused("batches", f"got 1 on rank {last} and more than 1 on rank 0"):
                program.evaluates(iter(mine(1 if is_last else 3)), whole(3))
        program.check(whole([*range(fewer), 7, 8]))


def has_batches_of_other_sizes(choice: Choice) -> None:
    """In every step, in some, and with nothing on a rank; beside features that no table reads."""
    found: list[Batch] = []
    expected: list[Batch] = []
    for step, sizes in enumerate(SIZES):
        [batch] = mine([step], sizes=sizes)
        num = 3 * batch.labels.numel() + 1
        unread = KeyedJaggedTensor(["unread"], torch.arange(num), lengths=torch.ones(num).long())
        found.append(replace(batch, other=unread))
        expected += whole([step], sizes=sizes)
    program = Program(choice, Named)
    with program.pipeline():
        program.go(iter(found))
        nothing = mine(2, sizes=lambda _: [0] * dist.get_world_size())
        with refused("batch 1", "got none"):
            program.go(iter([mine(1)[0], *nothing]))
    program.check([*expected, *whole(1)])
    if choice.is_ahead:
        return
    program = Program(choice, Named)
    for batch in found[:2]:
        program.by_hand(batch)
    program.check(expected[:2])
    if last_rank():
        program.model.module.forward = program.model.module.logits
        with refused("batches", "got 4 on rank 0 and 9 on rank 1"):
            program.model(found[1])


def has_collections_of_other_bags(choice: Choice) -> None:
    """As many for each sample everywhere, or one for all of a batch."""
    for num in (3, None):
        make = partial(Apart, num)
        program, features = Program(choice, make), make().features
        batches, everything = (
            [*map(features, of)]
            for of in (mine(3, sizes=programs.rising), whole(3, sizes=programs.rising))
        )
        with program.pipeline() as pipeline:
            if num is None and last_rank():
                with refused("features", "got by rank [1, 1"):
                    pipeline.progress(iter(batches))
                if not choice.is_ahead:
                    with refused("features", "got by rank [1, 1"):
                        program.by_hand(batches[0])
                continue
            program.go(iter(batches[:2]))
        if not choice.is_ahead:
            program.by_hand(batches[2])
        program.check(everything[: len(program.losses)])


class Loader:
    """As torch's ``DataLoader`` with persistent workers: its own iterator, started anew by iter."""

    def __init__(self, of: Sequence[Batch], fails: Callable[[int], None] = lambda at: None) -> None:
        self.of, self.fails, self.at = of, fails, 0

    def __iter__(self) -> Loader:
        self.at = 0
        return self

    def __next__(self) -> Batch:
        if self.at == len(self.of):
            raise StopIteration
        self.fails(self.at)
        self.at += 1
        return self.of[self.at - 1]


class Telling(Model):
    """Returns which batch it computed."""

    def forward(self, batch: Batch) -> Any:
        loss, (_, logits) = super().forward(batch)
        return loss, (loss.detach(), logits.detach(), batch.dense[0, 0])


def takes_every_batch_once(choice: Choice) -> None:
    """Whatever the order of training, evaluations, errors of loaders and new pipelines."""
    rng = np.random.default_rng((len(choice.name), last_rank()))
    program, order, held_out = Program(choice, Telling), list[int](), itertools.count(500)
    steps = [range(100 * at, 100 * at + int(rng.integers(2, 9))) for at in range(1, 4)]
    given = [mine(of) for of in steps]
    fails = [once(OSError("gone"), [last_rank()], int(rng.integers(1, 4))) for _ in steps]
    sources = [iter(Loader(of, fail)) for of, fail in zip(given, fails, strict=True)]
    place = dict(
        zip(
            (float(b.dense[0, 0]) for of in given for b in of), itertools.chain(*steps), strict=True
        )
    )

    def train(at: int, num: int = 1) -> bool:
        """Whether the iterator has not ended; an error of it is raised once."""
        for _ in range(num):
            try:
                loss, _, first = program.open.progress(sources[at])
            except StopIteration:
                return False
            except (OSError, RankError):
                continue
            program.losses.append(programs.mean_over_ranks(loss))
            order.append(place[float(first)])
            program.expect(whole(order[-1:]))
        return True

    program.pipeline()
    for _ in range(12):
        match rng.integers(4):
            case 0:  # a pass that is left midway, and a call by hand
                wanted = [next(held_out), next(held_out)]
                program.evaluates(iter(mine([*wanted, 0])), whole(wanted))
                with programs.evaluating(program.model):
                    program.model(mine(wanted[:1])[0])
                assert program.optimizer.state_dict()
            case 1:  # which computes what the one before had taken
                program.open.close()
                program.pipeline()
                for at in rng.permutation(3):
                    train(at)
            case _:
                train(int(rng.integers(3)), int(rng.integers(1, 4)))
    for at in range(3):
        while train(at):
            pass
    program.open.close()
    for of in steps:
        assert [step for step in order if step in of] == list(of)
    program.check()


def goes_on_with_one_iterator(choice: Choice) -> None:
    """In every epoch, in training and in evaluation; also with the one that is trained on."""
    program, data, held_out = Program(choice), Loader(mine(3)), Loader(mine(range(50, 53)))
    with program.pipeline():
        for num in (2, 3):
            program.go(iter(data))
            program.expect(whole(3))
            program.evaluates(iter(held_out), whole(range(50, 50 + num)))
        last = iter(mine(5))
        program.go(last, 1)
        program.expect(whole(1))
        is_held = (
            refused("pipeline look_ahead", "batches in flight")
            if choice.is_ahead
            else nullcontext()
        )
        with is_held:  # as if nothing was read ahead
            program.evaluates(last, whole([1]))
        program.go(last)
    program.check(whole(range(1 if choice.is_ahead else 2, 5)))


def closes_midway(choice: Choice) -> None:
    """Closed pipelines keep no loader; an interrupt of one loses no batch."""
    program, fail = Program(choice), once(KeyboardInterrupt("gone"), [0, last_rank()], 0)
    data = iter(Loader(mine(8), fail))
    with program.pipeline(), pytest.raises((KeyboardInterrupt, RankError), match="gone"):
        program.go(data)
    batches = (batch for batch in mine(8))
    is_held = weakref.ref(batches)
    for _ in range(2):
        with program.pipeline() as pipeline:
            program.go(batches, 2)
    with program.pipeline():
        program.go(iter(mine([20])))
    with refused("hotrec.Pipeline", "closed"):
        pipeline.progress(iter(mine(1)))
    del batches
    gc.collect()
    assert is_held() is None
    program.check(whole([*range(4), 20]))


def uses_a_layer_in_some_steps(choice: Choice) -> None:
    """A layer may be used never, too; otherwise DDP would stop, or leave it apart in the end."""
    for is_used, by_hand in itertools.product((True, False), (False, not choice.is_ahead)):
        Sometimes.is_used = is_used
        program, data = Program(choice, Sometimes), iter(mine(3))
        with nullcontext() if by_hand else program.pipeline() as pipeline:
            step = partial(program.go, data, 1) if pipeline else lambda: program.by_hand(next(data))  # noqa: B023
            step()
            if pipeline is not None:
                pipeline.drain()
            program.check(whole(1))
            Sometimes.is_used = not is_used
            with refused(r"parameter out\.\w+", "got none" if is_used else "got one"):
                step()
    Sometimes.is_used = True


def broken(name: str, batch: Batch) -> Any:
    """A batch with something wrong in its features."""
    keys, values, lengths = list(programs.ROWS), batch.ids.values().clone(), batch.ids.lengths()
    num, given = len(batch.labels), dict[str, Any]()
    match name:
        case "a key is missing":
            keys = ["user", "other"]
        case "an id is too large":
            values[-1] = programs.ROWS["item"]
        case "an id is negative":
            values[0] = -1
        case "lengths do not add up":
            values = values[:-1]
        case "a feature has other bags":
            lengths, given = lengths[:-2], {"stride_per_key_per_rank": [[num], [num - 2]]}
            values = values[: int(lengths.sum())]
        case "ids are no integers":
            values = values + 0.75
        case "it cannot be moved":
            return SimpleNamespace(**vars(batch))
        case "it is None":
            return None
    return replace(batch, ids=KeyedJaggedTensor(keys, values, lengths=lengths, **given))


BROKEN = {
    "a key is missing": ("features", "'item'"),
    "an id is too large": ("table item feature item", "got 40"),
    "an id is negative": ("table user feature user", "got -1"),
    "lengths do not add up": ("features lengths", ""),
    "a feature has other bags": ("features", "'user': "),
    "ids are no integers": (r"features \['user', 'item'\] ids", "got float32"),
    "it cannot be moved": ("batch SimpleNamespace", r"got no to()"),
    "it is None": ("batch NoneType", "got no to()"),
}


def has_features_that_cannot_be_looked_up(choice: Choice) -> None:
    """On one rank, in the third batch."""
    for name, error in BROKEN.items():
        program, data = Program(choice), mine(5)
        if dist.get_rank() == last_rank():
            data[2] = broken(name, data[2])
        with program.pipeline():
            with refused(*error):
                program.go(iter(data))
            with refused(*error):
                program.evaluates(iter(data[2:3]), whole(1))
        if choice.kind.name != "base":  # where forward alone can tell, rows may be updated in part
            program.check(whole(2))


def fails_inside_a_step(choice: Choice) -> None:
    """What goes on with the model is refused, in any loop; what was trained before is kept.

    In evaluation nothing was updated, so that a new pipeline goes on; several ranks may be apart.
    """
    last, errors = last_rank(), (ArithmeticError("halt"), KeyboardInterrupt("halt"))
    for error, is_evaluated in itertools.product(errors, (False, True)):
        program, data = Program(choice), iter(mine(5))
        model, optimizer, pipeline = program.model, program.optimizer, program.pipeline()
        program.go(data, 1)
        fail = once(error, range(last + 1))
        model.module.out.register_forward_hook(lambda *_, fail=fail: fail(0))
        step = partial(pipeline.progress, data)
        if is_evaluated:
            step = partial(program.evaluates, iter(mine(1)), whole(1))
        with pytest.raises(type(error), match="halt"):
            step()
        for source in (data, iter(mine(5))):
            with pytest.raises(RuntimeError, match="halt"):
                pipeline.progress(source)
        pipeline.close()
        if is_evaluated and not last:
            with program.pipeline():
                program.go(data)
            program.check(whole(5))
            continue
        with TemporaryDirectory() as folder:
            ways: list[Callable[[], Any]] = [
                program.pipeline,
                partial(model, mine(1)[0]),
                partial(hotrec.save_checkpoint, folder, model, optimizer, 1),
                partial(hotrec.load_checkpoint, folder, model, optimizer),
            ]
            for way in ways:
                with pytest.raises(RuntimeError, match=r"expected .*halt"):
                    way()
            assert not list(Path(folder).iterdir())
        program.check(whole(1))


def changes_what_was_read_once(choice: Choice) -> None:
    """Refused before the step, which is made once the change is undone."""
    program = Program(choice)
    model, optimizer = program.model, program.optimizer
    hidden, parts = dict(model.named_parameters())["hidden.weight"], dict(optimizer.optimizers)
    options = "optimizer options of embedding rows"

    def freeze(is_frozen: bool) -> None:
        hidden.requires_grad_(not is_frozen)

    def set_in(part: str, name: str, values: tuple[float, float], is_changed: bool) -> None:
        for group in parts[part].param_groups:
            group[name] = values[is_changed]

    ways: list[tuple[Callable[[bool], None], str, str]] = [
        (freeze, r"parameter hidden\.weight", "frozen")
    ]
    if "hot" in parts:
        ways.append((partial(set_in, "fused", "lr", (0.8, 0.01)), options, "'lr'"))
    if "tables" in parts:
        decay = partial(set_in, "tables", "weight_decay", (0.0, 0.5))
        ways.append((decay, options, "weight_decay"))
    for other in (torch.optim.Adagrad(model.parameters()), Program(choice).optimizer):
        with refused(r"optimizer \w+", "got another"):
            hotrec.Pipeline(model, other, programs.CPU)
    data = iter(mine(5))
    with program.pipeline() as pipeline:
        program.go(data, 1)
        for change, key, got in ways:
            change(True)
            with refused(key, got):
                pipeline.progress(data)
            if not choice.is_ahead and not choice.is_plain:
                with refused(key, got):
                    model(mine(1)[0])
            change(False)
        for disabled in (torch.no_grad(), torch.inference_mode()):
            with refused(r"hotrec.Pipeline.progress", "no_grad"), disabled:
                pipeline.progress(data)
        program.go(data)
        program.check(whole(5))
        model.double()
        with refused(r"parameter [\w.]+", "float64"):
            pipeline.progress(iter(mine(1)))


def with_slots(choice: Choice) -> list[Choice]:
    """Under look-ahead with rows in slots, too."""
    cached = replace(choice, hot=Placement.alike(programs.some_hot(), Tier.CACHED, 0.9))
    return [choice, cached] if choice.is_ahead else [choice]


def loads_weights_midway(choice: Choice) -> None:
    """With batches prefetched, which then read the loaded rows; with rows in slots, too."""
    for of in with_slots(choice):
        program, data = Program(of), iter(mine(7))
        with program.pipeline(), TemporaryDirectory() as own:
            folder = broadcast_object(own)
            program.go(data, 2)
            program.expect(whole(2))
            hotrec.save_checkpoint(folder, program.model, program.optimizer, 2)
            weights = copy.deepcopy(program.unsplit.state_dict())
            program.go(data, 2)
            program.expect(whole([2, 3]))
            hotrec.load_checkpoint(folder, program.model, program.optimizer)
            program.unsplit.load_state_dict(weights)
            program.evaluates(iter(mine([50])), whole([50]))
            program.go(data)
            program.expect(whole(range(4, 7)))
        with program.pipeline():
            program.evaluates(iter(mine([50])), whole([50]))
        program.check()


def writes_tables_in_place(choice: Choice) -> None:
    """Between steps, with batches prefetched, also in ways that torch does not count."""
    for of in with_slots(choice):
        program, data = Program(of), iter(mine(8))
        tables = {name: p for name, p in program.model.named_parameters() if "bags" in name}

        def of_state(model: nn.Module = program.model) -> list[torch.Tensor]:
            found = [value for name, value in model.state_dict().items() if "bags" in name]
            shards = [v.local_shards() if hasattr(v, "local_shards") else None for v in found]
            pairs = zip(found, shards, strict=True)
            return [t for v, of in pairs for t in ([v] if of is None else [s.tensor for s in of])]

        ways: list[Callable[[], list[torch.Tensor]]] = [
            lambda tables=tables: [*tables.values()],  # type: ignore[misc]
            of_state,
            lambda tables=tables: [p.data for p in tables.values()],  # type: ignore[misc]
        ]
        with program.pipeline() as pipeline:
            for way, tensors in enumerate(ways):
                program.go(data, 2)
                program.expect(whole([2 * way, 2 * way + 1]))
                pipeline.drain()
                with torch.no_grad():
                    for tensor in (*tensors(), *program.unsplit.bags.parameters()):
                        tensor.mul_(-1.5)
                program.evaluates(iter(mine([50 + way])), whole([50 + way]))
            program.go(data)
        program.check(whole([6, 7]))


def reads_other_features_in_evaluation(choice: Choice) -> None:
    """Whatever features the first step reads, which TorchRec's pipeline goes on to read."""
    program, batches, everything = Program(choice, Switching), mine(3), whole(3)
    for batch in (*batches, *everything):
        ids = batch.ids
        batch.other = ids
        batch.ids = KeyedJaggedTensor(ids.keys(), ids.values() % 7, lengths=ids.lengths())
    with program.pipeline() as pipeline:
        data = iter(batches)
        if choice.is_ahead:
            with refused("batch Batch", "got them in 2 of 2"):
                pipeline.progress(data)
            return
        program.go(data, 1)
        program.expect(everything[:1])
        program.evaluates(iter(batches), everything)
        if choice.is_traced:
            with (
                programs.evaluating(program.model),
                refused(r"pipeline sparse_dist .*", "different ones"),
            ):
                pipeline.progress(data)
            return
        program.go(data)
        program.check(everything[1:])


# Every function of a choice above.
CASES = [
    case
    for case in [*globals().values()]
    if getattr(case, "__annotations__", {}) == {"choice": "Choice", "return": "None"}
]


@pytest.mark.parametrize("kind", programs.CHOICES)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_case_under_every_choice(world_size: int, kind: str) -> None:
    """Each under a choice of each kind on two ranks, some of them on one and on three."""
    first = [*programs.CHOICES].index(kind)
    every = {1: 5, 2: 1, 3: 3}[world_size] * (1 if is_whole() else 2)
    programs.run_all(programs.spread(CASES, kind)[first % every :: every], world_size)


def stops_alone(choice: Choice, failing: int) -> str:
    """What a rank hears of an error on one of them, which then ends."""
    program, data = Program(choice), iter(mine(5))
    program.pipeline()
    program.go(data, 1)
    fail = once(ArithmeticError("halt"), [failing])
    program.model.module.hidden.register_forward_hook(lambda *_: fail(0))
    with pytest.raises((ArithmeticError, RankError)) as caught:
        program.go(data)
    return f"{type(caught.value).__name__} {caught.value}"


@pytest.mark.parametrize("at", range(3))
def test_an_error_of_one_rank_is_named_on_the_other(at: int) -> None:
    [choice] = [*programs.CHOICES.values()][at]
    found = run_ranks(stops_alone, 2, choice=choice, failing=at % 2)
    assert found[at % 2] == "ArithmeticError halt"
    assert found[1 - at % 2] == f"RankError [rank {at % 2}] ArithmeticError: halt"
