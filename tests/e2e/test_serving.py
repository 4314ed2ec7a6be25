"""Out of a run: export, load_model and predict agree with evaluate, and refuse what they must."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.numpy import load_file

import hotrec as package
from hotrec.data.chunks import Dataset, Jagged
from hotrec.runs.predict import score
from hotrec.train.checkpoint import open_tensors
from hotrec.train.evaluate import measure_auc, measure_quality
from tests.e2e.conftest import REPOSITORY, environment, hotrec

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
NUM_SAMPLES, TEST_FROM = 1500, 1200
DATA = ("--config-dir", "my_conf", "data=my_log")
SIZES = ("model.dense_layer_sizes=[16,8]", "model.over_layer_sizes=[16,8,1]")
MODELS = {
    "dlrm": SIZES,
    "dcnv2": SIZES,
    "din": (*SIZES, "+model.attention.last_seen=item"),
    "own": ("model._target_=my_model.MyModel", "+model.args.hidden=8"),
    "hstu": ("+model.history.seen=item", "model.context=[user]", "model.max_length=3"),
    "sasrec": ("+model.history.seen=item", "model.num_layers=1"),
    "retrieval": (
        *("model=hstu", "+model.history.seen=item", "model.item_id=item"),
        *("model.loss=sampled_softmax", "model.negatives=uniform", "model.num_negatives=30"),
        "trainer.eval_ranking=[5]",
    ),
    "sequences": ("model=own", "model._target_=my_sequences.MySequences", "+model.args.hidden=8"),
}
OF_OWN = ("own", "sequences")
MODEL = (
    *(
        "model.embedding_dim=8",
        "placement=all_cold",
        "pipeline=base",
        "trainer.batch_size=64",
        "trainer.num_workers=0",
    ),
)
LOG = """
source:
  format: delimited
  files: [data/my_log/all.csv]
  separator: ","
  split: {kind: time, column: time, valid_from: 1000, test_from: 1200}
  columns:
    label: {kind: label, source: clicked}
    price: {kind: dense, transform: log1p, standardize: true, fill: 2.0}
    user: {kind: categorical}
    item: {kind: categorical}
    seen: {kind: categorical_list, table: item}
    last_seen: {kind: sequence, source: seen, table: item, max_length: 2}
    slot: {kind: categorical}
    day: {kind: categorical}
  tables:
    user: {encoding: hashing, num_rows: 50}
    slot: {encoding: rows, num_rows: 4}
    item: {min_count: 2}
"""
HEADER = "clicked,price,user,item,seen,slot,day,time"


def lines() -> list[str]:
    """Users, items and days of which some occur in the test split alone."""
    rng = np.random.default_rng(0)
    made = []
    for time in range(NUM_SAMPLES):
        user, item = rng.integers(40), rng.integers(60 + 30 * (time >= TEST_FROM))
        seen = " ".join(f"i{other}" for other in rng.integers(0, 70, rng.integers(4)))
        price = "" if rng.random() < 0.1 else f"{10 * rng.exponential():.3f}"
        rate = 1 / (1 + np.exp(1.5 - user % 4))
        values = (int(rng.random() < rate), price, f"u{user}", f"i{item}", seen)
        made.append(",".join(map(str, (*values, rng.integers(4), f"d{time // 300}", time))))
    return made


@pytest.fixture(scope="module", autouse=True)
def _examples() -> Iterator[None]:
    """Where the model of one's own is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(REPOSITORY / "examples")
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared log, its test samples as files, and a run of each model."""
    folder = tmp_path_factory.mktemp("serving")
    for name in ("my_conf/data", "data/my_log", "days"):
        (folder / name).mkdir(parents=True)
    (folder / "my_conf/data/my_log.yaml").write_text(LOG)
    samples = lines()
    for name, part in {
        "data/my_log/all.csv": samples,
        "days/1.csv": samples[TEST_FROM : TEST_FROM + 100],
        "days/2.csv": samples[TEST_FROM + 100 :],
    }.items():
        (folder / name).write_text("\n".join([HEADER, *part, ""]))
    hotrec("prepare", *DATA, cwd=folder)
    hotrec("profile", *DATA, cwd=folder)
    for kind, keys in MODELS.items():
        choice = () if keys[0].startswith("model=") else (f"model={kind}",)
        words = (*DATA, *choice, *MODEL, *keys)
        assert hotrec("train", *words, cwd=folder, HOTREC_RUN_DIR=f"runs/{kind}").figures
    return folder


@pytest.fixture(scope="module")
def evaluated(folder: Path) -> dict[str, dict[str, Any]]:
    return {
        kind: hotrec("evaluate", f"run_dir=runs/{kind}", "num_workers=0", cwd=folder).figures
        for kind in MODELS
    }


@pytest.mark.parametrize("kind", MODELS)
def test_the_exported_model_scores_as_evaluate(
    folder: Path, evaluated: dict[str, dict[str, Any]], kind: str
) -> None:
    words = ("export", f"run_dir=runs/{kind}", f"output=exported/{kind}")
    figures = hotrec(*words, cwd=folder).figures
    model = package.load_model(folder / "exported" / kind, allow_code=kind in OF_OWN)
    block = Dataset.open(folder / "data/my_log/dataset").block("test", 0)
    features = {  # copies, since the chunk is mapped read-only
        name: Jagged(*map(np.array, vars(ids).values())) if isinstance(ids, Jagged) else ids.copy()
        for name, ids in block.features.items()
    }
    logits = score(model, block.dense.copy(), features, batch_size=64)
    quality = measure_quality(logits, block.label)
    for found in (quality.log_loss, figures["log_loss"]):
        assert found == pytest.approx(evaluated[kind]["log_loss"], abs=1e-6)
    for found in (quality.auc, figures["auc"]):
        assert found == pytest.approx(evaluated[kind]["auc"], abs=1e-5)
    assert figures["step"] == evaluated[kind]["step"]


def test_rows_and_vocabulary_are_those_of_the_dataset(folder: Path) -> None:
    exported = folder / "exported/rows"
    hotrec("export", "run_dir=runs/dlrm", f"output={exported}", cwd=folder)
    (checkpoint,) = (folder / "runs/dlrm/checkpoints").glob("step-*")
    with open_tensors(checkpoint) as files:
        (name,) = (found for found in files.shapes if found.endswith("embedding_bags.item.weight"))
        rows = load_file(exported / "tables/item.safetensors")["weight"]
        np.testing.assert_array_equal(rows, files.whole(name).numpy())
    vocabulary = pq.read_table(exported / "vocab/item.parquet").to_pydict()
    assert vocabulary["row"] == list(range(1, len(rows)))
    described = json.loads((exported / "model.json").read_text())
    tables = {table["name"]: table for table in described["tables"]}
    assert tables["user"]["vocabulary"] is None
    assert described["encoding"]["tables"]["user"]["encoding"] == "hashing"
    assert described["encoding"]["columns"]["price"]["fill"] == 2.0
    assert described["encoding"]["means"].keys() == {"price"}
    assert described["encoding"]["null_values"] == [""]
    assert described["architecture"]["labels"] == ["clicked"]


def test_code_is_imported_only_where_it_is_allowed(folder: Path) -> None:
    hotrec("export", "run_dir=runs/own", "output=exported/code", cwd=folder)
    with pytest.raises(
        ValueError, match=r"model.json: .*class my_model.MyModel. Call .*allow_code"
    ):
        package.load_model(folder / "exported/code")


@pytest.mark.parametrize("kind", ["dlrm", "hstu", "sasrec", "retrieval"])
def test_records_are_encoded_and_scored_as_predict_does(folder: Path, kind: str) -> None:
    """By the code in the export, where there is no hotrec, pyarrow or torchrec."""
    # Of each kind a directory: Python leaves its cache of the code there, which no export removes.
    here = f"exported/alone_{kind}"
    for words in (
        ("export", f"run_dir=runs/{kind}", f"output={here}"),
        ("predict", f"run_dir=runs/{kind}", "input=[days]", "output=encoded"),
    ):
        assert hotrec(*words, cwd=folder).exit_code == 0
    program = f"""
import csv, json
{WALL}
sys.path.insert(0, "{here}")
from encoder import load_encoder
from plain import load_model
records = [row for day in (1, 2) for row in csv.DictReader(open(f"days/{{day}}.csv"))]
encoder, model = load_encoder("{here}"), load_model("{here}")
print(json.dumps(model(*encoder(records)).tolist()))
"""
    found = run_program(program, folder)
    expected = pq.read_table(folder / "encoded/scores")["logit"].to_numpy()
    # Attention is padded to the longest history of a batch, and batches end with the files.
    tolerance = 0 if kind == "dlrm" else 1e-6
    np.testing.assert_allclose(np.array(found, np.float32), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize(("rows", "most"), [("fp16", 1e-4), ("int8", 1e-2)])
def test_small_rows(
    folder: Path, evaluated: dict[str, dict[str, Any]], rows: str, most: float
) -> None:
    words = ("export", "run_dir=runs/dlrm", f"output=exported/{rows}", f"export.rows={rows}")
    figures = hotrec(*words, cwd=folder).figures
    assert figures["rows"] == rows
    assert figures["auc"] == pytest.approx(evaluated["dlrm"]["auc"], abs=most)
    dtype = {"fp16": torch.float16, "int8": torch.int8}[rows]
    model = package.load_model(folder / "exported" / rows)
    assert {table.weight.dtype for table in model.tables.values()} == {dtype}


# Keeps packages out of a program.
WALL = """
import sys
BLOCKED = {
    *("hotrec", "torchrec", "fbgemm_gpu", "tensordict", "hydra", "omegaconf", "pyarrow", "scipy"),
    *("xxhash", "yaml", "jinja2", "matplotlib", "tensorboard", "tqdm"),
}
class Wall:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ImportError(name)
sys.meta_path.insert(0, Wall())
"""


def run_program(program: str, folder: Path) -> Any:
    """What a program prints, in a folder."""
    words = [sys.executable, "-c", program]
    done = subprocess.run(
        words, cwd=folder, env=environment(), capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_it_loads_without_the_packages_of_training(folder: Path) -> None:
    hotrec("export", "run_dir=runs/dcnv2", "output=exported/alone", cwd=folder)
    program = f"""
import json
{WALL.replace('*("hotrec", ', "*(")}
import hotrec, torch
model = hotrec.load_model("exported/alone")
ids = {{feature: torch.tensor([1, 2]) for feature, _ in model.shape.features}}
print(json.dumps(model(torch.ones(2, 1), ids).tolist()))
"""
    found = run_program(program, folder)
    model = package.load_model(folder / "exported/alone")
    ids = {feature: torch.tensor([1, 2]) for feature, _ in model.shape.features}
    assert found == pytest.approx(model(torch.ones(2, 1), ids).tolist())


def test_aot_inductor(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    hotrec("export", "run_dir=runs/dlrm", "output=exported/compiled", cwd=folder)
    model = package.load_model(folder / "exported/compiled")
    batch = torch.export.Dim("batch")
    ids = {feature: torch.tensor([1, 2, 3]) for feature, _ in model.shape.features}
    shapes = ({0: batch}, dict.fromkeys(ids, {0: batch}))
    program = torch.export.export(model, (torch.ones(3, 1), ids), dynamic_shapes=shapes)
    package_path = str(tmp_path / "model.pt2")
    torch._inductor.aoti_compile_and_package(program, package_path=package_path)
    compiled = torch._inductor.aoti_load_package(package_path)
    fewer = (torch.ones(2, 1), {feature: rows[1:] for feature, rows in ids.items()})
    torch.testing.assert_close(compiled(*fewer), model(*fewer), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["dlrm", "own", "sequences", "retrieval"])
def test_predict_scores_as_evaluate(
    folder: Path, evaluated: dict[str, dict[str, Any]], kind: str
) -> None:
    words = ("predict", f"run_dir=runs/{kind}", "input=[days]", "output=scores", "batch_size=32")
    figures = hotrec(*words, cwd=folder).figures
    assert figures["num_samples"] == NUM_SAMPLES - TEST_FROM
    assert figures["auc"] == pytest.approx(evaluated[kind]["auc"], abs=1e-5)
    assert figures["log_loss"] == pytest.approx(evaluated[kind]["log_loss"], abs=1e-6)
    table = pq.read_table(folder / "scores/scores")
    scores = {name: table[name].to_numpy() for name in table.column_names}
    assert scores["line"].tolist() == [*range(2, 102), *range(2, 202)]
    np.testing.assert_allclose(scores["score"], 1 / (1 + np.exp(-scores["logit"])), atol=1e-6)
    auc = measure_auc(scores["score"], scores["clicked"] == 1)
    assert auc == pytest.approx(evaluated[kind]["auc"], abs=1e-5)


def test_several_labels_and_weights(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trained, evaluated, exported and predicted alike."""
    monkeypatch.chdir(tmp_path)
    log = LOG.replace("label: {kind", "click: {kind").replace("my_log", "two")
    columns = "  columns:\n    cheap: {kind: label}\n    weight: {kind: weight}\n"
    lines = (folder / "data/my_log/all.csv").read_text().splitlines()
    made = [f"{lines[0]},cheap,weight"]
    made += [f"{line},{n % 3 // 2},{1 + n % 4}" for n, line in enumerate(lines[1:])]
    for name, text in {
        "my_conf/data/two.yaml": log.replace("  columns:\n", columns),
        "data/two/all.csv": "\n".join([*made, ""]),
        "days/1.csv": "\n".join([made[0], *made[TEST_FROM + 1 :], ""]),
    }.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
    words = ("--config-dir", "my_conf", "data=two")
    hotrec("prepare", *words, cwd=tmp_path)
    hotrec("profile", *words, cwd=tmp_path)
    model = (*MODEL, *SIZES, "model=mmoe", "+trainer.label_weights.cheap=2")
    model += ("trainer.eval_every_steps=4", "trainer.keep_best=true")
    model += ("trainer.early_stop_patience=50", "trainer.callbacks=[my_callback.Notify]")
    summary = hotrec("train", *words, *model, cwd=tmp_path, HOTREC_RUN_DIR="runs/mmoe").figures
    run = ("run_dir=runs/mmoe",)
    found = {
        "evaluate": hotrec("evaluate", *run, "num_workers=0", cwd=tmp_path).figures,
        "export": hotrec("export", *run, "output=model", cwd=tmp_path).figures,
        "predict": hotrec("predict", *run, "input=[days]", "output=s", cwd=tmp_path).figures,
    }
    losses = {name: of["log_loss"] for name, of in found["evaluate"]["by_label"].items()}
    assert found["evaluate"]["log_loss"] == pytest.approx(losses["click"] + 2 * losses["cheap"])
    for figures in found.values():
        for name, of in figures["by_label"].items():
            for figure in ("auc", "log_loss"):
                expected = found["evaluate"]["by_label"][name][figure]
                assert of[figure] == pytest.approx(expected, abs=1e-5)
    assert summary["auc"] == pytest.approx(found["evaluate"]["auc"])
    assert (tmp_path / "runs/mmoe/note.txt").read_text().endswith("\n")
    words = ("evaluate", *run, "num_workers=0", "checkpoint=best", "split=valid")
    best = hotrec(*words, cwd=tmp_path).figures
    assert best["step"] == summary["best_step"]
    assert best["log_loss"] == pytest.approx(summary["best_log_loss"], abs=1e-6)
    table = pq.read_table(tmp_path / "s/scores")
    of_label = [f"{of}_{name}" for name in ("cheap", "click") for of in ("logit", "score", "label")]
    assert table.column_names == ["line", *of_label, "weight"]
    hotrec("report", "runs=[runs/mmoe]", "output=page", cwd=tmp_path)
    assert "AUC of cheap" in (tmp_path / "page/report.html").read_text()


def test_ranks_divide_the_files(folder: Path, tmp_path: Path) -> None:
    words = ("predict", "run_dir=runs/dlrm", "input=[days/1.csv,days/2.csv,days/1.csv]")
    alone = hotrec(*words, f"output={tmp_path}/1", cwd=folder).figures
    ranks = ("launch.num_ranks=2", f"output={tmp_path}/2")
    together = hotrec(*words, *ranks, cwd=folder).figures
    assert (alone["world_size"], together["world_size"]) == (1, 2)
    for name in ("num_files", "num_samples", "num_skipped", "auc", "log_loss"):
        assert together[name] == alone[name]
    tables = [pq.read_table(tmp_path / name / "scores") for name in "12"]
    assert tables[0].equals(tables[1])


def test_predict_needs_neither_label_nor_split(folder: Path, tmp_path: Path) -> None:
    text = (folder / "days/1.csv").read_text()
    columns = [line.split(",")[1:7] for line in text.splitlines()]
    (tmp_path / "new.csv").write_text("".join(",".join(line) + "\n" for line in columns))
    words = ("run_dir=runs/dlrm", f"input=[{tmp_path}/new.csv]", f"output={tmp_path}/scores")
    figures = hotrec("predict", *words, cwd=folder).figures
    assert "auc" not in figures
    words = ("run_dir=runs/dlrm", "input=[days/1.csv]", f"output={tmp_path}/labelled")
    hotrec("predict", *words, cwd=folder)
    bare, labelled = (pq.read_table(tmp_path / name / "scores") for name in ("scores", "labelled"))
    assert bare.column_names == ["line", "logit", "score"]
    assert labelled.select(bare.column_names).equals(bare)


def test_columns_are_kept_beside_the_scores(folder: Path, tmp_path: Path) -> None:
    words = ("predict", "run_dir=runs/dlrm", "input=[days/1.csv]", f"output={tmp_path}/scores")
    hotrec(*words, "predict.keep=[time,item,price,time]", cwd=folder)
    table = pq.read_table(tmp_path / "scores/scores")
    assert table.column_names == ["line", "logit", "score", "clicked", "time", "item", "price"]
    lines = (folder / "days/1.csv").read_text().splitlines()[1:]
    assert table["time"].to_pylist() == [line.split(",")[7] for line in lines]
    assert table["item"].to_pylist() == [line.split(",")[3] for line in lines]


def test_ids_without_a_row_are_counted(folder: Path, tmp_path: Path) -> None:
    words = ("predict", "run_dir=runs/dlrm", "input=[days]", f"output={tmp_path}/scores")
    outcome = hotrec(*words, cwd=folder)
    found = outcome.figures["unknown_ids"]
    expected = folder / "data/my_log/dataset/manifest.json"
    of_test = json.loads(expected.read_text())["content"]["source"]["unknown_ids"]["test"]
    assert {name: of["num_unknown"] for name, of in found.items()} == {
        name: of["num_unknown"] for name, of in of_test.items()
    }
    assert found["item"]["num_ids"] == NUM_SAMPLES - TEST_FROM
    assert 0 < found["item"]["num_unknown"] < found["item"]["num_ids"]
    # No day of the test split is in training: it is no odder in the files.
    assert found["day"]["unknown_frac"] == found["day"]["held_out_frac"] == 1
    assert "day 100.0% (held out 100.0%), item 2" in outcome.stderr


def test_a_column_without_values_is_said(folder: Path, tmp_path: Path) -> None:
    header, *rows = (folder / "days/1.csv").read_text().splitlines()
    fields = [row.split(",") for row in rows]
    emptied = [",".join([clicked, "", "", *rest]) for clicked, _, _, *rest in fields]
    (tmp_path / "x.csv").write_text("\n".join([header, *emptied, ""]))
    words = ("predict", "run_dir=runs/dlrm", f"input=[{tmp_path}/x.csv]")
    outcome = hotrec(*words, f"output={tmp_path}/scores", cwd=folder)
    assert outcome.figures["missing"] == {"price": 100, "user": 100}
    for column in ("price", "user"):
        assert f"x.csv column {column}: all 100 values are missing" in outcome.stderr


def other_form(folder: Path, target: Path) -> None:
    """The first file with other names of items."""
    text = (folder / "days/1.csv").read_text()
    target.write_text(re.sub(r",i([0-9])", r",j\1", text))


def test_ids_of_another_form_can_be_let_through(folder: Path, tmp_path: Path) -> None:
    other_form(folder, tmp_path / "x.csv")
    words = ("predict", "run_dir=runs/dlrm", f"input=[{tmp_path}/x.csv]")
    words += (f"output={tmp_path}/scores", "predict.max_unknown_frac=1")
    assert hotrec(*words, cwd=folder).figures["unknown_ids"]["item"]["unknown_frac"] == 1


# What is refused.

Refuse = Callable[..., str]


@pytest.fixture
def refuse(folder: Path, tmp_path: Path) -> Refuse:
    """Runs a command in a copy of the folder; gives its one line, after which nothing differs."""
    here = tmp_path / "here"
    shutil.copytree(folder, here)

    def contents() -> dict[str, bytes]:
        files = (path for path in here.rglob("*") if path.is_file())
        names = {path.relative_to(here).as_posix(): path.read_bytes() for path in files}
        return {name: held for name, held in names.items() if "runs/export" not in name
                and "runs/predict" not in name}  # fmt: skip

    def run(*words: str, change: Callable[[Path], object] = lambda _: None) -> str:
        change(here)
        before = contents()
        outcome = hotrec(*words, cwd=here)
        assert outcome.exit_code == 1
        assert contents() == before
        (line,) = (line for line in outcome.stderr.splitlines() if "error: " in line)
        return line

    return run


PREDICT = ("predict", "run_dir=runs/dlrm", "output=new")
EXPORT = ("export", "run_dir=runs/dlrm", "output=new")


def unfinish(here: Path) -> None:
    (here / "runs/dlrm/summary.json").unlink()


def edit_config(here: Path) -> None:
    path = here / "runs/dlrm/config.yaml"
    path.write_text(path.read_text().replace("fill: 2.0", "fill: 3.0"))


def alter_vocabulary(here: Path) -> None:
    path = here / "data/my_log/dataset/vocab/item.arrow"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def write(name: str, text: str) -> Callable[[Path], object]:
    return lambda here: (here / name).write_text(text)


@pytest.mark.parametrize(
    ("words", "change", "message"),
    [
        (EXPORT, unfinish, r"run_dir: expected a finished run"),
        ((*PREDICT, "input=[days]"), unfinish, r"run_dir: expected a finished run"),
        ((*EXPORT, "checkpoint=step-9"), None, r"checkpoint: expected auto, latest, best"),
        (("export", "output=days"), None, r"days: expected an empty directory or a model export"),
        ((*PREDICT[:2], "input=[days]", "output=days"), None, r"days: expected an empty directory"),
        ((*EXPORT, "export.eval_split=dev"), None, r"export.eval_split: expected .*'dev'"),
        (EXPORT, alter_vocabulary, r"vocab/item.arrow"),
        ((*PREDICT, "input=[days]"), alter_vocabulary, r"vocab/item.arrow"),
        ((*PREDICT, "input=[days]"), edit_config, r"data.source.columns.price"),
        ((*PREDICT, "input=[absent.csv]"), None, r"input: expected files .*absent.csv"),
        ((*PREDICT, "input=[days]", "+joins.x=[days]"), None, r"joins.x: expected one of"),
        (
            (*PREDICT, "input=[x.csv]"),
            write("x.csv", "price,user,item,slot,day\n1,u1,i1,0,d1\n"),
            r"input x.csv: .*columns.seen.*got 'seen'",
        ),
        (
            (*PREDICT, "input=[days/1.csv,x.csv]"),
            write("x.csv", "price,user,item,seen,slot,day\n1,u1,i1,,0,d1\n"),
            r"x.csv: expected the columns \['clicked'\]",
        ),
        (
            (*PREDICT, "input=[days/1.csv,x.csv]"),
            write("x.csv", f"{HEADER}\n1,1,u1,i1,,0,d1,1\n1,1,u1,i1,,4,d1,1\n"),
            r"x.csv line 3: expected a row number below 4 of table slot",
        ),
        (
            (*PREDICT, "input=[days/1.csv,x.csv]"),
            lambda here: other_form(here, here / "x.csv"),
            r"x.csv column item: expected at most 6\d.\d% .*got 100.0% of 100, such as 'j\d+'",
        ),
        (
            (*PREDICT, "input=[days]", "predict.keep=[usr]"),
            None,
            r"predict.keep: expected one of the columns .*got 'usr'",
        ),
        (
            (*PREDICT, "input=[days]", "predict.keep=[time,clicked]"),
            None,
            r"predict.keep: expected names other than the score columns .*got \['clicked'\]",
        ),
        (
            (*EXPORT[:2], "output=data/my_log/dataset/new"),
            None,
            r"output .*got one inside .*dataset",
        ),
        (
            (*PREDICT[:2], "input=[days]", "output=data/my_log/dataset/new"),
            None,
            r"output .*got one inside .*dataset",
        ),
    ],
)  # fmt: skip
def test_refusals(
    refuse: Refuse, words: tuple[str, ...], change: Callable[[Path], object] | None, message: str
) -> None:
    assert re.search(message, refuse(*words, change=change or (lambda _: None)))


def test_commands_and_code_on_the_page_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the page, in a directory with a run."""
    text = (REPOSITORY / "docs/serving.md").read_text()
    monkeypatch.chdir(folder)
    num_run = 0
    for kind, block in re.findall(r"```(console|python)\n(.*?)```", text, re.DOTALL):
        if kind == "python":
            exec(block, {})
            num_run += 1
            continue
        for line in block.replace("\\\n", " ").splitlines():
            program, *words = shlex.split(line, comments=True)
            assert program == "hotrec"
            assert hotrec(*words, cwd=folder).figures
            num_run += 1
    assert num_run >= 5
