import multiprocessing
import time

import pytest

from hotrec.cli.launch import end_workers
from hotrec.cli.store import check_yaml_files


def test_workers_that_an_error_left_are_ended():
    fork = multiprocessing.get_context("fork")
    worker = fork.Process(target=time.sleep, args=(60,), daemon=True)
    worker.start()
    end_workers()
    assert not worker.is_alive()


@pytest.mark.parametrize("content", [b"a: \xed\xa0\x80", b"a: [1", b"a: {b: c: d}"])
def test_a_file_that_is_no_yaml_is_named(tmp_path, content):
    path = tmp_path / "log.yaml"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"log\.yaml: expected YAML in UTF-8, got \w+Error: "):
        check_yaml_files(tmp_path)
