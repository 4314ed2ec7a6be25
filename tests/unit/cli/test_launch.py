import multiprocessing
import os
import time
from unittest.mock import Mock

import pytest

from hotrec.cli.launch import PARENT, end_with_parent, end_workers, private_temporary_directory
from hotrec.cli.store import check_yaml_files


def test_workers_that_an_error_left_are_ended():
    fork = multiprocessing.get_context("fork")
    worker = fork.Process(target=time.sleep, args=(60,), daemon=True)
    worker.start()
    end_workers()
    assert not worker.is_alive()


def test_a_rank_whose_launcher_is_gone_ends(monkeypatch):
    monkeypatch.setattr("hotrec.cli.launch.ctypes", Mock())
    monkeypatch.setenv(PARENT, str(os.getppid()))
    end_with_parent()
    assert os.environ[PARENT] == str(os.getpid()), "for its own children"
    with pytest.raises(SystemExit):
        end_with_parent()


def test_a_missing_tmpdir_is_named(monkeypatch):
    monkeypatch.setenv("TMPDIR", "/absent")
    with (
        pytest.raises(ValueError, match="TMPDIR: expected a directory, got /absent"),
        private_temporary_directory(),
    ):
        pass


@pytest.mark.parametrize("content", [b"- a", b"5"])
def test_a_file_without_keys_is_named(tmp_path, content):
    (tmp_path / "mine.yaml").write_bytes(content)
    with pytest.raises(ValueError, match=r"mine\.yaml: expected keys"):
        check_yaml_files(tmp_path)


@pytest.mark.parametrize("content", [b"a: \xed\xa0\x80", b"a: [1", b"a: {b: c: d}"])
def test_a_file_that_is_no_yaml_is_named(tmp_path, content):
    path = tmp_path / "log.yaml"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"log\.yaml: expected YAML in UTF-8, got \w+Error: "):
        check_yaml_files(tmp_path)
