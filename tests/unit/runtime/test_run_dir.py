"""Which directory is meant by a path or by "latest"."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hotrec.runtime.run_dir import CHECKPOINTS, CONFIG_FILE, RECORD, SUMMARY, find_run, find_trained


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write_run(path: str, second: int, *, config: bool = True) -> Path:
    """A run whose files are of a second."""
    run_dir = Path(path)
    (run_dir / CHECKPOINTS).mkdir(parents=True)
    for name in (f"{CHECKPOINTS}/latest", SUMMARY, *([CONFIG_FILE] if config else [])):
        (run_dir / name).write_text("")
        os.utime(run_dir / name, (second, second))
    return run_dir


def test_latest_is_what_run_chose_and_not_what_it_compared_with() -> None:
    write_run("runs/run/a/train", 1)
    write_run("runs/run/a/torchrec", 2)
    Path("runs/run/a", RECORD).write_text("{}")
    assert find_trained("latest") == Path("runs/run/a/train")
    assert find_run("latest", holding=SUMMARY, key="runs") == Path("runs/run/a/train")
    # In a sweep of `hotrec run`, too; without a configuration it is none of ours.
    write_run("runs/by_another_program", 9, config=False)
    write_run("runs/sweep/b/1/train", 3)
    write_run("runs/sweep/b/1/torchrec", 4)
    Path("runs/sweep/b/1", RECORD).write_text("{}")
    assert find_trained("latest") == Path("runs/sweep/b/1/train")
    # A run of that name that somebody trained for itself counts.
    write_run("runs/torchrec", 5)
    assert find_trained("latest") == Path("runs/torchrec")


def test_a_directory_of_run_stands_for_what_it_trained() -> None:
    train, torchrec = write_run("runs/run/a/train", 1), write_run("runs/run/a/torchrec", 2)
    Path("runs/run/a", RECORD).write_text("{}")
    assert find_trained("runs/run/a") == find_trained("runs/run/a/train") == train
    # By its name it is meant.
    assert find_trained("runs/run/a/torchrec") == torchrec
    with pytest.raises(ValueError, match=r"run_dir: .* got runs/run without it"):
        find_trained("runs/run")


def test_without_a_run_there_is_no_latest() -> None:
    write_run("runs/run/a/torchrec", 2)
    Path("runs/run/a", RECORD).write_text("{}")
    with pytest.raises(ValueError, match="latest"):
        find_trained("latest")
