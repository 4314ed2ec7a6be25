"""The result of a benchmark: the table for the terminal, and the page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hotrec.report.render import Column, markdown_table, record_table
from hotrec.report.units import show_bytes, show_count, show_frac, show_seconds

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
    ("processor", "cpu_s", show_seconds),
    ("main thread", "main_cpu_s", show_seconds),
    ("sent per rank", "sent_bytes", show_bytes),
    ("of bound", "bytes_over_bound", _times),
    ("step / planner", "planner_step_ratio", _times),
    ("step / hand-tuned", "hand_tuned_step_ratio", _times),
    ("bytes / planner", "planner_bytes_ratio", _times),
    ("bytes / hand-tuned", "hand_tuned_bytes_ratio", _times),
    ("loss", "final_loss", "{:.6f}".format),
    ("largest difference", "largest_loss_difference", "{:.1e}".format),
)
MORE_COLUMNS: tuple[Column, ...] = (
    ("case", "name", str),
    ("bound", "bound_bytes", show_bytes),
    ("between hosts", "between_hosts_bytes", show_bytes),
    ("bound between hosts", "between_hosts_bound_bytes", show_bytes),
    ("on the wire", "wire_bytes", show_bytes),
    ("distinct rows", "num_distinct_rows", show_count),
    ("hot lookups", "hot_lookups_frac", show_frac),
    ("memory", "memory_bytes", show_bytes),
    ("steps", "num_steps", show_count),
)
READING = "Columns and method are explained in benchmarks/README.md."
ROUTING = {
    "main": "Ids are routed inside the timed step, on the thread that trains.",
    "loader": "Ids were routed before timing started, as loader workers do.",
}


def result_text(cases: Mapping[str, Document]) -> str:
    """The results as a table for a terminal."""
    return _table(_records(cases), COLUMNS)


def _table(records: Iterable[Document], columns: Sequence[Column]) -> str:
    table = record_table(records, columns)
    return markdown_table(table.header, table.rows)


def _records(cases: Mapping[str, Document]) -> list[dict[str, Any]]:
    return [
        {
            **case,
            "name": name,
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
        document: The content of compare.json.
        command: The command line that reproduces the page.
        configuration: The complete configuration as YAML.
    """
    cases = document["cases"]
    records = _records(cases)
    stages_s = {name: case["stage_s"] for name, case in cases.items() if case["stage_s"]}
    apart, limit = document["losses_apart"], document["loss_tolerance"]
    verdict = [f"**Losses differ by more than {limit:g}: {', '.join(apart)}.**"] if apart else []
    sections: dict[str, list[str]] = {
        "Setting": [*_setting(document), f"Made by `{command}`."],
        "Results": [_table(records, COLUMNS), *verdict, READING],
        "Bytes per rank and step, rows and memory": [_table(records, MORE_COLUMNS)],
        "Stages of the step": _times_by_case("stage, mean rank", stages_s),
        "Machine": ["\n".join(f"* {fact}" for fact in _machine(document["machine"]))],
        "Configuration": [f"```yaml\n{configuration.rstrip()}\n```"],
    }
    blocks = [f"# hotrec compare: {document['name']}"]
    for title, texts in sections.items():
        blocks += [f"## {title}", *texts] if texts else []
    return "\n\n".join(blocks) + "\n"


def ids_of(document: Document) -> str:
    """Where the ids of a benchmark are from."""
    if document.get("dataset") is not None:
        path = Path(document["dataset"])
        return f"samples of {path.parent.name if path.name == 'dataset' else path.name}"
    return f"Zipf {document['data']['zipf_exponent']:g}, one id per feature"


def _setting(document: Document) -> list[str]:
    data, hosts = document["data"], document["num_hosts"]
    pipelines = [f"{name} {pipeline}" for name, pipeline in document["pipelines"].items()]
    hot = [
        f"{name} {show_count(facts['num_hot_rows'])} ({facts['policy']}, "
        f"{show_bytes(facts['hot_bytes'])} per rank)"
        for name, facts in document["partitions"].items()
    ]
    return [
        f"{document['world_size']} ranks on {hosts} host{'s' * (hosts != 1)}, network: "
        f"{document['network']}. {data['num_tables']} tables, {show_count(data['num_rows'])} rows, "
        f"{ids_of(document)}, D = {data['embedding_dim']}, "
        f"batch {show_count(data['batch_size'])} per rank. Optimizer {document['optimizer']}, "
        f"dense layers of {show_bytes(4 * data['num_dense_values'])}.",
        f"Pipelines: {', '.join(pipelines)}. Hot rows: {', '.join(hot) or 'none'}.",
        f"{document['rounds']} blocks of {document['block_steps']} steps of each case in turn, of "
        f"which the first {document['block_skip']} count in whole blocks only; "
        f"{document['warmup_rounds']} steps before, and {document['counted_steps']} afterwards to "
        f"count bytes. {ROUTING[document['routing']]}",
    ]


def _times_by_case(what: str, times_s: Mapping[str, Mapping[str, float]]) -> list[str]:
    names = dict.fromkeys(name for times in times_s.values() for name in times)
    records = [{"name": n, **{case: t.get(n) for case, t in times_s.items()}} for n in names]
    columns: list[Column] = [(what, "name", str), *((case, case, show_seconds) for case in times_s)]
    return [_table(records, columns)] if times_s else []


def _machine(facts: Document) -> list[str]:
    packages = ", ".join(f"{name} {version}" for name, version in facts["packages"].items())
    malloc = ", ".join(f"{k}={v}" for k, v in facts["malloc"].items()) or "no variables set"
    return [
        f"{facts['processor']}, {facts['num_cores']} cores, "
        f"{show_bytes(facts['memory_bytes'])} memory, {facts['gpu'] or 'no GPU used'}",
        f"{facts['threads_per_rank']} thread(s) per rank; malloc: {malloc}",
        f"Linux {facts['kernel']}, Python {facts['python']}, {packages}",
        f"code {facts['code']}; load average {facts['load_average']:.1f} before the run, "
        f"{facts['load_average_after']:.1f} after",
    ]
