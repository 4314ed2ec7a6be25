"""What launchers leave in the environment, against each other and the command line."""

import os
import signal
import sys
import tempfile
import threading
import time
from contextlib import nullcontext
from unittest import mock
from unittest.mock import Mock

import pytest

from hotrec.cli.launch import (
    PARENT,
    check_num_ranks,
    end_with_parent,
    is_under_torchrun,
    wait_for_child,
)
from hotrec.cli.output import print_error
from hotrec.runtime.ranks import RankError

TWO = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "a"}
ONE = {"RANK": "0", "WORLD_SIZE": "1"}


@pytest.mark.parametrize(
    ("variables", "num_ranks", "is_rank", "is_right"),
    [
        ({}, 2, False, True),
        (ONE, 2, False, True),  # as clusters set it for all processes
        ({**ONE, "TORCHELASTIC_RUN_ID": "a"}, None, True, True),
        (TWO, None, True, True),
        (TWO, 2, True, True),
        (TWO, 3, True, False),
        ({"RANK": "0", "WORLD_SIZE": "2"}, 2, True, False),
    ],
)
def test_the_ranks_of_torchrun_are_those_asked_for(variables, num_ranks, is_rank, is_right):
    with mock.patch.dict(os.environ, variables, clear=True):
        assert is_under_torchrun() is is_rank
        with (
            nullcontext()
            if is_right
            else pytest.raises(ValueError, match=f"num_ranks: expected .* got {num_ranks}")
        ):
            check_num_ranks(num_ranks)


def test_ranks_that_say_the_same_say_it_once(tmp_path, capsys):
    (tmp_path / "0").mkdir()
    variables = {"WORLD_SIZE": "5", "TORCHELASTIC_ERROR_FILE": str(tmp_path / "0" / "error.json")}
    variables["LOCAL_WORLD_SIZE"] = "4"
    said = ["key: expected x, got y. Do.", "other: expected x, got y. Do."]
    of_others = [RankError(1, f"ValueError: {said[1]}"), RankError(0, "OSError: full")]
    for rank, error in enumerate([*map(ValueError, said), *of_others]):
        of_rank = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        with mock.patch.dict(os.environ, {**variables, **of_rank}):
            print_error(error, wants_trace=False)
            print_error(error, wants_trace=False)
    assert capsys.readouterr().err.splitlines() == [
        f"[rank {rank}] error: {text}" for rank, text in enumerate(said)
    ]
    # The second host of two: its terminal does not show the first one's.
    elsewhere = {**variables, "RANK": "4", "LOCAL_RANK": "0"}
    with mock.patch.dict(os.environ, elsewhere):
        print_error(RankError(0, f"ValueError: {said[0]}"), wants_trace=False)
    assert said[0] in capsys.readouterr().err


def test_a_rank_whose_launcher_is_gone_ends(monkeypatch):
    monkeypatch.setattr("hotrec.cli.launch.ctypes", Mock())
    monkeypatch.setenv(PARENT, str(os.getppid()))
    end_with_parent()
    assert os.environ[PARENT] == str(os.getpid()), "for its own children"
    with pytest.raises(SystemExit):
        end_with_parent()


@pytest.mark.parametrize("end", ["os.abort()", "os._exit(0)"])
def test_a_signal_ends_what_a_child_does_not_end_by_it(end: str) -> None:
    """A library may abort where an interrupt meets its own code; a child may be done already."""
    code = f"import os, signal, time; signal.signal(signal.SIGINT, lambda *_: {end})\n"
    code += "print('ready', flush=True)\ntime.sleep(60)"
    with tempfile.TemporaryFile("w+") as stdout:

        def interrupt() -> None:
            while not os.fstat(stdout.fileno()).st_size:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(SystemExit) as ended:
            wait_for_child([sys.executable, "-c", code], dict(os.environ), stdout)
        thread.join()
    assert ended.value.code == 128 + signal.SIGINT
