"""What a rank computes in a step, whatever the pipeline: the compute forms of the stages."""

from __future__ import annotations

from collections.abc import Mapping

from hotrec.costs import Costs, World
from hotrec.placement.forms import TIERS, Form, StageForm, Workload

# Optimizers with a state as long as a row, which FBGEMM keeps in host memory where the row is and
# never caches. Costs that were measured with one of them have it in the updates of host rows.
ELEMENT_WISE = ("adagrad", "adam")


def add_overhead(compute: Form, stage: str, seconds: float) -> None:
    """What a stage takes whatever it does, where it is there at all."""
    if stage in ("route", "pool"):
        _add_once(compute, seconds)
    elif stage in ("ids_exchange", "rows_exchange", "grads_exchange", "row_update"):
        compute.add("cold_groups", seconds).add("pooled_groups", seconds)
    elif stage == "hot_exchange":
        compute.add("hot_groups", seconds).add("replicated_groups", seconds)
    else:
        compute.constant += seconds


def _add_once(compute: Form, seconds: float) -> None:
    """Seconds of a call that hot and cold rows share; a form cannot say "if there is either"."""
    for group in ("cold_groups", "hot_groups"):
        compute.add(group, seconds * 2 / 3)


def add_compute(
    stages: Mapping[str, StageForm], costs: Costs, world: World, workload: Workload
) -> None:
    """Add the seconds of the kernels to the compute forms; hot rows as TorchRec exchanges them."""
    kernel = costs.kernels
    route, lookup, update = (stages[s].compute for s in ("route", "row_lookup", "row_update"))
    if not workload.is_routed_by_loader:
        route.add_line(kernel["route"], "lookups", None)
        _add_once(route, kernel["route"].fixed_s)
    for tier in TIERS:
        reading = kernel.get(f"read_{tier}")
        updating = kernel.get(f"update_{'hit' if tier == 'miss' else tier}")
        if reading is not None and updating is not None:
            lookup.add_line(reading, f"rows_{tier}", f"bytes_{tier}")
            update.add_line(updating, f"rows_{tier}", f"bytes_{tier}")
        reading = kernel.get(f"pooled_{tier}")
        updating = kernel.get(f"pooled_update_{'hit' if tier == 'miss' else tier}")
        if reading is not None and updating is not None:
            ids, num_bytes = f"pooled_ids_{tier}", f"pooled_bytes_{tier}"
            lookup.add_line(reading, ids, num_bytes)
            update.add_line(updating, ids, num_bytes)
    if "read_host" in kernel and costs.facts.get("optimizer") not in ELEMENT_WISE:
        # Read and written over the bus, both ways at once.
        update.add("state_bytes_host", kernel["read_host"].per_byte_s)
    lookup.add("cold_groups", kernel["read_device"].fixed_s)
    update.add("cold_groups", kernel["update_device"].fixed_s)
    lookup.add("pooled_groups", kernel["pooled_device"].fixed_s)
    update.add("pooled_groups", kernel["pooled_update_device"].fixed_s)
    lookup.add_line(kernel["hot_read"], "hot_rows", "hot_bytes")
    lookup.add("hot_groups", kernel["hot_read"].fixed_s)
    lookup.add_line(kernel["replicated_read"], "replicated_ids", "replicated_id_bytes")
    lookup.add("replicated_groups", kernel["replicated_read"].fixed_s)
    pool = stages["pool"].compute.add_line(kernel["pool"], "lookups", "lookup_bytes")
    _add_once(pool, kernel["pool"].fixed_s)
    dense = kernel["dense"].seconds(workload.dense_flops * workload.batch_size)
    stages["dense"].compute.constant += dense
    optimizer = stages["optimizer"].compute
    optimizer.add_line(kernel["hot_update"], "union_rows", "union_bytes")
    optimizer.add("hot_groups", kernel["hot_update"].fixed_s)
    optimizer.add_line(kernel["replicated_update"], "replicated_rows", "replicated_bytes")
    optimizer.add("replicated_groups", kernel["replicated_update"].fixed_s)
    optimizer.constant += kernel["dense_update"].seconds(workload.num_dense_values)
    hot = stages["hot_exchange"].compute
    if world.num_ranks > 1:
        hot.add_line(kernel["hot_pack"], "hot_rows", "hot_bytes")
        hot.add("hot_groups", kernel["hot_pack"].fixed_s)
        hot.add_line(kernel["hot_add"], "hot_rows", "hot_bytes", world.num_ranks)
