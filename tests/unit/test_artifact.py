"""Artifacts are whole or absent, whatever happens while they are written or after."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hotrec import artifact as module
from hotrec.artifact import (
    MANIFEST,
    Artifact,
    ArtifactError,
    Verify,
    check_made_from,
    commit_artifact,
    read_artifact,
    scratch_directory,
)
from hotrec.lock import LockedError

CONTENT = {"num_rows": {"t": 3}, "fraction": 0.1}


def write(target: Path, text: str = "old", *, kind: str = "profile", **kwargs: Any) -> Artifact:
    with scratch_directory(target, kind=kind) as scratch:
        (scratch / "counts").mkdir()
        (scratch / "counts" / "t.npy").write_text(text)
        (scratch / "b.txt").write_text("b")
        return commit_artifact(scratch, target, kind=kind, content=CONTENT, **kwargs)


def left_over(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_write_and_read_back(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "profile"
    written = write(target, made_from={"dataset": "abc"})
    read = read_artifact(target, kind="profile", verify="full")
    assert read == written
    assert read.content == CONTENT
    assert read.made_from == {"dataset": "abc"}
    assert (target / "counts" / "t.npy").read_text() == "old"
    assert left_over(target.parent) == ["profile"]


def test_every_file_and_directory_is_flushed_before_the_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed, fsync = [], os.fsync

    def record(descriptor: int) -> None:
        flushed.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    write(tmp_path / "a")
    scratch = next(path.parent for path in flushed if path.name == MANIFEST)
    assert scratch != tmp_path / "a"
    names = ("b.txt", "counts", "counts/t.npy", MANIFEST, ".")
    assert {scratch / name for name in names} <= set(flushed)


def test_the_hash_depends_on_every_part(tmp_path: Path) -> None:
    hashes = {
        write(tmp_path / "a").content_hash,
        write(tmp_path / "b", "new").content_hash,
        write(tmp_path / "c", kind="partition").content_hash,
        write(tmp_path / "d", made_from={"dataset": "x"}).content_hash,
    }
    assert len(hashes) == 4
    assert write(tmp_path / "e").content_hash in hashes  # and on nothing else: not time or place


def test_replacing(tmp_path: Path) -> None:
    first = write(tmp_path / "a")
    second = write(tmp_path / "a", "new")
    assert second.content_hash != first.content_hash
    assert (tmp_path / "a" / "counts" / "t.npy").read_text() == "new"
    assert left_over(tmp_path) == ["a"]


def test_a_failure_before_the_commit_leaves_the_old_one(tmp_path: Path) -> None:
    write(tmp_path / "a")

    def fail() -> None:
        with scratch_directory(tmp_path / "a", kind="profile") as scratch:
            (scratch / "half.npy").write_text("half")
            raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        fail()
    assert read_artifact(tmp_path / "a", kind="profile", verify="full").content == CONTENT
    assert left_over(tmp_path) == ["a"]


def test_content_that_json_cannot_hold_changes_nothing(tmp_path: Path) -> None:
    write(tmp_path / "a")

    def fail() -> None:
        with scratch_directory(tmp_path / "a", kind="profile") as scratch:
            commit_artifact(scratch, tmp_path / "a", kind="profile", content={"x": object()})

    with pytest.raises(TypeError):
        fail()
    assert read_artifact(tmp_path / "a", kind="profile").content == CONTENT
    assert left_over(tmp_path) == ["a"]


KILLED = """
import os, sys
from pathlib import Path
from hotrec import artifact
calls = 0
def counted(self, *args, _rename=Path.rename):
    global calls
    calls += 1
    if calls == int(sys.argv[2]):
        os._exit(9)
    return _rename(self, *args)
Path.rename = counted
target = Path(sys.argv[1])
with artifact.scratch_directory(target, kind="profile") as scratch:
    (scratch / "x.txt").write_text("new")
    artifact.commit_artifact(scratch, target, kind="profile", content={"version": "new"})
"""


@pytest.mark.parametrize("at_rename", [1, 2])
def test_killed_while_replacing_leaves_the_old_or_the_new(tmp_path: Path, at_rename: int) -> None:
    target = tmp_path / "a"
    write(target)
    died = subprocess.run(
        [sys.executable, "-c", KILLED, str(target), str(at_rename)],
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(module.__file__).parents[1])},
    )
    assert died.returncode in (0, 9)
    found = read_artifact(target, kind="profile", verify="full")
    assert found.content in (CONTENT, {"version": "new"})


def put(file: Path, text: str = "years") -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("make", "got"),
    [
        (lambda a: put(a / "thesis.tex"), "1 files without a manifest.json"),
        (lambda a: put(a), "a file"),
        (lambda a: put(a / MANIFEST, '{"name": "extension"}'), "KeyError"),
        (lambda a: (write(a), put(a / "notes" / "x.txt"))[1], "such as notes/x.txt"),
        (lambda a: write(a, kind="dataset").path / "b.txt", "a dataset"),
    ],
)
def test_nothing_foreign_is_replaced(
    tmp_path: Path, make: Callable[[Path], Path], got: str
) -> None:
    kept = make(tmp_path / "a")
    text = kept.read_text()
    with pytest.raises(ArtifactError, match=re.escape(got)):
        write(tmp_path / "a")
    assert kept.read_text() == text
    assert left_over(tmp_path) == ["a"]


def write_code(target: Path, text: str) -> None:
    with scratch_directory(target, kind="model export") as scratch:
        put(scratch / "read_me.py", f"TEXT = {text!r}\n")
        put(scratch / "parts" / "layers.py", "")
        commit_artifact(scratch, target, kind="model export", content={})


def test_what_python_caches_of_its_modules_is_not_foreign(tmp_path: Path) -> None:
    # They are written even if the environment says otherwise, and beside the modules.
    script = (
        "import sys; sys.dont_write_bytecode = False\n"
        "import read_me, parts.layers; print(read_me.TEXT)"
    )
    variables = {name: of for name, of in os.environ.items() if not name.startswith("PYTHON")}

    def imported() -> str:
        command = [sys.executable, "-c", script]
        return subprocess.check_output(command, cwd=tmp_path / "a", text=True, env=variables)

    write_code(tmp_path / "a", "old")
    assert imported() == "old\n"
    assert len(list((tmp_path / "a").rglob("__pycache__/*.pyc"))) == 2
    write_code(tmp_path / "a", "new")
    assert not list((tmp_path / "a").rglob("__pycache__"))
    assert imported() == "new\n"


@pytest.mark.parametrize(
    "name",
    [
        "__pycache__/mine.cpython-311.pyc",
        "__pycache__/read_me.py",
        "__pycache__/read_me.pyc",
        "__pycache__/notes.txt",
        "__pycache__/deeper/read_me.cpython-311.pyc",
        "parts/__pycache__/read_me.cpython-311.pyc",
        "read_me.cpython-311.pyc",
        "read_me.pyc",
    ],
)
def test_other_files_beside_these_caches_are(tmp_path: Path, name: str) -> None:
    write_code(tmp_path / "a", "old")
    put(tmp_path / "a" / "__pycache__" / "read_me.cpython-311.pyc")
    kept = put(tmp_path / "a" / name)
    with pytest.raises(ArtifactError, match=re.escape(f"1 files of others, such as {name}")):
        write_code(tmp_path / "a", "new")
    assert kept.read_text() == "years"


def test_a_link_among_these_caches_is_foreign(tmp_path: Path) -> None:
    write_code(tmp_path / "a", "old")
    kept = put(tmp_path / "mine" / "read_me.cpython-311.pyc")
    for name, target in (("__pycache__", kept.parent), ("parts/__pycache__/layers.x.pyc", kept)):
        link = tmp_path / "a" / name
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(target)
        with pytest.raises(ArtifactError, match=re.escape(f"such as {name}")):
            write_code(tmp_path / "a", "new")
        link.unlink()
    assert kept.exists()


def test_an_empty_directory_or_a_link_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    write(tmp_path / "link")
    write(tmp_path / "link", "new")
    assert (tmp_path / "empty" / "counts" / "t.npy").read_text() == "new"
    assert left_over(tmp_path) == ["empty", "link"]


def test_one_process_writes_at_a_time(tmp_path: Path) -> None:
    def second() -> None:
        with scratch_directory(tmp_path / "a", kind="profile"):
            write(tmp_path / "a")

    with pytest.raises(LockedError, match=rf"process {os.getpid()} on .* Wait for its end"):
        second()
    write(tmp_path / "a")
    assert left_over(tmp_path) == ["a"]


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    put(tmp_path / ".a.01234567.tmp" / "half.npy")
    put(tmp_path / ".a.lock", "process 1")
    write(tmp_path / "a")
    assert left_over(tmp_path) == ["a"]


def test_what_a_killed_writer_of_another_artifact_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".b.0a1b2c3d.tmp").mkdir()
    (tmp_path / ".b.lock").write_text(
        "hotrec prepare (process 1 on host since 2026-01-01 00:00:00)"
    )
    (tmp_path / ".mine.lock").write_text("of another program")
    write(tmp_path / "b")
    (tmp_path / "b").rename(tmp_path / ".b.4c5d6e7f.old")  # killed between the two renames
    (tmp_path / ".b.lock").write_text(
        "hotrec prepare (process 1 on host since 2026-01-01 00:00:00)"
    )
    with scratch_directory(tmp_path / "c", kind="profile"):
        write(tmp_path / "a")
        assert (tmp_path / ".c.lock").exists(), "that of a writer at work stays"
    assert left_over(tmp_path) == [".mine.lock", "a", "b"]


@pytest.mark.slow
def test_what_is_being_read_is_not_replaced(tmp_path: Path) -> None:
    write(tmp_path / "a")
    opened = read_artifact(tmp_path / "a", kind="profile", stay_open=True)
    with pytest.raises(LockedError, match="expected no readers"):
        write(tmp_path / "a", "new")
    opened.check_opened()
    copied = pickle.loads(pickle.dumps(opened))
    del opened
    with pytest.raises(LockedError, match="expected no readers"):
        write(tmp_path / "a", "new")
    del copied
    write(tmp_path / "a", "new")


def test_readers_that_are_garbage_do_not_count(tmp_path: Path) -> None:
    write(tmp_path / "a")
    opened = read_artifact(tmp_path / "a", kind="profile", stay_open=True)
    cycle: list[Any] = [opened]
    cycle.append(cycle)
    del opened, cycle
    write(tmp_path / "a", "new")


def test_replacement_by_another_program_is_found(tmp_path: Path) -> None:
    write(tmp_path / "a")
    opened = read_artifact(tmp_path / "a", kind="profile", stay_open=True)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    shutil.rmtree(tmp_path / "a")
    with pytest.raises(ArtifactError, match="expected the artifact opened"):
        opened.check_opened()
    (tmp_path / "b").rename(tmp_path / "a")
    with pytest.raises(ArtifactError, match="expected the artifact opened"):
        opened.check_opened()


READER = """
import sys
from pathlib import Path
from hotrec.artifact import read_artifact
print("ready", flush=True)
for _ in range(1500):
    read_artifact(Path(sys.argv[1]), kind="profile", verify="full")
"""


def test_readers_never_see_a_replacement(tmp_path: Path) -> None:
    write(tmp_path / "a")
    variables = {**os.environ, "PYTHONPATH": str(Path(module.__file__).parents[1])}
    with subprocess.Popen(
        [sys.executable, "-c", READER, str(tmp_path / "a")], env=variables, stdout=subprocess.PIPE
    ) as reader:
        assert reader.stdout is not None
        reader.stdout.readline()
        while reader.poll() is None:
            write(tmp_path / "a", "new")
            write(tmp_path / "a", "old")
    assert reader.returncode == 0


def test_a_replacement_may_begin_as_the_manifest_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "a")
    wait = module._wait_for_replacement
    num_waits = 0

    def wait_before_a_replacement(target: Path) -> None:
        nonlocal num_waits
        num_waits += 1
        wait(target)
        if num_waits == 1:
            target.rename(tmp_path / ".a.00000000.old")

    monkeypatch.setattr(module, "_wait_for_replacement", wait_before_a_replacement)
    assert read_artifact(tmp_path / "a", kind="profile").kind == "profile"
    assert num_waits == 2


def edit_manifest(target: Path, change: Callable[[dict[str, Any]], None]) -> None:
    document = json.loads((target / MANIFEST).read_text())
    change(document)
    (target / MANIFEST).write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda a: (a / "b.txt").unlink(), r"b\.txt: expected a file of 1 bytes, got none\."),
        (lambda a: (a / "b.txt").write_text("bb"), r"b\.txt: expected 1 bytes, got 2\."),
        (lambda a: (a / MANIFEST).unlink(), r"manifest\.json: expected the manifest of a profile"),
        (
            lambda a: (a / MANIFEST).write_text(""),
            r"manifest\.json: expected the manifest of a profile",
        ),
        (
            lambda a: (a / MANIFEST).write_text("[]"),
            r"manifest\.json: expected the manifest of a profile",
        ),
        (
            lambda a: (a / MANIFEST).write_text("3"),
            r"manifest\.json: expected the manifest of a profile",
        ),
        (
            lambda a: (a / MANIFEST).write_text("{}"),
            r"manifest\.json: expected the manifest of a profile",
        ),
        (lambda a: (a / MANIFEST).write_bytes(b"\xff\xfe"), "expected the manifest of a profile"),
        (
            lambda a: (a / MANIFEST).write_text((a / MANIFEST).read_text()[:-40]),
            r"manifest\.json: expected the manifest of a profile",
        ),
        (
            lambda a: edit_manifest(a, lambda d: d["content"].update(fraction=0.2)),
            r"manifest\.json: expected content hash \w{12}, got \w{12}: it was edited\.",
        ),
        (
            lambda a: edit_manifest(a, lambda d: d["files"].pop("b.txt")),
            r"manifest\.json: expected content hash",
        ),
        (
            lambda a: edit_manifest(a, lambda d: d.update(format_version=99)),
            r"manifest\.json: expected format version 1 or 2, got 99\.",
        ),
    ],
)
def test_damage_is_found(tmp_path: Path, damage: Callable[[Path], Any], message: str) -> None:
    write(tmp_path / "a")
    damage(tmp_path / "a")
    with pytest.raises(ArtifactError, match=message):
        read_artifact(tmp_path / "a", kind="profile")


def test_an_edit_of_equal_size_is_found_by_hash(tmp_path: Path) -> None:
    write(tmp_path / "a")
    (tmp_path / "a" / "b.txt").write_text("c")
    read_artifact(tmp_path / "a", kind="profile", verify="size")
    with pytest.raises(ArtifactError, match=r"b\.txt: expected checksum .* changed"):
        read_artifact(tmp_path / "a", kind="profile", verify="full")


def test_another_kind_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a")
    with pytest.raises(ArtifactError, match=r"expected kind 'dataset', got 'profile'\."):
        read_artifact(tmp_path / "a", kind="dataset")


@pytest.mark.parametrize("content", [{"by_dim": {2: 1, 10: 2}}, {"pair": (1, 2)}, {"x": 0.1 + 0.2}])
def test_content_is_hashed_as_it_will_be_read(tmp_path: Path, content: dict[str, Any]) -> None:
    with scratch_directory(tmp_path / "a", kind="profile") as scratch:
        commit_artifact(scratch, tmp_path / "a", kind="profile", content=content)
    read = read_artifact(tmp_path / "a", kind="profile")
    assert read.content == json.loads(json.dumps(content))


def test_files_apart_are_no_part_of_the_hash(tmp_path: Path) -> None:
    """But each is as it was written."""
    old, new = (write(tmp_path / text, text, apart=["counts/t.npy"]) for text in ("old", "new"))
    assert old.files["counts/t.npy"] != new.files["counts/t.npy"]
    assert old.content_hash == new.content_hash
    put(tmp_path / "new" / "counts" / "t.npy", "odd")
    with pytest.raises(ArtifactError, match=r"t\.npy: expected"):
        read_artifact(tmp_path / "new", kind="profile", verify=Verify.full)


def test_made_from(tmp_path: Path) -> None:
    dataset = write(tmp_path / "data", kind="dataset")
    profile = write(tmp_path / "profile", made_from={"dataset": dataset.content_hash})
    check_made_from(profile, dataset)
    other = write(tmp_path / "other", "other", kind="dataset")
    with pytest.raises(ArtifactError, match=r"expected a profile made from the dataset .* Make"):
        check_made_from(profile, other)
    with pytest.raises(ArtifactError, match=r"got one made from None\."):
        check_made_from(write(tmp_path / "free"), dataset)


def test_checksums_of_the_first_format_are_read(tmp_path: Path) -> None:
    write(tmp_path / "a")

    def downgrade(document: dict[str, Any]) -> None:
        del document["content_hash"]
        document["format_version"] = 1
        for name, facts in document["files"].items():
            del facts["xxh3_128"]
            facts["sha256"] = hashlib.sha256((tmp_path / "a" / name).read_bytes()).hexdigest()
        document["content_hash"] = module._hash_document(document)

    edit_manifest(tmp_path / "a", downgrade)
    read_artifact(tmp_path / "a", kind="profile", verify="full")
    put(tmp_path / "a" / "b.txt", "c")
    with pytest.raises(ArtifactError, match=r"b\.txt: expected checksum"):
        read_artifact(tmp_path / "a", kind="profile", verify="full")
