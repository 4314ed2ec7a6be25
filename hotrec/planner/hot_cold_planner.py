"""A planner that can stand where TorchRec's ``EmbeddingShardingPlanner`` stands."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
from torch import nn
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.types import ModuleSharder, ShardingPlan, ShardingPlanner

from hotrec.planner.cache_stats import MissCurve
from hotrec.planner.constraints import placement_constraints
from hotrec.planner.machine import Machine
from hotrec.planner.plan import plan_on
from hotrec.types import Partition, Placement


class HotColdPlanner(ShardingPlanner):
    """Plans the sharding of a model with hot/cold collections, as a placement says.

    ::

        model = use_hot_cold(model, placement)
        planner = HotColdPlanner(placement, machine=machine)
        sharders = [HotColdSharder(spec)]
        plan = planner.collective_plan(model, sharders, dist.group.WORLD)
        model = shard(model, plan, sharders, device)

    Args:
        placement: of the tables; a partition means all cold rows row-wise in the first tier.
        machine: ranks, memory, batch size and measured costs; or, in its stead,
        topology: TorchRec's own description, and
        batch_size: B.
        curves: misses of the device caches by table, for TorchRec's estimates.
        constraints: of tables in other collections of the model.

    Raises:
        ValueError: if both or neither of machine and topology are given, or the placement cannot
            be sharded.
    """

    def __init__(
        self,
        placement: Placement | Partition,
        *,
        machine: Machine | None = None,
        topology: Topology | None = None,
        batch_size: int | None = None,
        curves: Mapping[str, MissCurve] | None = None,
        constraints: Mapping[str, ParameterConstraints] | None = None,
    ) -> None:
        if machine is not None and topology is None and batch_size is None:
            topology, batch_size = machine.topology(), machine.batch_size
        elif machine is not None or topology is None or batch_size is None:
            given = {"machine": machine, "topology": topology, "batch_size": batch_size}
            raise ValueError(
                "planner: expected a machine alone, or a topology and a batch_size, got "
                f"{', '.join(name for name, value in given.items() if value is not None) or None}."
                " Pass one description of the machine."
            )
        self._topology, self._batch_size = topology, batch_size
        if isinstance(placement, Partition):
            placement = Placement.alike(placement)
        self._constraints = {
            **(constraints or {}),
            **placement_constraints(placement, curves),
        }

    @property
    def constraints(self) -> dict[str, ParameterConstraints]:
        """What each table is held to, by the name of its half."""
        return dict(self._constraints)

    def plan(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> ShardingPlan:
        """Plan on this rank alone; every rank computes the same from the same inputs.

        Args:
            module: not sharded yet; may be on the meta device.
            sharders: of its collections, ``HotColdSharder`` among them.

        Raises:
            ValueError: if the tables do not fit the machine.
        """
        return plan_on(module, sharders, self._topology, self._batch_size, self._constraints)

    def collective_plan(
        self,
        module: nn.Module,
        sharders: list[ModuleSharder[nn.Module]] | None = None,
        pg: dist.ProcessGroup | None = None,
    ) -> ShardingPlan:
        """Plan on the group's first rank and give every rank the plan, or the same error.

        Args:
            module: not sharded yet.
            sharders: of its collections. TorchRec's default sharders know no hot/cold collection,
                so they have to be named.
            pg: the ranks; the default group if left out.

        Raises:
            ValueError: on every rank, if there are no sharders or the tables do not fit.
            RuntimeError: on every rank, with the text of whatever else the first rank met.
        """
        if sharders is None:
            raise ValueError(
                "planner sharders: expected a list with a HotColdSharder, got None. "
                "Pass the sharders that DistributedModelParallel gets."
            )
        group = pg if pg is not None else dist.group.WORLD
        outcome: list[tuple[ShardingPlan | None, str, bool] | None] = [None]
        error: Exception | None = None
        if dist.get_rank(group) == 0:
            try:
                outcome = [(self.plan(module, sharders), "", False)]
            except Exception as caught:  # every kind: the other ranks wait for the verdict
                error = caught
                outcome = [(None, str(caught), isinstance(caught, ValueError))]
        if dist.get_world_size(group) > 1:
            dist.broadcast_object_list(outcome, group=group, group_src=0)
        if error is not None:
            raise error
        assert outcome[0] is not None
        plan, text, is_value_error = outcome[0]
        if plan is None:
            raise ValueError(text) if is_value_error else RuntimeError(text)
        return plan
