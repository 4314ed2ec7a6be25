"""Out of a run: export, load_model and predict agree with evaluate, and refuse what they must."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.numpy import load_file

import hotrec as package
from hotrec.data.chunks import Dataset, Jagged
from hotrec.runs.predict import score
from hotrec.train.checkpoint import open_tensors
from hotrec.train.evaluate import measure_auc, measure_quality
from tests.e2e.conftest import REPOSITORY, Outcome, environment, hotrec, refusal

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
    *("model.embedding_dim=8", "placement=all_cold", "pipeline=base"),
    *("trainer.batch_size=64", "trainer.num_workers=0"),
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
    for kind, keys in MODELS.items():
        choice = () if keys[0].startswith("model=") else (f"model={kind}",)
        words = (*DATA, *choice, *MODEL, *keys)
        assert hotrec("train", *words, cwd=folder, HOTREC_RUN_DIR=f"runs/{kind}").figures
    return folder


@pytest.fixture(scope="module")
def export(folder: Path) -> Callable[..., tuple[Path, dict[str, Any]]]:
    """Exports a model, once for each choice of words."""

    @cache
    def run(kind: str, *words: str) -> tuple[Path, dict[str, Any]]:
        output = folder / "exported" / "-".join((kind, *words)).replace("=", "-")
        given = (f"run_dir=runs/{kind}", f"output={output}", *words)
        return output, hotrec("export", *given, cwd=folder).figures

    return run


@pytest.fixture(scope="module")
def predict(folder: Path) -> Callable[..., tuple[pa.Table, Outcome]]:
    """Scores files with a model."""

    def run(kind: str, files: str, *words: str) -> tuple[pa.Table, Outcome]:
        given = (f"run_dir=runs/{kind}", f"input=[{files}]", "output=scores", *words)
        outcome = hotrec("predict", *given, cwd=folder)
        assert outcome.exit_code == 0, outcome.stderr
        return pq.read_table(folder / "scores/scores"), outcome

    return run


@pytest.mark.parametrize("kind", MODELS)
def test_exported_and_predicted_as_evaluated(
    folder: Path, export: Any, predict: Any, kind: str
) -> None:
    evaluated = hotrec("evaluate", f"run_dir=runs/{kind}", "num_workers=0", cwd=folder).figures
    path, exported = export(kind)
    model = package.load_model(path, allow_code=kind in OF_OWN)
    block = Dataset.open(folder / "data/my_log/dataset").block("test", 0)
    features = {  # copies, since the chunk is mapped read-only
        name: Jagged(*map(np.array, vars(ids).values())) if isinstance(ids, Jagged) else ids.copy()
        for name, ids in block.features.items()
    }
    logits = score(model, block.dense.copy(), features, batch_size=64)
    table, outcome = predict(kind, "days", "batch_size=32")
    predicted = outcome.figures
    of_model = measure_quality(logits, block.label)
    assert exported["step"] == evaluated["step"]
    assert predicted["num_samples"] == NUM_SAMPLES - TEST_FROM
    for name, limit in (("log_loss", 1e-6), ("auc", 1e-5)):
        for found in (exported[name], predicted[name], getattr(of_model, name)):
            assert found == pytest.approx(evaluated[name], abs=limit), name
    scores = {name: table[name].to_numpy() for name in table.column_names}
    assert scores["line"].tolist() == [*range(2, 102), *range(2, 202)]
    np.testing.assert_allclose(scores["score"], 1 / (1 + np.exp(-scores["logit"])), atol=1e-6)
    auc = measure_auc(scores["score"], scores["clicked"] == 1)
    assert auc == pytest.approx(evaluated["auc"], abs=1e-5)


def test_rows_and_vocabulary_are_those_of_the_dataset(folder: Path, export: Any) -> None:
    exported, _ = export("dlrm")
    (checkpoint,) = (folder / "runs/dlrm/checkpoints").glob("step-*")
    with open_tensors(checkpoint) as files:
        (name,) = (found for found in files.shapes if found.endswith("embedding_bags.item.weight"))
        rows = load_file(exported / "tables/item.safetensors")["weight"]
        np.testing.assert_array_equal(rows, files.whole(name).numpy())
    vocabulary = pq.read_table(exported / "vocab/item.parquet").to_pydict()
    assert vocabulary["row"] == list(range(1, len(rows)))
    described = json.loads((exported / "model.json").read_text())
    assert {t["name"]: t["vocabulary"] is None for t in described["tables"]}["user"]
    assert described["encoding"]["columns"]["price"]["fill"] == 2.0
    assert described["encoding"]["means"].keys() == {"price"}


def test_code_is_imported_only_where_it_is_allowed(export: Any) -> None:
    with pytest.raises(ValueError, match=r"model.json: .*class my_model.MyModel. .*allow_code"):
        package.load_model(export("own")[0])


# Keeps packages out of a program.
WALL = """
import csv, json, sys
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


@pytest.mark.parametrize(
    ("kind", "library"), [("dlrm", True), ("dlrm", False), ("hstu", False), ("sasrec", False)]
)
def test_records_are_encoded_and_scored_as_predict_does(
    folder: Path, export: Any, predict: Any, kind: str, library: bool
) -> None:
    """By hotrec without the packages of training, or by the code in the export without hotrec."""
    path, _ = export(kind)
    wall = WALL.replace('*("hotrec", ', "*(") if library else f"{WALL}\nsys.path[:0] = ['{path}']"
    encoder, plain = ("hotrec", "hotrec") if library else ("encoder", "plain")
    program = f"""{wall}
from {encoder} import load_encoder
from {plain} import load_model
records = [row for day in (1, 2) for row in csv.DictReader(open(f"days/{{day}}.csv"))]
encoder, model = load_encoder("{path}"), load_model("{path}")
print(json.dumps(model(*encoder(records)).tolist()))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, env=environment(), capture_output=True,
        text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found, expected = json.loads(done.stdout), predict(kind, "days")[0]["logit"].to_numpy()
    # Attention is padded to the longest history of a batch, and batches end with the files.
    tolerance = 0 if kind == "dlrm" else 1e-6
    np.testing.assert_allclose(np.array(found, np.float32), expected, rtol=0, atol=tolerance)


def test_small_rows(export: Any) -> None:
    for rows, dtype, most in (("fp16", torch.float16, 1e-4), ("int8", torch.int8, 1e-2)):
        path, figures = export("dlrm", f"rows={rows}")
        assert figures["auc"] == pytest.approx(export("dlrm")[1]["auc"], abs=most)
        tables = package.load_model(path).tables
        assert {table.weight.dtype for table in tables.values()} == {dtype}


def test_aot_inductor(export: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model = package.load_model(export("dlrm")[0])
    batch = torch.export.Dim("batch")
    ids = {feature: torch.tensor([1, 2, 3]) for feature, _ in model.shape.features}
    shapes = ({0: batch}, dict.fromkeys(ids, {0: batch}))
    program = torch.export.export(model, (torch.ones(3, 1), ids), dynamic_shapes=shapes)
    package_path = str(tmp_path / "model.pt2")
    torch._inductor.aoti_compile_and_package(program, package_path=package_path)
    compiled = torch._inductor.aoti_load_package(package_path)
    fewer = (torch.ones(2, 1), {feature: rows[1:] for feature, rows in ids.items()})
    torch.testing.assert_close(compiled(*fewer), model(*fewer), atol=1e-5, rtol=0)


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
    model = (*MODEL, *SIZES, "model=mmoe", "+trainer.label_weights.cheap=2")
    model += ("trainer.callbacks=[my_callback.Notify]",)
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
    table = pq.read_table(tmp_path / "s/scores")
    of_label = [f"{of}_{name}" for name in ("cheap", "click") for of in ("logit", "score", "label")]
    assert table.column_names == ["line", *of_label, "weight"]


def test_ranks_divide_the_files(predict: Any) -> None:
    files = "days/1.csv,days/2.csv,days/1.csv"
    alone, one = predict("dlrm", files)
    together, two = predict("dlrm", files, "launch.num_ranks=2")
    assert (one.figures["world_size"], two.figures["world_size"]) == (1, 2)
    for name in ("num_files", "num_samples", "num_skipped", "auc", "log_loss"):
        assert two.figures[name] == one.figures[name]
    assert alone.equals(together)


def test_columns_of_the_files_are_kept_and_labels_are_not_needed(
    folder: Path, predict: Any
) -> None:
    kept, _ = predict("dlrm", "days/1.csv", "keep=[time,item,price,time]")
    assert kept.column_names == ["line", "logit", "score", "clicked", "time", "item", "price"]
    rows = [line.split(",") for line in (folder / "days/1.csv").read_text().splitlines()]
    assert kept["time"].to_pylist() == [row[7] for row in rows[1:]]
    assert kept["item"].to_pylist() == [row[3] for row in rows[1:]]
    (folder / "bare.csv").write_text("".join(",".join(row[1:7]) + "\n" for row in rows))
    bare, outcome = predict("dlrm", "bare.csv")
    assert "auc" not in outcome.figures
    assert bare.column_names == ["line", "logit", "score"]
    assert kept.select(bare.column_names).equals(bare)


def test_ids_without_a_row_and_missing_values_are_counted(folder: Path, predict: Any) -> None:
    found = predict("dlrm", "days")[1].figures["unknown_ids"]
    manifest = json.loads((folder / "data/my_log/dataset/manifest.json").read_text())
    of_test = manifest["content"]["source"]["unknown_ids"]["test"]
    for name, of in found.items():
        assert of["num_unknown"] == of_test[name]["num_unknown"]
    assert found["item"]["num_ids"] == NUM_SAMPLES - TEST_FROM
    assert 0 < found["item"]["num_unknown"] < found["item"]["num_ids"]
    # No day of the test split is in training: it is no odder in the files.
    assert found["day"]["unknown_frac"] == found["day"]["held_out_frac"] == 1
    emptied = re.sub(r"^(\d),[^,]*,[^,]*", r"\1,,", (folder / "days/1.csv").read_text(), flags=re.M)
    (folder / "emptied.csv").write_text(emptied)
    assert predict("dlrm", "emptied.csv")[1].figures["missing"] == {"price": 100, "user": 100}
    other_form(folder, "other.csv")
    _, outcome = predict("dlrm", "other.csv", "max_unknown_frac=1")
    assert outcome.figures["unknown_ids"]["item"]["unknown_frac"] == 1


def other_form(folder: Path, name: str) -> None:
    """The first file with other names of items."""
    text = (folder / "days/1.csv").read_text()
    (folder / name).write_text(re.sub(r",i([0-9])", r",j\1", text))


REFUSED = {
    "input=[days/1.csv,row.csv]": r"row.csv line 3: expected a row number below 4 of table slot",
    "input=[days/1.csv,form.csv]": r"form.csv column item: .*got 100.0% of 100, such as 'j\d+'",
    "input=[days] output=data/my_log/dataset/new": r"output .*got one inside .*dataset",
    "input=[days] run_dir=runs/edited": r"data.source.columns.price",
}


@pytest.mark.parametrize("words", REFUSED)
def test_predict_refuses(folder: Path, words: str) -> None:
    """The rest is in ``tests/faults/table/data.py``."""
    (folder / "row.csv").write_text(f"{HEADER}\n1,1,u1,i1,,0,d1,1\n1,1,u1,i1,,4,d1,1\n")
    other_form(folder, "form.csv")
    if not (edited := folder / "runs/edited").exists():
        shutil.copytree(folder / "runs/dlrm", edited)
        text = (edited / "config.yaml").read_text()
        (edited / "config.yaml").write_text(text.replace("fill: 2.0", "fill: 3.0"))
    said = refusal("predict", "run_dir=runs/dlrm", "output=new", *words.split(), cwd=folder)
    assert re.search(REFUSED[words], said), said
    assert not (folder / "new").exists()


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
