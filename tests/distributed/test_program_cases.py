"""What a program may do to the model that ``parallelize`` returned: right, or refused in a line.

Under every choice that ``auto`` can make it ends with the losses and weights of the unsplit model
on the concatenated batches, or with an error on every rank.
"""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import hotrec
from hotrec.runtime.ranks import RankError, broadcast_object
from hotrec.types import Placement, Tier
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
    program.by_hand(replace(second, ids=second.ids.permute([1, 0])))  # in another order of keys
    with program.pipeline():
        data = iter(mine(range(2, 5)))
        program.go(data, 1)
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
    assert len(found) == len(program.losses)
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

    def evaluated() -> torch.Tensor:
        model.eval()
        loss: torch.Tensor = model(batch)[0]
        model.train()
        return loss

    ways: list[Callable[[], Any]] = [
        lambda: model(batch),
        lambda: model.module(batch),
        lambda: model.module.bags(batch.ids),
        lambda: evaluated().backward(),
        lambda: model.module.out(torch.ones(1, 8)).sum().backward(),
        optimizer.step,
        lambda: nn.Sequential(model)(batch),
    ]
    of_torchrec: list[Callable[[], Any]] = [
        lambda of=of: of(model, optimizer, programs.CPU).progress(iter(mine(5)))  # type: ignore[misc]
        for of in (TrainPipelineSparseDist, TrainPipelineBase)
    ]

    def refuses(ways: Iterable[Callable[[], Any]]) -> None:
        for way in ways:
            with refused("pipeline look_ahead"):
                way()
        with torch.no_grad():  # trains nothing
            model(batch)

    refuses([*ways, *of_torchrec])
    with program.pipeline():
        data = iter(mine(4))
        program.go(data, 1)
        with refused("hotrec.Pipeline", "second"):
            program.pipeline()
        refuses(ways)
        program.go(data)
    program.check(whole(4))
    refuses([*ways, *of_torchrec])
    with program.pipeline():
        program.go(iter(mine(2)))
    program.check(whole(2))


def trains_the_whole_model(choice: Choice) -> None:
    """A part of it has no DDP around it."""
    if choice.is_ahead or choice.is_plain:
        return
    inner = Program(choice).model.module
    for loss in (inner(mine(1)[0])[0], inner.out(torch.ones(1, 8)).sum()):
        with refused(r"parameter [\w.]+", "part"):
            loss.backward()


def makes_one_backward_pass_per_step(choice: Choice) -> None:
    if choice.is_ahead or choice.is_plain:
        return
    program, (first, second) = Program(choice), mine(2)
    program.model(first)[0].backward()
    with refused(r"parameter [\w.]+", "got a second"):
        program.model(second)[0].backward()
    program = Program(choice)
    with program.pipeline():
        for step in range(2):
            program.go(iter(mine([step])))
            with refused(r"optimizer.step\(\)", "got none"):
                program.optimizer.step()
    program.check(whole(2))
    first_of_many = Program(choice)
    for batch in mine(2):  # one that is not trained changes nothing
        first_of_many.model(second)
        first_of_many.by_hand(batch)
    first_of_many.check(whole(2))
    for num in (2, 3):
        total = sum(first_of_many.model(batch)[0] for batch in [first, second, first][:num])
        with refused("model", "got two"):
            total.backward()  # type: ignore[union-attr]
    first_of_many.check()


def clip(parameters: Iterable[torch.Tensor]) -> None:
    nn.utils.clip_grad_norm_(parameters, 0.01)


def changes_gradients_before_its_step(choice: Choice) -> None:
    """Rows that are not replicated are updated in backward, by what it computed."""
    if choice.is_ahead or choice.is_plain:
        return
    program, [batch] = Program(choice), mine(1)
    parts = dict(program.optimizer.optimizers)
    layers, kept = (
        [p for name, p in model.named_parameters() if "bags" not in name]
        for model in (program.model, program.unsplit)
    )
    for one in mine(2):
        program.by_hand(one, partial(clip, layers))
    program.expect(whole(2), partial(clip, kept))
    program.check()
    if parts["fused"].params and "tables" in parts:
        with refused(r"optimizer.step\(\)", "replicated"):
            program.by_hand(batch, lambda: clip(program.model.parameters()))
    program = Program(choice)
    with refused(r"optimizer.step\(\)", "got none"):
        program.by_hand(batch, program.optimizer.zero_grad)
    program = Program(choice)
    program.model(batch)[0].backward()
    program.optimizer.step()
    with refused("parameter out.bias", "earlier"):
        program.model(batch)[0].backward()


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
    for step, sizes in enumerate(
        (programs.equal, programs.rising, programs.one_empty, programs.rising)
    ):
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
    assert program.model(found[1]).loss.requires_grad
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


def evaluates_midway(choice: Choice) -> None:
    """With training batches under way: by the pipeline, and by hand."""
    program, held_out = Program(choice), range(50, 53)
    with program.pipeline() as pipeline:
        data = iter(mine(5))
        program.go(data, 2)
        program.expect(whole(2))
        program.evaluates(iter(mine(held_out)), whole(held_out), is_left=False)
        with programs.evaluating(program.model), programs.evaluating(program.unsplit):
            for batch, everything in zip(mine(held_out), whole(held_out), strict=True):
                found = programs.mean_over_ranks(program.model(batch)[0])
                assert found == pytest.approx(float(program.unsplit(everything)[0]), rel=1e-5)
            pipeline.progress(iter(mine(range(50, 59))))  # left in the middle
        assert program.model.state_dict()
        assert program.optimizer.state_dict()
        program.go(data)
        program.expect(whole(range(2, 5)))
        program.evaluates(iter(mine([60, 61])), whole([60, 61]), is_left=False)
        program.go(iter(mine([5, 6])))
    program.check(whole([5, 6]))


def changes_iterators(choice: Choice) -> None:
    """One left halfway, whose batches under way come first; one used in both modes."""
    program, taken = Program(choice), []

    def noted() -> Iterator[Batch]:
        for step, batch in enumerate(mine(9)):
            taken.append(step)
            yield batch

    with program.pipeline():
        program.go(noted(), 2)
        steps = [*taken, 20, 21]
        program.go(iter(mine([20, 21])))
        program.expect(whole(steps))
        data = iter(mine(range(30, 34)))
        program.evaluates(itertools.islice(data, 1), whole([30]), is_left=False)
        program.evaluates(data, whole([31]))
        program.go(data)
    program.check(whole([32, 33]))


def evaluates_what_it_read_ahead(choice: Choice) -> None:
    """The next batch of the iterator that is trained on, as if nothing was read ahead."""
    program, data = Program(choice), iter(mine(5))
    with program.pipeline():
        program.go(data, 1)
        program.expect(whole(1))
        with (
            refused("pipeline look_ahead", "batches in flight")
            if choice.is_ahead
            else nullcontext()
        ):
            program.evaluates(data, whole([1]))
        program.go(data)
    program.check(whole(range(1 if choice.is_ahead else 2, 5)))


def uses_a_layer_in_some_steps(choice: Choice) -> None:
    """A layer may be used never, too; otherwise DDP would stop, or leave it apart in the end."""
    for is_used, by_hand in itertools.product((True, False), (False, True)):
        if choice.is_ahead and by_hand:
            continue
        Sometimes.is_used = is_used
        program, data = Program(choice, Sometimes), iter(mine(3))
        with nullcontext() if by_hand else program.pipeline() as pipeline:
            if pipeline is None:
                program.by_hand(next(data))
            else:
                program.go(data, 2)
                pipeline.drain()
            program.check(whole(len(program.losses)))
            Sometimes.is_used = not is_used
            with refused(r"parameter out\.\w+", "got none" if is_used else "got one"):
                if pipeline is None:
                    program.by_hand(next(data))
                else:
                    program.go(data, 1)
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


def has_one_iterator_for_all_epochs(choice: Choice) -> None:
    """In training and in evaluation, in which a pass is left midway."""
    program, data, held_out = Program(choice), Loader(mine(3)), Loader(mine(range(50, 53)))
    with program.pipeline():
        for num in (2, 3):
            program.go(iter(data))
            program.expect(whole(3))
            program.evaluates(iter(held_out), whole(range(50, 50 + num)))
    program.check()


def has_a_loader_that_fails_once(choice: Choice) -> None:
    """The batches before come first, those after it next; also if only one rank has an error."""
    last = last_rank()
    ways: Any = [(OSError("gone"), [last], 2), (KeyboardInterrupt("gone"), [0, last], 0)]
    for error, ranks, step in ways:
        program, data = Program(choice), iter(Loader(mine(4), once(error, ranks, step)))
        with program.pipeline():
            with pytest.raises((type(error), RankError), match="gone"):
                program.go(data)
            assert len(program.losses) == step
            program.go(data)
        program.check(whole(4))


def turns_to_other_iterators(choice: Choice) -> None:
    """Before their ends, and at errors: what was taken comes first, and nothing is lost."""
    program = Program(choice)
    with program.pipeline():
        for first, num in zip((0, 10, 20, 30), (1, 2, 1, 3), strict=True):
            data: Any = iter(mine(range(first, first + num)))
            program.go(data, 1)
        program.go(data)
    program.check(whole([0, 10, 11, 20, 30, 31, 32]))
    for step in (1, 2):
        program, errors = Program(choice), 0
        data = iter(Loader(mine(5), once(OSError("gone"), [last_rank()], step)))
        with program.pipeline():
            program.go(data, 1)
            for source in (iter(mine([20, 21])), data):
                while True:
                    try:
                        program.go(source)
                        break
                    except (OSError, RankError):
                        errors += 1
        assert errors == 1
        program.check(whole([*range(step), 20, 21, *range(step, 5)]))


def closes_midway(choice: Choice) -> None:
    """A new pipeline computes what the one before had taken; closed ones keep no loader."""
    program, data = Program(choice), (batch for batch in mine(8))
    is_held, pipelines = weakref.ref(data), []
    for _ in range(2):
        with program.pipeline() as pipeline:
            program.go(data, 2)
        pipelines.append(pipeline)
    with program.pipeline():
        program.go(iter(mine([20])))
    with refused("hotrec.Pipeline", "closed"):
        pipeline.progress(iter(mine(1)))
    del data
    gc.collect()
    assert is_held() is None, pipelines
    program.check(whole([*range(4), 20]))
    # An error that was taken, too, since a generator ends with it.
    program, fail = Program(choice), once(OSError("gone"), [last_rank()], 3)
    data = (batch for at, batch in enumerate(mine(5)) if fail(at) is None)
    with program.pipeline():
        program.go(data, 2)
    with program.pipeline(), pytest.raises((OSError, RankError), match="gone"):
        program.go(data)
    program.check(whole(3))
    # Batches that the other ranks had taken with it wait for the next pipeline.
    program = Program(choice)
    held = iter(Loader(mine(5), once(OSError("gone"), [last_rank()], 3)))
    with program.pipeline():
        program.go(held, 1)
    with program.pipeline(), pytest.raises((OSError, RankError), match="gone"):
        program.go(held)
    with program.pipeline():
        program.go(held)
    program.check(whole(5))


def fails_inside_a_step(choice: Choice) -> None:
    """What goes on with the model is refused, in any loop; what was trained before is kept."""
    errors: list[BaseException] = [ArithmeticError("halt"), KeyboardInterrupt("halt")]
    for error in errors:
        program, data = Program(choice), iter(mine(5))
        model, optimizer, pipeline = program.model, program.optimizer, program.pipeline()
        program.go(data, 1)
        fail = once(error, range(dist.get_world_size()))
        model.module.out.register_forward_hook(lambda *_, fail=fail: fail(0))
        with pytest.raises(type(error), match="halt"):
            pipeline.progress(data)
        for source in (data, iter(mine(5))):
            with pytest.raises(RuntimeError, match=r"halt.* \[1, 2"):
                pipeline.progress(source)
        pipeline.close()
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


def fails_in_evaluation(choice: Choice) -> None:
    """Nothing was updated, so that a new pipeline goes on; several ranks may be apart."""
    program, fail = Program(choice), once(ArithmeticError("halt"), range(dist.get_world_size()))
    with program.pipeline() as pipeline:
        program.go(iter(mine(2)))
        hook = program.model.module.hidden.register_forward_hook(lambda *_: fail(0))
        with pytest.raises(ArithmeticError):
            program.evaluates(iter(mine(1)), whole(1))
        hook.remove()
        with pytest.raises(RuntimeError, match="halt"):
            pipeline.progress(iter(mine(1)))
    if last_rank():
        with pytest.raises(RuntimeError, match="halt"):
            program.pipeline()
    else:
        with program.pipeline():
            program.go(iter(mine(range(2, 5))))
    program.check(whole(2 if last_rank() else 5))


def changes_what_was_read_once(choice: Choice) -> None:
    """Refused before the step, which is made once the change is undone."""
    program = Program(choice)
    model, optimizer = program.model, program.optimizer
    named, parts = dict(model.named_parameters()), dict(optimizer.optimizers)
    hidden = named["hidden.weight"]
    layers = {parameter for name, parameter in named.items() if "bags" not in name}
    replicated = [
        g for g in optimizer.param_groups if "momentum" in g and layers.isdisjoint(g["params"])
    ]

    def freeze() -> None:
        hidden.requires_grad_(not hidden.requires_grad)

    def slow_down() -> None:
        for group in parts["fused"].param_groups:
            group["lr"] = 0.8 if group["lr"] < 0.1 else 0.01

    def decay() -> None:
        for group in replicated:
            group["weight_decay"] = 0.5 - group["weight_decay"]

    ways: list[tuple[Callable[[], None], str, str]] = [
        (freeze, r"parameter hidden\.weight", "frozen")
    ]
    if "hot" in parts:
        ways.append((slow_down, "optimizer learning rates of embedding rows", "0.01"))
    if replicated:
        ways.append((decay, "optimizer options of embedding rows", "weight_decay"))
    for other in (torch.optim.Adagrad(model.parameters()), Program(choice).optimizer):
        with refused(r"optimizer \w+", "got another"):
            hotrec.Pipeline(model, other, programs.CPU)
    data = iter(mine(5))
    with program.pipeline() as pipeline:
        program.go(data, 1)
        for change, key, got in ways:
            change()
            with refused(key, got):
                pipeline.progress(data)
            if not choice.is_ahead and not choice.is_plain:
                with refused(key, got):
                    model(mine(1)[0])
            change()
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


def has_a_label_that_is_no_number(choice: Choice) -> None:
    """What is not a number spreads as in the unsplit model, and no further."""
    program, batches, everything = Program(choice), mine(5), whole(5)
    everything[2].labels[0] = float("nan")
    if dist.get_rank() == 0:
        batches[2].labels[0] = float("nan")
    with program.pipeline():
        program.go(iter(batches))
    program.check(everything)


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
