"""Bad overrides and words, directories of others, and a process with the wrong surroundings."""

# A case is a line, however long.
# ruff: noqa: E501
# fmt: off
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.faults import edits
from tests.faults.case import Case, Change, either, fast, refused, unchanged, works
from tests.faults.workspace import (
    COSTS,
    DATASET,
    EVALUATE,
    LAST,
    ONE,
    PARTITION,
    PLAN,
    PREPARE,
    PROFILE,
    PROFILED,
    TINY,
    TRAIN,
    TWO,
    in_run,
    same_artifact,
    same_run,
)

# An override, and what the error line names; by default the key before "=".
OVERRIDES: list[tuple[str, str, str]] = [
    ("count-zero", "trainer.batch_size=0", ""),
    ("count-negative", "trainer.num_epochs=-1", ""),
    ("count-text", "trainer.batch_size=many", ""),
    ("count-float", "trainer.batch_size=1.5", ""),
    ("count-bool", "trainer.batch_size=true", ""),
    ("count-null", "trainer.batch_size=null", ""),
    ("count-list", "trainer.batch_size=[1]", ""),
    ("count-mapping", "trainer.batch_size={a: 1}", "trainer.batch_size"),
    ("count-2**63", f"trainer.batch_size={2**63}", ""),
    ("count-2**70", f"trainer.max_steps={2**70}", ""),
    ("count-huge-text", "trainer.batch_size=" + "9" * 5000, ""),
    ("seed-2**64", f"trainer.seed={2**64}", ""),
    ("seed-negative", "trainer.seed=-1", ""),
    ("workers-many", "trainer.num_workers=100000", ""),
    ("float-nan", "optimizer.learning_rate=nan", ""),
    ("float-inf", "optimizer.learning_rate=inf", ""),
    ("float-negative", "optimizer.learning_rate=-0.1", ""),
    ("float-text", "optimizer.learning_rate=fast", ""),
    ("float-1e999", "optimizer.learning_rate=1e999", ""),
    ("time-zero", "trainer.timeout_s=0", ""),
    ("time-1e300", "trainer.timeout_s=1e300", ""),
    ("watchdog-1e300", "trainer.watchdog_s=1e300", ""),
    ("frac-above", "profile.sample_frac=1.5", ""),
    ("frac-nan", "profile.heldout_frac=nan", ""),
    ("bool-text", "trainer.compile=maybe", ""),
    ("enum-unknown", "trainer.device=tpu", ""),
    ("enum-number", "trainer.precision=16", ""),
    ("enum-empty", "pipeline.wire=", ""),
    ("list-scalar", "model.over_layer_sizes=5", ""),
    ("list-text", "model.over_layer_sizes=[a]", ""),
    ("list-empty", "model.over_layer_sizes=[]", ""),
    ("list-negative", "model.over_layer_sizes=[-8,1]", ""),
    ("list-huge", f"model.over_layer_sizes=[{2**62},1]", ""),
    ("splits-unknown", "trainer.eval_splits=[dev]", ""),
    ("splits-twice", "trainer.eval_splits=[valid,valid]", ""),
    ("splits-number", "trainer.eval_splits=[1]", ""),
    ("mapping-unknown", "+placement.overrides.t9=hot", "overrides"),
    ("mapping-value", "+placement.overrides.t0=warm", "overrides.t0"),
    ("mapping-negative", "+placement.overrides.t0=-5", "overrides.t0|t0"),
    ("mapping-nan", "+placement.overrides.t0=nan", "overrides.t0|t0"),
    ("mapping-too-many", "+placement.overrides.t0=100000", "overrides.t0|t0"),
    ("group-unknown", "model=gpt", "model"),
    ("group-path", "model=../../x", "model"),
    ("group-empty", "model=", "model"),
    ("group-null", "model=null", "model"),
    ("group-list", "model=[dlrm]", "model"),
    ("section-scalar", "trainer=5", "trainer"),
    ("section-deleted", "~trainer", "trainer"),
    ("key-unknown", "trainer.cake=1", ""),
    ("key-forced", "+trainer.cake=1", "trainer.cake"),
    ("key-misspelt", "trainer.batch_sice=1", "trainer.batch_sice"),
    ("key-too-deep", "trainer.batch_size.more=1", "trainer.batch_size"),
    ("key-empty", "=1", "=1"),
    ("word-alone", "cake", "cake"),
    ("flag-unknown", "--cake", "--cake"),
    ("quote-open", "run_name=\"'a\"", "run_name"),
    ("bracket-open", "model.over_layer_sizes=[1", "over_layer_sizes"),
    ("interpolation-unknown", "run_name='${cake}'", "run_name|cake"),
    ("interpolation-loop", "run_name='${run_name}'", "run_name"),
    ("resolver-unknown", "run_name='${cake:1}'", "run_name|cake"),
    ("kind-other", "model.kind=dcnv2", "model.kind"),
    ("dim-odd", "model.embedding_dim=5", ""),
    ("dim-last-layer", "model.dense_layer_sizes=[8,8]", ""),
    ("dataset-name-path", "dataset_name=../../x", "dataset_name|paths.dataset"),
    ("dataset-name-empty", "dataset_name=", "dataset_name|paths.dataset"),
    ("dataset-name-newline", "dataset_name='\"a\nb\"'", "dataset_name|paths.dataset"),
    ("path-empty", "paths.dataset=", "paths.dataset"),
    ("path-null", "paths.dataset=null", "paths.dataset"),
    ("path-nul", "paths.dataset=\"a\\x00b\"", "manifest.json"),
    ("path-file", "paths.dataset=conf/mine.txt", "conf/mine.txt"),
    ("resume-absent", "trainer.resume=absent", "trainer.resume"),
    ("resume-file", "trainer.resume=conf/mine.txt", "trainer.resume|conf/mine.txt"),
    ("resume-dataset", f"trainer.resume={DATASET}", "trainer.resume|kind"),
    ("ranks-zero", "launch.num_ranks=0", ""),
    ("ranks-many", "launch.num_ranks=5000", ""),
    ("batch-over-data", "trainer.batch_size=2000", "2000"),
    ("config-dir-absent", "--config-dir absent", "absent"),
    ("config-dir-file", "--config-dir conf/mine.txt", "conf/mine.txt"),
    ("config-name-absent", "--config-name absent", "absent"),
    ("adam-cold", "optimizer=adam", "optimizer.kind"),
    ("warm-up-long", "optimizer.schedule.warmup_steps=100", ""),
    ("decay-none", "optimizer.schedule.num_decay_steps=5", ""),
    ("decay-late", "optimizer.schedule.decay=linear optimizer.schedule.decay_start_step=16", "optimizer.schedule.decay_start_step"),
    ("costs-unknown", "planner.costs=cake", ""),
    ("callback-absent", "trainer.callbacks=[absent.Callback]", ""),
    ("section-list", "trainer=[1]", ""),
    ("path-with-signs", "paths.dataset=a#1", "paths.dataset=\"a#1\""),
]
YAML: dict[str, str | bytes] = {
    "list": "- a\n",
    "number": "5\n",
    "broken": "a: [1\n",
    "binary": bytes(range(128, 256)),
    "twice": "kind: dlrm\nkind: dlrm\n",
    "unknown": "defaults: [/model_dlrm_schema@_here_]\ncake: 1\n",
    "tag": "a: !!python/object/apply:os.getcwd []\n",
}
# What may as well mean something.
MEANINGFUL = ("count-2**70", "watchdog-1e300", "group-list", "section-deleted", "splits-twice")
WORDS: list[tuple[str, str, str, Change, int]] = [
    ("command-unknown", "trian", "command", unchanged, 2),
    ("command-newline", "'a\nb'".replace("\n", "\\n"), "command", unchanged, 2),
    ("evaluate-split", f"{EVALUATE} split=dev", "split", unchanged, 1),
    ("evaluate-split-number", f"{EVALUATE} split=5", "split", unchanged, 1),
    ("evaluate-checkpoint", f"{EVALUATE} checkpoint=step-9", "checkpoint", unchanged, 1),
    ("evaluate-checkpoint-dots", f"{EVALUATE} checkpoint=..", "checkpoint", unchanged, 1),
    ("evaluate-run-absent", "evaluate run_dir=absent", "run_dir", unchanged, 1),
    ("evaluate-batch", f"{EVALUATE} batch_size=-1", "batch_size", unchanged, 1),
    ("report-none", "report runs=[]", "runs", unchanged, 1),
    ("report-absent", "report runs=[absent]", "absent", unchanged, 1),
    ("report-baseline", f"report runs=[{ONE}] baseline=absent", "baseline", unchanged, 1),
    ("report-profile", f"report runs=[{ONE}] profile={DATASET}", DATASET, unchanged, 1),
    ("plan-hosts", f"{PLAN} plan.world_size=4 plan.ranks_per_host=3", "ranks_per_host", unchanged, 1),
    ("plan-world", f"{PLAN} plan.world_size={2**40}", "plan.world_size", unchanged, 1),
    ("plan-memory", f"{PLAN} placement=all_hot planner.host_gib=0.000001", "expected", unchanged, 1),
    ("plan-costs", f"{PLAN} planner.costs=cake", "costs", unchanged, 1),
    ("calibrate-run", "calibrate calibrate.from_run=absent", "absent", unchanged, 1),
    *((f"yaml-{name}", f"{PROFILE} --config-dir conf model=mine", "model|mine", edits.written("conf/model/mine.yaml", text), 1) for name, text in YAML.items()),
    ("yaml-bomb", f"{PROFILE} --config-dir conf model=mine", "model|mine", edits.written("conf/model/mine.yaml", "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10))), 1),
]
CALIBRATE = f"calibrate {TINY} calibrate.cap_mib=1 calibrate.max_bytes=4096 calibrate.repeats=3"
# What a command writes into; each is a way to a whole artifact of the same kind if it may.
WRITERS = {
    "prepare": (PREPARE, "paths.dataset", DATASET),
    "profile": (PROFILE, "paths.profile", PROFILED),
    "plan": (PLAN, "paths.partition", PARTITION),
    "calibrate": (CALIBRATE, "paths.costs", COSTS),
}
PROJECT = edits.several(
    edits.written("mine/manifest.json", '{"name": "my web application", "icons": []}\n'),
    edits.written("mine/src/thesis.tex", "ten years of work\n"),
)
ALIKE = edits.several(
    PROJECT,
    edits.written("mine/manifest.json", '{"kind": "dataset", "format_version": 1, "content": {}}\n'),
)


def _targets(own: str) -> list[tuple[str, Change, str]]:
    """Directories that a command that writes the artifact at ``own`` must not replace."""
    others = [kind for kind in (DATASET, PROFILED, PARTITION, COSTS, f"{ONE}/{LAST}") if kind != own]
    return [
        ("project", PROJECT, "mine"),
        ("project-alike", ALIKE, "mine"),
        ("project-linked", edits.several(PROJECT, edits.linked("link", "mine")), "link"),
        *((f"other-{Path(other).name}", edits.copied(other, "mine"), "mine") for other in others),
        ("extra-file", edits.several(edits.copied(own, "mine"), edits.written("mine/notes.txt", "mine")), "mine"),
        ("extra-directory", edits.several(edits.copied(own, "mine"), edits.directory("mine/notes")), "mine"),
        ("broken-manifest", edits.several(edits.copied(own, "mine"), edits.cut("mine/manifest.json")), "mine"),
        ("files", edits.written("mine/photo.jpg", b"\xff"), "mine"),
        ("file", edits.written("mine", "x"), "mine"),
        ("below-file", edits.written("conf/mine.txt/../../file", "x"), "file"),
        ("run", edits.copied(ONE, "mine"), "mine"),
        ("link-loop", edits.linked("mine", "mine"), "mine"),
        ("too-long", unchanged, "name"),
        ("working-directory", unchanged, ".:|paths."),
    ]


def _target_cases() -> Iterator[Case]:
    places = {"below-file": "file/dataset", "too-long": "x" * 300, "working-directory": ".", "project-linked": "link"}
    for command, (words, key, own) in WRITERS.items():
        for name, change, expected in _targets(own):
            if command == "calibrate" and name not in ("project", "other-dataset", "extra-file", "broken-manifest"):
                continue  # it measures for seconds
            place = places.get(name, "mine")
            yield refused(f"target/{command}-{name}", f"{words} {key}={place}", f"{expected}|{key}", change)
        same = {"outputs": ("mine",), "check": same_artifact("mine", own)}
        if command == "calibrate":
            yield works("target/calibrate-replaces", f"{words} {key}=mine", edits.copied(COSTS, "mine"), outputs=("mine",))
            continue
        yield works(f"target/{command}-new", f"{words} {key}=mine", **same)
        yield works(f"target/{command}-replaces", f"{words} {key}=mine", edits.copied(own, "mine"), **same)
        yield works(f"target/{command}-linked", f"{words} {key}=mine", edits.several(edits.copied(own, "there"), edits.linked("mine", "there")), outputs=("mine", "there"))
        closed = edits.several(edits.directory("closed"), edits.mode("closed", 0o555))
        yield refused(f"target/{command}-closed", f"{words} {key}=closed/mine", "closed", closed, is_privileged=False)
    runs: list[tuple[str, Change, str]] = [
        ("project", edits.several(PROJECT, edits.written("mine/config.yaml", "user: me\n")), "mine"),
        ("dataset", unchanged, DATASET),
        ("file", edits.written("mine", "x"), "mine"),
        ("dangling", edits.linked("mine", "absent/absent"), "mine"),
        ("closed", edits.several(edits.directory("mine"), edits.mode("mine", 0o555)), "mine"),
    ]
    for name, change, place in runs:
        yield refused(f"target/train-{name}", TRAIN, place, change, variables=in_run(place), is_privileged=name != "closed")
    yield refused("target/report-project", f"report runs=[{ONE}] output=mine", "mine", edits.several(PROJECT, edits.written("mine/report.html", "my thesis\n")))


def _config_cases() -> Iterator[Case]:
    note = edits.written("conf/mine.txt", "mine\n")
    for name, override, key in OVERRIDES:
        is_policy = name.startswith("mapping")
        words = f"{TRAIN} placement=coverage" if is_policy else TRAIN
        make = either if name in MEANINGFUL else refused
        case = make(f"config/{name}", words, key or override.partition("=")[0], note)
        # Not several commands, where a value has several lines.
        yield replace(case, words=(f"{words} {override}",))
    for name, words, key, change, code in WORDS:
        case = Case(f"config/{name}", (words,), change, exit_codes=(code,), key=key, outputs=("data/tiny/profile",))
        yield case


def _variables(**variables: str | None) -> dict[str, Any]:
    return {"variables": variables}


TRAINED = {"outputs": (ONE,), "check": same_run("runs/new", ONE)}
NEW = in_run("runs/new")
SURROUNDINGS: list[Case] = [
    works("machine/locale-c", TRAIN, is_exec=True, variables={**NEW, "LC_ALL": "C"}, **TRAINED),
    works("machine/locale-unknown", PROFILE, is_exec=True, outputs=(PROFILED,), **_variables(LC_ALL="xx_YY")),
    works("machine/ascii-streams", PROFILE, is_exec=True, outputs=(PROFILED,), **_variables(PYTHONIOENCODING="ascii")),
    works("machine/no-home", PROFILE, is_exec=True, outputs=(PROFILED,), **_variables(HOME=None)),
    works("machine/no-path", PROFILE, is_exec=True, outputs=(PROFILED,), **_variables(PATH=None)),
    works("machine/files-256", TRAIN, is_exec=True, limits={"NOFILE": 256}, variables=NEW, **TRAINED),
    either("machine/files-64", f"{TRAIN} trainer.num_workers=2", "open files|NOFILE|ulimit", is_exec=True, limits={"NOFILE": 64}, variables=NEW),
    refused("machine/files-24", f"{TRAIN} trainer.num_workers=2", "open files|NOFILE|ulimit", is_exec=True, limits={"NOFILE": 24}, variables=NEW),
    either("machine/files-64-ranks", f"{TRAIN} launch.num_ranks=2", "open files|NOFILE|ulimit", is_exec=True, limits={"NOFILE": 64}, variables=NEW, ranks=(0, 1), limit_s=90),
    refused("machine/memory-1gb", TRAIN, "memory", is_exec=True, limits={"AS": 1 << 30}, variables=NEW),
    either("machine/memory-3gb", f"{TRAIN} trainer.num_workers=2", "memory", is_exec=True, limits={"AS": 3 << 30}, variables=NEW),
    either("machine/memory-ranks", f"{TRAIN} launch.num_ranks=2", "memory", is_exec=True, limits={"AS": 2 << 30}, variables=NEW, ranks=(0, 1), limit_s=90),
    refused("machine/file-size", TRAIN, "runs/new|File too large", limits={"FSIZE": 8192}, variables=NEW),
    either("machine/processes", f"{TRAIN} trainer.num_workers=2", "processes|NPROC|num_workers", limits={"NPROC": 1}, variables=NEW),
    works("machine/shm-none", TRAIN, shm_bytes=4096, variables=NEW, **TRAINED),
    either("machine/shm-small-workers", f"{TRAIN} trainer.num_workers=2", "/dev/shm", shm_bytes=16384, variables=NEW),
    either("machine/shm-none-workers", f"{TRAIN} trainer.num_workers=2", "/dev/shm", shm_bytes=4096, variables=NEW),
    either("machine/shm-small-ranks", f"{TRAIN} launch.num_ranks=2 trainer.num_workers=2", "/dev/shm", shm_bytes=65536, variables=NEW, ranks=(0, 1), limit_s=90),
    refused("machine/tmp-absent", f"{TRAIN} launch.num_ranks=2", "TMPDIR|temporary|tmp", limit_s=90, variables={**NEW, "TMPDIR": "/absent"}, ranks=(0, 1)),
    either("machine/tmp-long", f"{TRAIN} trainer.num_workers=2", "TMPDIR|tmp", edits.directory("x" * 120), variables={**NEW, "TMPDIR": "x" * 120}),
    refused("machine/stdout-full", "report runs=[runs/one]", "output|space", stdio={1: "/dev/full"}),
    works("machine/stderr-null", PROFILE, stdio={2: "/dev/null"}, outputs=(PROFILED,)),
    refused("machine/rank-text", TRAIN, "RANK", **_variables(RANK="one", WORLD_SIZE="2")),
    refused("machine/rank-negative", TRAIN, "RANK", **_variables(RANK="-1", WORLD_SIZE="2")),
    refused("machine/rank-above", TRAIN, "RANK", limit_s=30, ranks=(5,), **_variables(RANK="5", WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="29871")),
    refused("machine/world-zero", TRAIN, "WORLD_SIZE", ranks=(0,), **_variables(RANK="0", WORLD_SIZE="0")),
    refused("machine/world-text", TRAIN, "WORLD_SIZE", ranks=(0,), **_variables(RANK="0", WORLD_SIZE="two")),
    refused("machine/rank-alone", TRAIN, "WORLD_SIZE|RANK", **_variables(RANK="1", WORLD_SIZE=None)),
    refused("machine/master-absent", TRAIN, "MASTER_ADDR", limit_s=30, ranks=(0,), **_variables(RANK="0", WORLD_SIZE="2")),
    refused("machine/master-port-text", TRAIN, "MASTER_PORT", limit_s=30, ranks=(0,), **_variables(RANK="0", WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="http")),
    refused("machine/master-unknown", f"{TRAIN} trainer.timeout_s=5", "MASTER_ADDR|no-such-host", limit_s=45, ranks=(1,), **_variables(RANK="1", WORLD_SIZE="2", MASTER_ADDR="no-such-host.invalid", MASTER_PORT="29872")),
    refused("machine/rank-0-absent", f"{TRAIN} trainer.timeout_s=5", "MASTER_ADDR|localhost", limit_s=45, variables={**NEW, "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29873"}, ranks=(1,)),
    refused("machine/rank-1-absent", f"{TRAIN} trainer.timeout_s=5", "rank", limit_s=45, variables={**NEW, "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29874"}, ranks=(0,)),
    refused("machine/ranks-for-profile", PROFILE, "hotrec profile", variables={"RANK": "0", "WORLD_SIZE": "2"}, ranks=(0,)),
    either("machine/threads-text", PROFILE, "OMP_NUM_THREADS", is_exec=True, outputs=(PROFILED,), **_variables(OMP_NUM_THREADS="many")),
    refused("machine/run-dir-below-file", TRAIN, "runs/x", edits.written("runs/x", "file"), **_variables(HOTREC_RUN_DIR="runs/x/y")),
    refused("machine/read-only-data", TRAIN, "data/tiny", edits.mode("data/tiny/dataset", 0), is_privileged=False),
    works("machine/read-only-inputs", TRAIN, edits.several(edits.mode("data/tiny", 0o555), edits.mode(DATASET, 0o555)), is_privileged=False, variables=NEW, **TRAINED),
    refused("machine/torchrun-other-ranks", f"{TRAIN} launch.num_ranks=4", "launch.num_ranks", limit_s=30, ranks=(0,), **_variables(RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="29875")),
    refused("machine/pod-of-two-and-ranks", f"{TRAIN} launch.num_ranks=2", "launch.num_ranks", limit_s=30, ranks=(0,), **_variables(RANK="0", WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="29876")),
    works("machine/left-over-rank", f"{TRAIN} launch.num_ranks=2", variables={**NEW, "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "no-such-host.invalid", "MASTER_PORT": "23456"}, check=same_run("runs/new", TWO), limit_s=90),
    works("machine/left-over-rank-alone", TRAIN, variables={**NEW, "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "no-such-host.invalid", "MASTER_PORT": "23456"}, **TRAINED),
    refused("machine/world-without-rank", TRAIN, "RANK", limit_s=30, ranks=(0,), **_variables(WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="29877")),
    refused("machine/pet-hosts", f"{TRAIN} launch.num_ranks=2", "PET_NNODES", limit_s=30, **_variables(PET_NNODES="2")),
    refused("machine/pet-ranks", TRAIN, "PET_NPROC_PER_NODE", limit_s=30, **_variables(PET_NPROC_PER_NODE="4")),
    refused("machine/srun-tasks", f"{TRAIN} launch.num_ranks=2", "SLURM_STEP_NUM_TASKS", limit_s=30, **_variables(SLURM_STEP_NUM_TASKS="2", SLURM_PROCID="0")),
    works("machine/salloc-shell", f"{TRAIN} launch.num_ranks=2", variables={**NEW, "SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_NTASKS": "2"}, check=same_run("runs/new", TWO), limit_s=90),
    refused("machine/no-interface-ranks", f"{TRAIN} launch.num_ranks=2", "GLOO_SOCKET_IFNAME", limit_s=60, variables={**NEW, "GLOO_SOCKET_IFNAME": "nope0"}),
    refused("machine/no-interface", TRAIN, "GLOO_SOCKET_IFNAME", limit_s=60, variables={**NEW, "GLOO_SOCKET_IFNAME": "nope0"}),
    works("machine/two-ranks", f"{TRAIN} launch.num_ranks=2", variables=NEW, check=same_run("runs/new", TWO), limit_s=90),
    works("machine/workers", f"{TRAIN} trainer.num_workers=2", variables=NEW, check=same_run("runs/new", ONE)),
]
FAST = (
    *("target/prepare-project", "target/profile-other-dataset", "target/plan-extra-file"),
    *("target/prepare-replaces", "target/train-project", "config/count-zero", "config/float-nan"),
    *("config/key-misspelt", "config/group-unknown", "config/path-nul", "config/yaml-bomb"),
    *("config/seed-2**64", "machine/stdout-full", "machine/rank-text", "machine/file-size"),
)
CASES = [
    fast(case) if case.name in FAST else case
    for case in (*_target_cases(), *_config_cases(), *SURROUNDINGS)
]
