"""The tiny workspace that every case gets a private copy of, and what is right to make in it."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.faults.case import Check, Complaint, Made, works
from tests.helpers.runs import losses

TINY = (
    "experiment=synthetic_smoke dataset_name=tiny data.synthetic.num_rows=[200,50,20,100] "
    "data.synthetic.num_train=1024 data.synthetic.num_valid=256 data.synthetic.num_test=256 "
    "data.synthetic.rows_per_chunk=256 model.embedding_dim=4 model.dense_layer_sizes=[8,4] "
    "model.over_layer_sizes=[8,1] trainer.batch_size=64 trainer.num_workers=0 "
    "trainer.log_every_steps=1 trainer.save_every_steps=4 trainer.watchdog_s=10 "
    "trainer.timeout_s=60 trainer.num_epochs=3"
)
PREPARE = f"prepare {TINY}"
PLAN = f"plan {TINY} placement=coverage"
TRAIN = f"train {TINY} placement=saved trainer.max_steps=16"
DATASET, PROFILED, PARTITION = (
    "data/tiny/dataset",
    "data/tiny/dataset-profile",
    "data/tiny/partition",
)
COSTS, ONE, TWO = "data/costs", "runs/one", "runs/two"
LAST, FIRST = "checkpoints/step-00000016", "checkpoints/step-00000012"
EVALUATE = f"evaluate run_dir={ONE}"
# A log with a run on it, for predict, and an earlier export, to be replaced.
DAYS, DAYS_RUN, SERVED = "data/days/1.csv", "runs/days", "data/served/model"
TRAIN_DAYS = (
    "train --config-dir conf data=days model.embedding_dim=4 model.dense_layer_sizes=[8,4] "
    "model.over_layer_sizes=[8,1] placement=torchrec trainer.batch_size=16 "
    "trainer.num_workers=0 trainer.eval_splits=[]"
)
EXPORT = f"export run_dir={ONE} output=data/new/model"
# The same model and file into the place of an earlier export.
EXPORT_AGAIN = f"export run_dir={ONE} checkpoint={Path(FIRST).name} output={SERVED}"
PREDICT = f"predict run_dir={DAYS_RUN} input=[{DAYS}] output=data/new/scores"


def in_run(run_dir: str) -> dict[str, str | None]:
    """The variable that chooses a run directory."""
    return {"HOTREC_RUN_DIR": run_dir}


# What makes the workspace: a dataset with its profile and partition, another dataset, a finished
# run of one rank, its export before the end, a run on a log, and one of two ranks.
STEPS = (
    works("make/dataset", PREPARE),
    works("make/partition", PLAN),
    works("make/other", f"{PREPARE} data.synthetic.seed=5 paths.dataset=data/other/dataset"),
    works("make/one", TRAIN, variables=in_run(ONE)),
    works("make/served", EXPORT_AGAIN),
    works("make/days", "prepare --config-dir conf data=days"),
    works("make/days-run", TRAIN_DAYS, variables=in_run(DAYS_RUN)),
    works("make/two", f"{TRAIN} launch.num_ranks=2", variables=in_run(TWO), limit_s=120),
)


def make_log(folder: Path) -> None:
    """A log of 60 samples, and the configuration ``data=days`` that reads it."""
    lines = [f"{n % 2},{n}.5,u{n % 7},a{n % 5} b{n % 3}\n" for n in range(60)]
    kinds = {"label": "label", "price": "dense", "user": "categorical", "tags": "categorical_list"}
    columns = {name: {"kind": kind} for name, kind in kinds.items()}
    source = {"format": "delimited", "files": [DAYS], "separator": ",", "columns": columns}
    for name, text in (
        (DAYS, "".join(["label,price,user,tags\n", *lines])),
        ("conf/data/days.yaml", json.dumps({"source": source})),
    ):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text(text)


def make_costs(folder: Path) -> None:
    """Costs of this machine, without measuring it."""
    from hotrec.cost_model.builtin import BUILTIN
    from hotrec.cost_model.store import write_costs

    write_costs(BUILTIN["cpu_1gbit"], folder / COSTS)


def hash_document(document: Mapping[str, Any]) -> str:
    """The content hash of a manifest, as ``hotrec.artifact`` defines it."""
    files = document["files"]
    if isinstance(files, dict) and all(isinstance(facts, dict) for facts in files.values()):
        files = {name: facts for name, facts in files.items() if not facts.get("is_apart")}
    text = json.dumps({**document, "files": files}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def copy(reference: Path, folder: Path) -> None:
    shutil.copytree(reference, folder, symlinks=True)


# What commands must have made: each of these gives a check.


def whole(artifact: Path) -> str | None:
    """Complain if a directory is not what its manifest says."""
    try:
        files = json.loads((artifact / "manifest.json").read_text())["files"]
    except (OSError, ValueError, KeyError) as error:
        return f"{artifact.name}: no whole manifest: {error!r}"
    found = {
        path.relative_to(artifact).as_posix(): path.stat().st_size
        for path in artifact.rglob("*")
        if path.is_file() and path.name != "manifest.json"
    }
    listed = {name: facts["num_bytes"] for name, facts in files.items()}
    return None if found == listed else f"{artifact.name}: the manifest lists {listed}, not {found}"


def whole_artifact(name: str) -> Check:
    return lambda made: whole(made.folder / name)


def latest_whole(step: int | None = None, run_dir: str = ONE) -> Check:
    """``latest`` names a whole checkpoint, of this step if given."""

    def check(made: Made) -> str | None:
        checkpoints = made.folder / run_dir / "checkpoints"
        latest = (checkpoints / "latest").read_text().strip()
        if step is not None and latest != f"step-{step:08d}":
            return f"latest is {latest}, not step {step}"
        return whole(checkpoints / latest)

    return check


def same_artifact(name: str, *, but: str = "") -> Check:
    """The artifact equals that of the undisturbed workspace, byte for byte, but for one file."""
    return lambda made: same_files(made.folder / name, made.reference / name, but)


def same_files(found: Path, expected: Path, but: str = "") -> str | None:
    names = {path.relative_to(root) for root in (found, expected) for path in root.rglob("*.*")}
    for name in sorted(names):
        both = [root / name for root in (found, expected)]
        if name.name == but or not any(path.is_file() for path in both):
            continue
        if not all(path.is_file() for path in both) or len({p.read_bytes() for p in both}) > 1:
            return f"{found.name}/{name} differs from that of an undisturbed run"
    return whole(found)


def same_tensors(name: str, as_name: str) -> Check:
    """The weights at the end equal those of an undisturbed run, bit for bit."""

    def check(made: Made) -> str | None:
        found, expected = made.folder / name, made.reference / as_name
        latest = (found / "checkpoints/latest").read_text().strip()
        if latest != (expected / "checkpoints/latest").read_text().strip():
            return f"{found.name}: latest is {latest}"
        tensors = [root / "checkpoints" / latest / "tensors" for root in (found, expected)]
        contents = [{p.name: p.read_bytes() for p in root.iterdir()} for root in tensors]
        if contents[0] != contents[1]:
            return f"{found.name}: {latest} differs from an undisturbed run"
        return whole(found / "checkpoints" / latest)

    return check


def same_run(name: str, as_name: str, *, in_reference: bool = True) -> Check:
    """Losses and weights equal those of an undisturbed run, bit for bit."""

    def check(made: Made) -> str | Complaint:
        reference = made.reference if in_reference else made.folder
        made = replace(made, reference=reference)
        one, other = losses(made.folder / name), losses(reference / as_name)
        for step, loss in other.items():
            if one.get(step) != loss:
                return f"{name}: loss {one.get(step)} of step {step}, undisturbed {loss}"
        return same_tensors(name, as_name)(made)

    return check
