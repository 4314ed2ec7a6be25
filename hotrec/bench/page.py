"""The result page, and the table on the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hotrec.report.units import show_bytes, show_count, show_frac, show_seconds

DASH = "-"
COLUMNS = (
    "case",
    "step p50",
    "p10",
    "p90",
    "whole blocks",
    "samples/s",
    "exposed",
    "processor (main)",
    "sent per rank",
    "of bound",
    "step / planner",
    "step / hand-tuned",
    "bytes / planner",
    "bytes / hand-tuned",
    "loss",
)


def result_rows(cases: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """One row of text per case, as ``COLUMNS``."""
    return [_result_row(name, case) for name, case in cases.items()]


def _result_row(name: str, case: Mapping[str, Any]) -> list[str]:
    planner = case["against"].get("planner", {})
    hand_tuned = case["against"].get("hand_tuned", {})
    return [
        name,
        show_seconds(case["step_p50_s"]),
        show_seconds(case["step_p10_s"]),
        show_seconds(case["step_p90_s"]),
        show_seconds(case["whole_step_s"]),
        show_count(case["samples_per_s"]),
        DASH if case["exposed_frac"] is None else show_frac(case["exposed_frac"]),
        f"{show_seconds(case['cpu_s'])} ({show_seconds(case['main_cpu_s'])})",
        show_bytes(case["sent_bytes"]),
        _times(case["bytes_over_bound"]),
        _times(planner.get("step_ratio")),
        _times(hand_tuned.get("step_ratio")),
        _times(planner.get("bytes_ratio")),
        _times(hand_tuned.get("bytes_ratio")),
        f"{case['final_loss']:.6f}",
    ]


def _times(value: float | None) -> str:
    return DASH if value is None else f"{value:.2f}x"


def plain_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table for a terminal: first column left, the others right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in [header, *rows]
    )


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown: first column left, the others right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def render_page(document: Mapping[str, Any], *, command: str, configuration: str) -> str:
    """The whole page.

    Args:
        document: what bench.json holds.
        command: the line that makes it again.
        configuration: all of it, as YAML.
    """
    parts = [
        f"# hotrec bench: {document['name']}",
        _setting(document),
        f"Made by `{command}`.",
        "## Results",
        markdown_table(COLUMNS, result_rows(document["cases"])),
        _reading(document),
        "## Bytes sent per rank and step",
        _bytes_table(document),
        _bytes_note(document),
        "## Rows and memory",
        _rows_table(document),
        ROWS_NOTE,
    ]
    stages_s = {name: c["stage_s"] for name, c in document["cases"].items() if c["stage_s"]}
    if stages_s:
        parts += ["## Stages of the step", _stages_table(stages_s, "mean rank"), CLOCK_NOTE]
    if document["stages_s"]:
        parts += ["## Kernels", _stages_table(document["stages_s"], "rank 0"), STAGES_NOTE]
    parts += ["## How it was measured", _method(document)]
    parts += ["## Machine", _machine(document["machine"])]
    parts += ["## Configuration", f"```yaml\n{configuration.rstrip()}\n```"]
    return "\n\n".join(part for part in parts if part) + "\n"


def _setting(document: Mapping[str, Any]) -> str:
    data = document["data"]
    text = (
        f"{document['world_size']} ranks on {document['num_hosts']} host(s), joined by: "
        f"{document['network']}. {data['num_tables']} tables, {show_count(data['num_rows'])} rows, "
        f"Zipf {data['zipf_exponent']:g}, D = {data['embedding_dim']}, one id per feature, "
        f"batch {show_count(data['batch_size'])} per rank. Optimizer {document['optimizer']}, "
        f"dense layers of {show_bytes(4 * data['num_dense_values'])}."
    )
    by_pipeline: dict[str, list[str]] = {}
    for name, pipeline in document["pipelines"].items():
        by_pipeline.setdefault(pipeline, []).append(name)
    pipelines = [f"{pipeline} ({', '.join(names)})" for pipeline, names in by_pipeline.items()]
    text += f" Pipelines: {', '.join(pipelines)}."
    hot = [
        f"{name} {show_count(facts['num_hot_rows'])} ({facts['policy']}, "
        f"{show_bytes(facts['hot_bytes'])} per rank)"
        for name, facts in document["partitions"].items()
    ]
    return f"{text} Hot rows: {', '.join(hot)}." if hot else text


def _reading(document: Mapping[str, Any]) -> str:
    few = [
        f"{name} ({case['num_blocks']})"
        for name, case in document["cases"].items()
        if case["num_blocks"] < document["rounds"]
    ]
    lines = [
        "A step ends when the last rank returns from it. Ratios of steps are medians over the "
        "rounds of the ratio of two blocks' median steps. Whole blocks: all of a block, its first "
        "steps and its last traffic included, over its steps. Exposed: share of a step in which "
        "the main thread waits for other ranks, mean over the ranks. Processor: time that a rank's "
        "threads ran in a step, and its main thread alone, mean over whole blocks and the ranks; "
        "the kernel's own work on packets is not in it. Bytes are means over the ranks, dense "
        "layers included, and the bound with them.",
    ]
    if document.get("assigned"):
        lines.append(
            f"By owner: {', '.join(document['assigned'])}. Samples of the same global batches were "
            "given to the rank that holds most of their cold rows before the clock, as loader "
            "workers do in training, so the time for it is in no figure. The bound knows nothing "
            "of it: it takes a row to be on any rank alike."
        )
    if few:
        lines.append(
            f"Fewer blocks than the others' {document['rounds']}: {', '.join(few)}; their "
            "ratios are over those rounds, their loss is of an earlier step."
        )
    apart = document["losses_apart"]
    exact = {name: case for name, case in document["cases"].items() if case["is_exact"]}
    others = {name: case for name, case in document["cases"].items() if not case["is_exact"]}
    if apart:
        lines.append(
            f"**Losses differ by more than {document['loss_tolerance']:g}: {', '.join(apart)}.**"
        )
    elif exact:
        most = max(case["largest_loss_difference"] for case in exact.values())
        which = "all cases" if not others else f"the exact cases ({', '.join(exact)})"
        lines.append(
            f"Losses of {which} agree in every step to {most:.1e} "
            f"(limit {document['loss_tolerance']:g})."
        )
    if others:
        differences = [f"{n} {c['largest_loss_difference']:.1e}" for n, c in others.items()]
        lines.append(
            "Not exact, for reference: semi_sync computes with rows that are one update old, "
            f"16-bit messages round. Largest difference of a loss: {', '.join(differences)}."
        )
    return "\n\n".join(lines)


def _bytes_table(document: Mapping[str, Any]) -> str:
    cases = document["cases"]
    kinds = [
        kind
        for kind in next(iter(cases.values()))["sent_bytes_by_collective"]
        if any(case["sent_bytes_by_collective"][kind] for case in cases.values())
    ]
    header = ["case", *kinds, "all", "largest rank", "bound", "bound + dense", "embeddings/bound"]
    has_wire = any(case["wire_bytes"] is not None for case in cases.values())
    rows = []
    for name, case in cases.items():
        row = [name, *[show_bytes(case["sent_bytes_by_collective"][kind]) for kind in kinds]]
        row += [show_bytes(case[k]) for k in ("sent_bytes", "sent_bytes_most", "bound_bytes")]
        row += [show_bytes(case["bound_with_dense_bytes"])]
        row += [_times(case["embedding_bytes_over_bound"])]
        if has_wire:
            row += [show_bytes(case["wire_bytes"]), _times(case["wire_bytes"] / case["sent_bytes"])]
        rows.append(row)
    return markdown_table([*header, *(["on the wire", "wire/counted"] if has_wire else [])], rows)


def _bytes_note(document: Mapping[str, Any]) -> str:
    text = (
        "Counted on untimed steps, with nothing under way before and after them, by the "
        "rules of `hotrec/runtime/traffic.py`. The bound is 2 U D 4 (W-1)/W, U the distinct rows "
        "of a rank's batch; the other one adds the ring all-reduce of the dense layers' gradients."
    )
    if any(case["wire_bytes"] is not None for case in document["cases"].values()):
        text += (
            " On the wire: the kernel's count of bytes sent by the interface "
            f"{document['interface']} over the same steps, with headers and acknowledgements."
        )
    return text


def _rows_table(document: Mapping[str, Any]) -> str:
    header = ["case", "distinct rows", "hot lookups", "busiest rank / mean", "memory", "steps"]
    rows = [
        [
            name,
            show_count(case["num_distinct_rows"]),
            show_frac(case["hot_lookups_frac"]),
            _times(case["served_most_over_mean"]),
            show_bytes(case["memory_bytes"]),
            show_count(case["num_steps"]),
        ]
        for name, case in document["cases"].items()
    ]
    return markdown_table(header, rows)


ROWS_NOTE = (
    "Distinct rows: per rank and step. Busiest rank: floats looked up for all ranks in one "
    "step, largest over mean. Memory: growth of a rank's process (largest rank) while the "
    "model was built and made its first step, in which the first case also pays what all "
    "share."
)


def _stages_table(stages_s: Mapping[str, Mapping[str, float]], of: str) -> str:
    names = list(next(iter(stages_s.values())))
    rows = [
        [stage, *[show_seconds(of_case[stage]) for of_case in stages_s.values()]] for stage in names
    ]
    rows.append(["sum", *[show_seconds(sum(c.values())) for c in stages_s.values()]])
    return markdown_table([f"stage, {of}, one step", *stages_s], rows)


CLOCK_NOTE = (
    "Medians over the timed steps, by the marks of `hotrec/runtime/stages.py`, mean over the "
    "ranks. The stages named exchange are the main thread's waiting, and their sum is what is "
    "exposed. A sum of medians need not be the median step. Where TorchRec starts or waits for "
    "something in the middle of its own parts, it is in the stage of those."
)


STAGES_NOTE = (
    "From torch's profiler over steps of their own, self time of rank 0's main thread by stage. "
    "The profiler's own cost is in it, so the sums exceed the step times above."
)


def _method(document: Mapping[str, Any]) -> str:
    routing = {
        "main": "Ids are routed inside the timed step, on the thread that trains, as without "
        "loader workers (which would compete for the same cores).",
        "loader": "Ids were routed before the clock, as loader workers with cores of their own "
        "would do.",
    }[document["routing"]]
    return (
        f"All cases live in one process per rank and take turns in blocks of "
        f"{document['block_steps']} consecutive steps, in a rotating order, each on the same "
        f"batches in the same order from the same weights. {document['warmup_rounds']} steps of "
        f"each case come before the clock, {document['counted_steps']} for counting bytes after "
        "it. A block begins at a barrier, when nothing of any case is under way. No barrier and no "
        "synchronization stands between its steps, so that a pipeline overlaps them as in "
        f"training; the first {document['block_skip']} refill that overlap and are in no figure of "
        "single steps. At its end the pipeline settles: all that it left under way is waited for, "
        "on all ranks. That wait is in the column of whole blocks. A pipeline that only "
        "postponed its traffic would show there. Stages are timed in the same steps. "
        f"{routing}"
    )


def _machine(facts: Mapping[str, Any]) -> str:
    packages = ", ".join(f"{name} {found}" for name, found in facts["packages"].items())
    malloc = ", ".join(f"{k}={v}" for k, v in facts["malloc"].items()) or "no variables set"
    return "\n".join(
        [
            f"* {facts['processor']}, {facts['num_cores']} cores, "
            f"{show_bytes(facts['memory_bytes'])} memory, {facts['gpu'] or 'no GPU used'}",
            f"* {facts['threads_per_rank']} thread(s) per rank; malloc: {malloc}; "
            "on CPU freed memory is kept between steps (hotrec/runtime/memory.py)",
            f"* Linux {facts['kernel']}, Python {facts['python']}, {packages}",
            f"* code {facts['code']}; load average {facts['load_average']:.1f} before the run, "
            f"{facts['load_average_after']:.1f} after",
        ]
    )
