"""The result of a benchmark: the table for the terminal, and the page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hotrec.report.render import (
    Block,
    Column,
    Items,
    Listing,
    Page,
    Passage,
    Table,
    plain_table,
    record_table,
    render_markdown,
)
from hotrec.report.units import (
    show_bytes,
    show_count,
    show_frac,
    show_known,
    show_ratio,
    show_seconds,
)

Document = Mapping[str, Any]


def _times(value: float) -> str:
    return f"{value:.2f}x"


COLUMNS: tuple[Column, ...] = (
    ("case", "name", str),
    ("step p50", "step_p50_s", show_seconds),
    ("p10", "step_p10_s", show_seconds),
    ("p90", "step_p90_s", show_seconds),
    ("whole blocks", "whole_step_s", show_seconds),
    ("samples/s", "samples_per_s", show_count),
    ("exposed", "exposed_frac", show_frac),
    ("processor (main)", "processor_s", lambda times: "{} ({})".format(*map(show_seconds, times))),
    ("sent per rank", "sent_bytes", show_bytes),
    ("of bound", "bytes_over_bound", _times),
    ("step / planner", "planner_step_ratio", _times),
    ("step / hand-tuned", "hand_tuned_step_ratio", _times),
    ("bytes / planner", "planner_bytes_ratio", _times),
    ("bytes / hand-tuned", "hand_tuned_bytes_ratio", _times),
    ("loss", "final_loss", "{:.6f}".format),
)
ROW_COLUMNS: tuple[Column, ...] = (
    ("case", "name", str),
    ("distinct rows", "num_distinct_rows", show_count),
    ("hot lookups", "hot_lookups_frac", show_frac),
    ("busiest rank / mean", "served_most_over_mean", _times),
    ("memory", "memory_bytes", show_bytes),
    ("steps", "num_steps", show_count),
)


def result_text(cases: Mapping[str, Document]) -> str:
    """The results as a table for a terminal."""
    table = record_table(_records(cases), COLUMNS)
    return plain_table(table.header, table.rows)


def _records(cases: Mapping[str, Document]) -> list[dict[str, Any]]:
    return [
        {
            **case,
            "name": name,
            "processor_s": (case["cpu_s"], case["main_cpu_s"]),
            **{
                f"{baseline}_{ratio}": value
                for baseline, ratios in case["against"].items()
                for ratio, value in ratios.items()
            },
        }
        for name, case in cases.items()
    ]


def render_page(document: Document, *, command: str, configuration: str) -> str:
    """The whole page in Markdown.

    Args:
        document: The content of bench.json.
        command: The command line that reproduces the page.
        configuration: The complete configuration as YAML.
    """
    cases = document["cases"]
    records = _records(cases)
    passages = [
        Passage("setting", "Setting", [_setting(document), f"Made by `{command}`."]),
        Passage("results", "Results", [record_table(records, COLUMNS), *_reading(document)]),
        Passage("bytes", "Bytes sent per rank and step", _bytes(document)),
        Passage("rows", "Rows and memory", [record_table(records, ROW_COLUMNS), ROWS_NOTE]),
    ]
    stages_s = {name: case["stage_s"] for name, case in cases.items() if case["stage_s"]}
    if stages_s:
        blocks: list[Block] = [_stages_table(stages_s, "mean rank"), CLOCK_NOTE]
        passages.append(Passage("stages", "Stages of the step", blocks))
    if document["stages_s"]:
        blocks = [_stages_table(document["stages_s"], "rank 0"), STAGES_NOTE]
        passages.append(Passage("kernels", "Kernels", blocks))
    passages += [
        Passage("method", "How it was measured", [_method(document)]),
        Passage("machine", "Machine", [_machine(document["machine"])]),
        Passage("configuration", "Configuration", [Listing("YAML", configuration, "yaml")]),
    ]
    return render_markdown(Page(f"hotrec bench: {document['name']}", passages))


def _setting(document: Document) -> str:
    data = document["data"]
    hosts = document["num_hosts"]
    by_pipeline: dict[str, list[str]] = {}
    for name, pipeline in document["pipelines"].items():
        by_pipeline.setdefault(pipeline, []).append(name)
    pipelines = [f"{pipeline} ({', '.join(names)})" for pipeline, names in by_pipeline.items()]
    text = (
        f"{document['world_size']} ranks on {hosts} host{'s' * (hosts != 1)}, network: "
        f"{document['network']}. {data['num_tables']} tables, {show_count(data['num_rows'])} rows, "
        f"Zipf {data['zipf_exponent']:g}, D = {data['embedding_dim']}, one id per feature, "
        f"batch {show_count(data['batch_size'])} per rank. Optimizer {document['optimizer']}, "
        f"dense layers of {show_bytes(4 * data['num_dense_values'])}. "
        f"Pipelines: {', '.join(pipelines)}."
    )
    hot = [
        f"{name} {show_count(facts['num_hot_rows'])} ({facts['policy']}, "
        f"{show_bytes(facts['hot_bytes'])} per rank)"
        for name, facts in document["partitions"].items()
    ]
    return f"{text} Hot rows: {', '.join(hot)}." if hot else text


def _reading(document: Document) -> list[str]:
    cases = document["cases"]
    lines = [
        "A step ends when the last rank returns from it. The ratio of two steps is the median, "
        "over the rounds, of the ratio of the median steps of two blocks. Whole blocks: the time "
        "of a block divided by its steps, including its first steps and its last traffic. "
        "Exposed: the share of a step in which the main thread waits for other ranks, mean over "
        "the ranks. Processor: the time for which a rank's threads ran in a step, and its main "
        "thread alone, mean over whole blocks and ranks; the kernel's work on packets is not "
        "included. Bytes are means over the ranks; they include the dense layers, as does the "
        "bound.",
    ]
    if document.get("assigned"):
        lines.append(
            f"By owner: {', '.join(document['assigned'])}. Before timing started, the samples of "
            "each global batch were given to the rank that holds most of their cold rows, as "
            "loader workers do in training, so no figure includes that work. The bound does not "
            "account for this: it assumes that a row is equally likely to be on any rank."
        )
    few = [
        f"{name} ({case['num_blocks']})"
        for name, case in cases.items()
        if case["num_blocks"] < document["rounds"]
    ]
    if few:
        lines.append(
            f"Fewer blocks than the {document['rounds']} of the others: {', '.join(few)}. Their "
            "ratios are over those rounds, and their loss is that of an earlier step."
        )
    differences = {name: case["largest_loss_difference"] for name, case in cases.items()}
    exact = {name: value for name, value in differences.items() if cases[name]["is_exact"]}
    others = {name: value for name, value in differences.items() if name not in exact}
    apart, limit = document["losses_apart"], document["loss_tolerance"]
    if apart:
        lines.append(f"**Losses differ by more than {limit:g}: {', '.join(apart)}.**")
    elif exact:
        which = "all cases" if not others else f"the exact cases ({', '.join(exact)})"
        lines.append(
            f"Losses of {which} agree in every step to {max(exact.values()):.1e} (limit {limit:g})."
        )
    if others:
        largest = ", ".join(f"{name} {difference:.1e}" for name, difference in others.items())
        lines.append(
            "Not exact, for reference: 16-bit messages round. "
            f"Largest difference of a loss: {largest}."
        )
    return lines


def _bytes(document: Document) -> list[Block]:
    cases = document["cases"]
    kinds = [
        kind
        for kind in next(iter(cases.values()))["sent_bytes_by_collective"]
        if any(case["sent_bytes_by_collective"][kind] for case in cases.values())
    ]
    has_wire = any(case["wire_bytes"] is not None for case in cases.values())
    header = ["case", *kinds, "all", "largest rank", "bound", "bound + dense", "embeddings/bound"]
    sizes = ("sent_bytes", "sent_bytes_most", "bound_bytes", "bound_with_dense_bytes")
    rows = []
    for name, case in cases.items():
        row = [name, *(show_bytes(case["sent_bytes_by_collective"][kind]) for kind in kinds)]
        row += [show_bytes(case[size]) for size in sizes]
        row.append(show_known(_times, case["embedding_bytes_over_bound"]))
        if has_wire:
            wire = case["wire_bytes"]
            row += [show_bytes(wire), show_ratio(wire, case["sent_bytes"])]
        rows.append(row)
    text = (
        "Counted on steps that are not timed, with no communication in flight before or after "
        "them, by the rules of `hotrec/runtime/traffic.py`. The bound is 2 U D 4 (W-1)/W, where U "
        "is the number of distinct rows of a rank's batch; the second bound adds the ring "
        "all-reduce of the dense layers' gradients."
    )
    if has_wire:
        header += ["on the wire", "wire/counted"]
        text += (
            " On the wire: the bytes that the kernel counted as sent by the interface "
            f"{document['interface']} over the same steps, with headers and acknowledgements."
        )
    return [Table(header, rows), text]


ROWS_NOTE = (
    "Distinct rows: per rank and step. Busiest rank: values looked up for all ranks in one step, "
    "largest over mean. Memory: the growth of a rank's process (largest rank) while the model was "
    "built and ran its first step; for the first case this includes what all cases share."
)


def _stages_table(stages_s: Mapping[str, Mapping[str, float]], of: str) -> Table:
    names = list(next(iter(stages_s.values())))
    rows = [[name, *(show_seconds(times[name]) for times in stages_s.values())] for name in names]
    total = ["sum", *(show_seconds(sum(times.values())) for times in stages_s.values())]
    return Table([f"stage, {of}, one step", *stages_s], rows, [total])


CLOCK_NOTE = (
    "Medians over the timed steps, measured by the ranges of `hotrec/runtime/stages.py`, mean over "
    "the ranks. In the stages named exchange the main thread waits; their sum is the exposed time. "
    "A sum of medians need not be the median step. Where TorchRec starts or waits for "
    "communication inside one of its own parts, the time counts for the stage of that part."
)


STAGES_NOTE = (
    "From torch's profiler over separate steps: self time of rank 0's main thread by stage. The "
    "times include the profiler's overhead, so their sums exceed the step times above."
)


def _method(document: Document) -> str:
    routing = {
        "main": "Ids are routed inside the timed step, on the thread that trains, as without "
        "loader workers (which would compete for the same cores).",
        "loader": "Ids were routed before timing started, as loader workers with cores of their "
        "own would do.",
    }[document["routing"]]
    return (
        f"All cases live in one process per rank and take turns in blocks of "
        f"{document['block_steps']} consecutive steps, in a rotating order, each on the same "
        f"batches in the same order from the same weights. Each case runs "
        f"{document['warmup_rounds']} steps before timing starts, and {document['counted_steps']} "
        "afterwards to count bytes. A block begins at a barrier, with no communication of any case "
        "in flight. There is no barrier or synchronization between its steps, so that a pipeline "
        f"overlaps them as in training; the first steps of a block ({document['block_skip']} here) "
        "refill that overlap and are in no figure of single steps. At its end all ranks wait for "
        "the communication that the pipeline left in flight. The column of whole blocks includes "
        "that wait, and so exposes a pipeline that merely postpones its traffic. Stages are timed "
        f"in the same steps. {routing}"
    )


def _machine(facts: Document) -> Items:
    packages = ", ".join(f"{name} {version}" for name, version in facts["packages"].items())
    malloc = ", ".join(f"{k}={v}" for k, v in facts["malloc"].items()) or "no variables set"
    return Items(
        [
            f"{facts['processor']}, {facts['num_cores']} cores, "
            f"{show_bytes(facts['memory_bytes'])} memory, {facts['gpu'] or 'no GPU used'}",
            f"{facts['threads_per_rank']} thread(s) per rank; malloc: {malloc}; "
            "on CPU freed memory is kept between steps (hotrec/runtime/memory.py)",
            f"Linux {facts['kernel']}, Python {facts['python']}, {packages}",
            f"code {facts['code']}; load average {facts['load_average']:.1f} before the run, "
            f"{facts['load_average_after']:.1f} after",
        ]
    )
