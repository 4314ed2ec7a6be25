"""A checkpoint of any ranks and placement goes on under any other as the unsplit model.

Each route is a training that is saved, and another one that is loaded from it: with the same rows
and state, or with other rows, as after new days of data, or for another optimizer. Both have the
losses and weights of one process (to 1e-5), what is loaded is what was saved bit for bit, and a run
that resumes as it was is the uninterrupted one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hotrec.train import tensor_files
from hotrec.train.checkpoint import (
    Checkpoints,
    Position,
    load_checkpoint,
    load_rows,
    save_checkpoint,
)
from tests.distributed.setups import pretend_hosts
from tests.exact.case import TORCHREC_PLANS, Case, deal_to, draw_cases, fit
from tests.exact.reference import Unsplit, first_rows
from tests.exact.training import Found, Result, Training, other_bits, with_slots
from tests.helpers.ranks import RanksError, run_ranks
from tests.helpers.samples import num_cases
from tests.helpers.tiny import TinyLoader

HOSTS = ("0", "00", "000", "0011")
_SPLIT = {"partition": "half", "placement": "row_wise"}
_SLOTS = {**_SPLIT, "tier": "cached", "pipeline": "look_ahead", "slots": 0.6}
# What each side of a route is, in turn, beside what is drawn.
SIDES: tuple[dict[str, Any], ...] = (
    {**_SPLIT, "adapt": True, "tier": "device"},
    {**_SLOTS, "adapt": True, "popular": 0.3},
    {**_SLOTS, "adapt": False},
    {**_SLOTS, "adapt": False, "row_type": "bf16", "window": 3},
    {**_SLOTS, "adapt": False, "row_type": "bf16"},
    {**_SPLIT, "adapt": False, "tier": "device"},
    {"partition": "random", "placement": "mixed", "output": "bags"},
    {"partition": "half", "placement": "pooled", "output": "bags"},
    {"partition": "all_cold", "placement": "row_wise"},
    *({"placement": plan, "output": "bags"} for plan in TORCHREC_PLANS),
)
# How the loaded side follows the saved one: as it was, under other choices, with other rows, or for
# another optimizer.
KINDS = ("as_it_was", "elsewhere", "elsewhere", "other_rows", "other_optimizer")
# Rows of 8 columns in a box and in a file.
CHUNK_BYTES, FILE_BYTES = 20 * 32, 90 * 32


@dataclass(frozen=True)
class Route:
    """A training that is saved, and one that goes on.

    Args:
        saved: The first one, from step 0.
        loaded: The other one, from where the first one ended.
        kind: One of ``KINDS``.
    """

    saved: Case
    loaded: Case
    kind: str

    def rest(self, case: Case) -> Case:
        """A side after the checkpoint."""
        return replace(case, first=self.saved.steps, steps=self.loaded.steps)

    def find_rows(self, table: str, rows: torch.Tensor) -> torch.Tensor:
        """Another order of rows, every fourth of which is new."""
        if self.kind != "other_rows":
            return rows
        num_rows = {found.name: found.num_rows for found in self.saved.tables()}[table]
        is_new = (rows % 4 == 1) | (rows >= num_rows)
        return torch.where(is_new, -1, num_rows - 1 - rows)

    @property
    def keeps_state(self) -> bool:
        return self.kind != "other_optimizer"


def draw_routes(num: int, seed: int = 117) -> list[Route]:
    """Routes in which every side is saved and loaded as often, by other ranks and choices."""
    rng = np.random.default_rng([seed, num])
    deal, sides = partial(deal_to, num, rng), deal_to(2 * num, rng, *SIDES)
    dealt = zip(
        sides[:num], sides[num:], deal(*HOSTS, *HOSTS[1:3]), deal(*HOSTS, *HOSTS[1:3]),
        deal(*KINDS), deal("sgd", *["adagrad", "rowwise_adagrad"] * 3, "adam"),
        deal("sgd", "adam"), deal("bags", "bags", "sequences", "packed"), deal(4, 6),
        deal(4, 6, 8), deal(1, 2), strict=True,
    )  # fmt: skip
    routes = []
    for side, other, hosts, hosts_then, kind, optimizer, dense, output, *more in dealt:
        steps, steps_then, labels = more
        if kind == "as_it_was":
            other, hosts_then = side, hosts
        # Of weighted bags FBGEMM's CPU kernels take the mean without weights in backward.
        is_bags = "bags" in (output, side.get("output"), other.get("output"))
        may_weigh = not {side.get("placement"), other.get("placement")} & {*TORCHREC_PLANS}
        common = {
            "optimizer": optimizer, "dense": dense, "output": "bags" if is_bags else output,
            "is_weighted": is_bags and may_weigh and bool(rng.integers(2)), "labels": labels,
            "is_uniform_dim": bool(rng.integers(2)), "order": "as_read", "skip": False, "twin": "",
            "wire": "fp32", "precision": "fp32",
        }  # fmt: skip
        saved, loaded = (
            draw_cases(found, 1, int(rng.integers(1 << 30)), **(common | given))[0]
            for found, given in ((hosts, side), (hosts_then, other))
        )
        table_seed = int(rng.integers(1 << 30))
        saved = replace(saved, seed=table_seed, evaluate=False, steps=steps)
        loaded = replace(loaded, seed=table_seed, evaluate=False)
        if kind == "as_it_was":
            loaded = saved
        if kind == "other_rows":
            loaded = replace(loaded, more_rows=int(rng.integers(2)) * 5)
        if kind == "other_optimizer" and optimizer != "adam":
            loaded = fit(replace(loaded, optimizer="sgd" if optimizer != "sgd" else "adagrad"))
        elif kind == "other_optimizer":
            kind = "elsewhere"
        routes.append(Route(saved, replace(loaded, first=steps, steps=steps_then), kind))
    return routes


def moves_of(training: Training, route: Route) -> list[int]:
    """How many rows became hot in each decision after the checkpoint."""
    return [found.num_moved for found in training.decisions][-route.loaded.steps // 2 :]


class Routes(Found):
    """What came of routes on a rank; ``folder`` is that of one."""

    def save(self, route: Route, folder: Path) -> Iterator[str]:
        """Train the first side, save it, and go on with it."""
        yield from with_slots(route.saved, lambda case: self._save(route, case, folder))

    def _save(self, route: Route, case: Case, folder: Path) -> list[str]:
        unsplit, to = Unsplit(case), Checkpoints(folder, facts={"route": 1}, lineage="0" * 32)
        with Training(case) as training:
            found = training.train(), training.weights()
            expected = unsplit.train(case), unsplit.weights()
            wrong = [*self.from_unsplit(found, expected, case.is_rounded)]
            save_checkpoint(
                to, Position(case.steps, 10 * case.steps), training.model, training.optimizer,
                TinyLoader(num_batches=1), training.hot_set,
            )  # fmt: skip
            went_on = training.train(route.rest(case)), training.weights()
            then = unsplit.train(route.rest(case)), unsplit.weights()
            wrong += self.from_unsplit(went_on, then, case.is_rounded)
            if dist.get_rank() == 0:
                kept = case.slots, found[1], went_on, moves_of(training, route)
                torch.save(kept, folder / "went_on.pt")
        return wrong

    def load(self, route: Route, folder: Path) -> Iterator[str]:
        """Load the other side and train it on."""
        slots, saved, went_on, moved = torch.load(folder / "went_on.pt", weights_only=False)
        case = route.loaded
        if route.kind == "as_it_was":
            case = replace(case, slots=slots)
        self.num_cases += 1
        differences, found, then_moved = with_slots(
            case, lambda case: self._load(route, case, folder, saved)
        )
        yield from differences
        unsplit = Unsplit(route.saved)
        unsplit.train(route.saved)
        if route.kind in ("other_rows", "other_optimizer"):
            unsplit.move(case, route.find_rows, keeps_state=route.keeps_state)
        expected = unsplit.train(route.rest(case)), unsplit.weights()
        yield from self.from_unsplit(found, expected, route.saved.is_rounded or case.is_rounded)
        if route.kind == "as_it_was":
            self.num_twins += 1
            yield from other_bits(found, went_on)
            if then_moved != moved:
                yield f"{then_moved} rows moved, expected {moved}"

    def _load(
        self, route: Route, case: Case, folder: Path, saved: dict[str, torch.Tensor]
    ) -> tuple[list[str], Result, list[int]]:
        path, wrong = folder / f"step-{route.saved.steps:08d}", []
        with Training(case) as training:
            model, optimizer = training.model, training.optimizer
            if route.kind in ("other_rows", "other_optimizer"):
                kept = optimizer if route.keeps_state else None
                num = load_rows(path, model=model, optimizer=kept, find_rows=route.find_rows)
            else:
                position = load_checkpoint(
                    path, model=model, optimizer=optimizer, facts={"route": 1},
                    hot_set=training.hot_set,
                )  # fmt: skip
                wrong += [f"{position}"] * (position != Position(case.first, 10 * case.first))
                num = None
            expected = dict(saved)
            for table in case.tables():
                rows = route.find_rows(table.name, torch.arange(table.num_rows))
                if num is not None and num[table.name] != int((rows >= 0).sum()):
                    wrong.append(f"{num} rows of {table.name} were found")
                is_new = rows[:, None] < 0
                expected[table.name] = torch.where(
                    is_new, first_rows(table), saved[table.name][rows]
                )
            for key, value in training.weights().items():
                is_same = value == expected[key]
                if case.row_type == "bf16":
                    is_same |= value == expected[key].bfloat16().float()
                wrong += [f"{key} is not what was saved"] * (not bool(is_same.all()))
            found = training.train(route.rest(case)), training.weights()
            return wrong, found, moves_of(training, route)


def run_routes(routes: dict[int, Route], folder: Path, *, is_saved: bool) -> Routes:
    """On a rank: save routes, or load them."""
    torch.set_num_threads(1)
    found = Routes()
    with (
        mock.patch.object(tensor_files, "_CHUNK_BYTES", CHUNK_BYTES),
        mock.patch.object(tensor_files, "MAX_FILE_BYTES", FILE_BYTES),
    ):
        for index, route in routes.items():
            hosts = (route.saved if is_saved else route.loaded).hosts
            (folder / f"{dist.get_rank()}.txt").write_text(f"{route!r}")
            if len(set(hosts)) > 1:
                pretend_hosts(hosts)
            own = folder / str(index)
            own.mkdir(exist_ok=True)
            differences = found.save(route, own) if is_saved else found.load(route, own)
            found.failures += [f"{route!r}: {text}" for text in differences]
    found.seconds = time.process_time()
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """All routes, or the one that was given, or none where another test's case was."""
    if "routes" not in metafunc.fixturenames:
        return
    given = metafunc.config.getoption("--case")
    routes = draw_routes(max(12, num_cases() // 20))
    if given:
        routes = [eval(given, {"Case": Case, "Route": Route})] if given.startswith("Route") else []
    metafunc.parametrize("routes", [routes] if routes else [], ids=[len(routes)] if routes else [])


def test_any_checkpoint_goes_on_as_the_unsplit_model(
    routes: list[Route], tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    seconds = 0.0
    for is_saved in (True, False):
        for hosts in HOSTS:
            chosen = {
                at: route
                for at, route in enumerate(routes)
                if (route.saved if is_saved else route.loaded).hosts == hosts
            }
            try:
                found = run_ranks(
                    run_routes, len(hosts), timeout_s=60 + 5.0 * len(chosen),
                    routes=chosen, folder=tmp_path, is_saved=is_saved,
                )  # fmt: skip
            except RanksError as error:  # of a hang only the route in it is known
                last = {path.read_text() for path in tmp_path.glob("*.txt")}
                text = "\n".join(["in", *sorted(last), str(error)])
                raise RanksError(text, error.exit_codes) from None
            for of_rank in found:
                assert not of_rank.failures, "\n".join(of_rank.failures)
            seconds += sum(of_rank.seconds for of_rank in found)
    record_property("routes", {"num": len(routes), "seconds": seconds})
