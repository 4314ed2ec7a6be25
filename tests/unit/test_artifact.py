"""Artifacts are whole or absent, whatever happens while they are written or after."""

from __future__ import annotations

import gc
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from unittest import mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hotrec import artifact as module
from hotrec.artifact import (
    MANIFEST,
    Artifact,
    ArtifactError,
    Verify,
    check_made_from,
    commit_artifact,
    read_artifact,
    read_record,
    remove_artifact,
    scratch_directory,
)
from hotrec.lock import LockedError

# JSON makes texts of keys and lists of tuples.
CONTENT: dict[Any, Any] = {2: 1, "pair": (1, 2), "fraction": 0.1 + 0.2}


def write(target: Path, text: str = "old", *, kind: str = "profile", **kwargs: Any) -> Artifact:
    with scratch_directory(target, kind=kind) as scratch:
        (scratch / "counts").mkdir()
        (scratch / "counts" / "t.npy").write_text(text)
        (scratch / "b.txt").write_text("b")
        return commit_artifact(scratch, target, kind=kind, content=CONTENT, **kwargs)


def read(target: Path) -> Artifact:
    return read_artifact(target, kind="profile", verify=Verify.full)


def left_over(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def put(file: Path, text: str = "years") -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


TEXTS = st.sampled_from(["one", "two", "three"])


class Writers(RuleBasedStateMachine):
    """Writers, readers and kills at one place, against the text that must be found there."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(mkdtemp(prefix="hotrec-artifact-"))
        self.target = self.folder / "a"
        self.held: str | None = None
        self.reader: Artifact | None = None

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    @precondition(lambda self: self.reader is None)
    @rule(text=TEXTS)
    def replace(self, text: str) -> None:
        write(self.target, text)
        self.held = text
        assert left_over(self.folder) == ["a"]

    @rule(text=TEXTS)
    def fail(self, text: str) -> None:
        fails = mock.patch.object(module, "sync_path", side_effect=OSError("no space left"))
        with fails, pytest.raises((OSError, LockedError)):
            write(self.target, text)

    @precondition(lambda self: self.reader is None)
    @rule(text=TEXTS, at=st.integers(1, 3), name=st.sampled_from(["rename", "mkdir"]))
    def kill(self, text: str, at: int, name: str) -> None:
        gc.collect()  # a reader in a cycle would keep its lock in the parent of a fork
        if (child := os.fork()) == 0:
            calls, call = iter(range(1, 100)), getattr(Path, name)

            def counted(path: Path, *args: Any, **more: Any) -> Any:
                return os._exit(9) if next(calls) == at else call(path, *args, **more)

            try:
                with mock.patch.object(Path, name, counted):
                    write(self.target, text)
            except BaseException:
                os._exit(1)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) in (0, 9)
        if self.held is not None or self.target.exists():
            read(self.target)
            found = (self.target / "counts/t.npy").read_text()
            assert found in (self.held, text)
            self.held = found

    @precondition(lambda self: self.held is not None)
    @rule()
    def open(self) -> None:
        self.reader = read_artifact(self.target, kind="profile", stay_open=True)

    @precondition(lambda self: self.reader is not None)
    @rule(text=TEXTS)
    def refuse_while_open(self, text: str) -> None:
        for call in (lambda: write(self.target, text), lambda: self.remove()):
            with pytest.raises(LockedError):
                call()

    @precondition(lambda self: self.reader is not None)
    @rule()
    def close(self) -> None:
        # A copy counts; one that is only kept by a cycle does not.
        cycle: list[Any] = [pickle.loads(pickle.dumps(self.reader))]
        cycle.append(cycle)
        self.reader = None

    @precondition(lambda self: self.held is not None and self.reader is None)
    @rule()
    def remove(self) -> None:
        remove_artifact(self.target, "profile")
        self.held = None

    @invariant()
    def it_is_whole_or_absent(self) -> None:
        assert self.target.exists() == (self.held is not None)
        if self.held is not None:
            assert read(self.target).content == json.loads(json.dumps(CONTENT))
            assert (self.target / "counts/t.npy").read_text() == self.held
        if self.reader is not None:
            self.reader.check_opened()


@pytest.mark.slow
def test_whatever_writers_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SHORT_READ_S", 0.0)
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(Writers.TestCase, "settings", settings(stateful_step_count=10))
    Writers.TestCase().runTest()


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


def test_the_hash_depends_on_every_part_and_on_nothing_else(tmp_path: Path) -> None:
    hashes = {
        write(tmp_path / "a").content_hash,
        write(tmp_path / "b", "new").content_hash,
        write(tmp_path / "c", kind="partition").content_hash,
        write(tmp_path / "d", made_from={"dataset": "x"}).content_hash,
    }
    assert len(hashes) == 4
    assert write(tmp_path / "deep" / "e").content_hash in hashes


PROGRAM = """
import os, sys
from pathlib import Path
from hotrec.artifact import commit_artifact, read_artifact, scratch_directory
target, at, renames, rename = Path(sys.argv[1]), int(sys.argv[2]), 0, Path.rename
def counted(self, *args):
    global renames
    renames += 1
    return os._exit(9) if renames == at else rename(self, *args)
Path.rename = counted
for _ in range(0 if at else 500):
    print(read_artifact(target, kind="profile", verify="full").kind, flush=True)
if at:
    with scratch_directory(target, kind="profile") as scratch:
        (scratch / "x.txt").write_text("new")
        commit_artifact(scratch, target, kind="profile", content={"version": "new"})
"""


def start(target: Path, at_rename: int) -> subprocess.Popen[str]:
    variables = {**os.environ, "PYTHONPATH": str(Path(module.__file__).parents[1])}
    command = [sys.executable, "-c", PROGRAM, str(target), str(at_rename)]
    return subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("at_rename", [1, 2])
def test_killed_while_replacing_leaves_the_old_or_the_new(tmp_path: Path, at_rename: int) -> None:
    old = write(tmp_path / "a").content
    with start(tmp_path / "a", at_rename) as killed:
        pass
    assert killed.returncode == 9
    assert read(tmp_path / "a").content in (old, {"version": "new"})


def test_readers_never_see_a_replacement(tmp_path: Path) -> None:
    write(tmp_path / "a")
    with start(tmp_path / "a", 0) as reader:
        assert reader.stdout is not None
        reader.stdout.readline()
        while reader.poll() is None:
            write(tmp_path / "a", "new")
            write(tmp_path / "a", "old")
    assert reader.returncode == 0


def write_code(target: Path, text: str = "") -> Path:
    with scratch_directory(target, kind="profile") as scratch:
        put(scratch / "read_me.py", text)
        commit_artifact(scratch, target, kind="profile", content={})
    return target


@pytest.mark.parametrize(
    "make",
    [
        lambda a: put(a / "thesis.tex"),
        lambda a: put(a),
        lambda a: put(a / MANIFEST, '{"name": "extension"}'),
        lambda a: put(write(a).path / "notes" / "x.txt"),
        lambda a: write(a, kind="dataset").path / "b.txt",
        lambda a: put(write_code(a) / "__pycache__/mine.cpython-311.pyc"),
        lambda a: put(write_code(a) / "__pycache__/read_me.pyc"),
        lambda a: put(write_code(a) / "__pycache__/deeper/read_me.cpython-311.pyc"),
        lambda a: put(write_code(a) / "read_me.cpython-311.pyc"),
    ],
)
def test_nothing_foreign_is_replaced(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    kept = make(tmp_path / "a")
    text = kept.read_text()
    with pytest.raises(ArtifactError, match="expected an empty directory or a profile|KeyError"):
        write(tmp_path / "a")
    assert kept.read_text() == text
    assert left_over(tmp_path) == ["a"]


def test_what_python_caches_of_its_modules_is_not_foreign(tmp_path: Path) -> None:
    write_code(tmp_path / "a", "TEXT = 'old'\n")
    cache = put(tmp_path / "a/__pycache__/read_me.cpython-311.pyc")
    mine = put(tmp_path / "mine.pyc")
    cache.unlink()
    cache.symlink_to(mine)
    with pytest.raises(ArtifactError, match="files of others, such as __pycache__/read_me"):
        write(tmp_path / "a")
    cache.unlink()
    put(cache)
    write_code(tmp_path / "a", "TEXT = 'new'\n")
    assert left_over(tmp_path / "a") == [MANIFEST, "read_me.py"]
    assert mine.exists()


def test_a_link_is_followed_and_one_to_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    for text in ("old", "new"):
        write(tmp_path / "link", text)
    assert (tmp_path / "empty" / "counts" / "t.npy").read_text() == "new"
    (tmp_path / "loop").symlink_to("loop")
    for target in (tmp_path / "loop", tmp_path / "loop" / "x"):
        with pytest.raises((ArtifactError, OSError), match="loop"):
            write(target)
    assert left_over(tmp_path) == ["empty", "link", "loop"]


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    manifest = write(tmp_path / "a").path / MANIFEST
    manifest.unlink()
    os.mkfifo(manifest)
    for call in (read, write, lambda _: read_record(manifest)):
        with pytest.raises(ArtifactError, match=r"manifest\.json: expected .*, got a pipe"):
            call(tmp_path / "a")


def test_one_process_writes_at_a_time(tmp_path: Path) -> None:
    is_locked = pytest.raises(LockedError, match=rf"process {os.getpid()} on ")
    with scratch_directory(tmp_path / "a", kind="profile"), is_locked:
        write(tmp_path / "a")
    write(tmp_path / "a")
    assert left_over(tmp_path) == ["a"]


def test_what_a_killed_writer_of_another_artifact_left_is_removed(tmp_path: Path) -> None:
    lock = "hotrec prepare (process 1 on host since 2026-01-01 00:00:00)"
    put(tmp_path / ".mine.lock", "of another program")
    write(tmp_path / "b")
    (tmp_path / "b").rename(tmp_path / ".b.4c5d6e7f.old")  # killed between the two renames
    (tmp_path / ".b.0a1b2c3d.tmp").mkdir()
    put(tmp_path / ".b.lock", lock)
    with scratch_directory(tmp_path / "c", kind="profile"):
        write(tmp_path / "a")
        assert (tmp_path / ".c.lock").exists(), "that of a writer at work stays"
    assert left_over(tmp_path) == [".mine.lock", "a", "b"]


def edit(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def edit_manifest(target: Path) -> None:
        document = json.loads((target / MANIFEST).read_text())
        change(document)
        (target / MANIFEST).write_text(json.dumps(document))

    return edit_manifest


NO_MANIFEST = r"manifest\.json: expected the manifest of a profile"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda a: (a / "b.txt").unlink(), r"b\.txt: expected a file of 1 bytes, got none"),
        (lambda a: ((a / "b.txt").unlink(), os.mkfifo(a / "b.txt")), r"b\.txt: expected a file"),
        (lambda a: put(a / "b.txt", "bb"), r"b\.txt: expected 1 bytes, got 2"),
        (lambda a: (a / MANIFEST).unlink(), NO_MANIFEST),
        *((lambda a, t=text: put(a / MANIFEST, t), NO_MANIFEST) for text in ("", "[]", "3", "{}")),
        (lambda a: (a / MANIFEST).write_bytes(b"\xff\xfe"), NO_MANIFEST),
        (lambda a: put(a / MANIFEST, (a / MANIFEST).read_text()[:-40]), NO_MANIFEST),
        (edit(lambda d: d.update(content=[])), NO_MANIFEST),
        (edit(lambda d: d["files"].update({"../x": d["files"]["b.txt"]})), NO_MANIFEST),
        (edit(lambda d: d["content"].update(fraction=0.2)), r"expected content hash \w{12}, got"),
        (edit(lambda d: d["files"].pop("b.txt")), "expected content hash"),
        (edit(lambda d: d.update(format_version=99)), "expected format version .*, got 99"),
    ],
)
def test_damage_is_found(tmp_path: Path, damage: Callable[[Path], Any], message: str) -> None:
    write(tmp_path / "a")
    damage(tmp_path / "a")
    with pytest.raises(ArtifactError, match=message):
        read_artifact(tmp_path / "a", kind="profile")


def test_an_edit_of_equal_size_is_found_by_hash(tmp_path: Path) -> None:
    write(tmp_path / "a")
    put(tmp_path / "a" / "b.txt", "c")
    read_artifact(tmp_path / "a", kind="profile", verify=Verify.size)
    with pytest.raises(ArtifactError, match=r"b\.txt: expected checksum"):
        read(tmp_path / "a")


def test_files_apart_are_no_part_of_the_hash(tmp_path: Path) -> None:
    """But each is as it was written."""
    old, new = (write(tmp_path / text, text, apart=["counts/t.npy"]) for text in ("old", "new"))
    assert old.files["counts/t.npy"] != new.files["counts/t.npy"]
    assert old.content_hash == new.content_hash
    put(tmp_path / "new" / "counts" / "t.npy", "odd")
    with pytest.raises(ArtifactError, match=r"t\.npy: expected"):
        read(tmp_path / "new")


def test_made_from(tmp_path: Path) -> None:
    dataset = write(tmp_path / "data", kind="dataset")
    check_made_from(write(tmp_path / "a", made_from={"dataset": dataset.content_hash}), dataset)
    other = write(tmp_path / "other", "other", kind="dataset")
    for profile, source in ((read(tmp_path / "a"), other), (write(tmp_path / "free"), dataset)):
        with pytest.raises(ArtifactError, match="expected a profile made from the dataset .*, got"):
            check_made_from(profile, source)
    with pytest.raises(ArtifactError, match=r"expected kind 'dataset', got 'profile'"):
        read_artifact(tmp_path / "a", kind="dataset")
