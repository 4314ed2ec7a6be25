"""A sharding plan as JSON and as text."""

from __future__ import annotations

from typing import Any

from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ShardingPlan,
)


def plan_document(plan: ShardingPlan) -> dict[str, Any]:
    """A plan as plain lists and dicts: module path -> table -> sharding, kernel, shards."""
    document: dict[str, Any] = {}
    for path, module_plan in plan.plan.items():
        assert isinstance(module_plan, EmbeddingModuleShardingPlan), type(module_plan)
        tables = {}
        for table, sharding in module_plan.items():
            spec = sharding.sharding_spec
            shards = []
            if isinstance(spec, EnumerableShardingSpec):
                shards = [
                    {
                        "offsets": list(shard.shard_offsets),
                        "sizes": list(shard.shard_sizes),
                        "placement": str(shard.placement),
                    }
                    for shard in spec.shards
                ]
            tables[table] = {
                "sharding_type": sharding.sharding_type,
                "compute_kernel": sharding.compute_kernel,
                "ranks": sharding.ranks,
                "shards": shards,
            }
        document[path] = tables
    return document


def plan_text(plan: ShardingPlan) -> str:
    """A plan as a table for people: one line per table."""
    lines = []
    for path, tables in plan_document(plan).items():
        width = max(len(name) for name in tables)
        lines.append(f"module {path or '(root)'}")
        lines.append(f"  {'table':<{width}}  {'sharding':<13}  {'kernel':<17}  rows per rank")
        for name, facts in tables.items():
            rows = ", ".join(str(shard["sizes"][0]) for shard in facts["shards"]) or "all"
            lines.append(
                f"  {name:<{width}}  {facts['sharding_type']:<13}  "
                f"{facts['compute_kernel']:<17}  {rows}"
            )
    return "\n".join(lines) + "\n"
