"""Watch the watchmen: a forked program is to notice nothing of it, and nor is who starts it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import forked
from tests.helpers.forked import COLD, Process, environment

# What a program can see of its start, and what its own child sees.
FACTS = """
import json, os, signal, sys, tempfile

def facts():
    return {
        "argv": sys.argv, "path": sys.path[0], "main": __name__, "cwd": os.getcwd(),
        "executable": sys.executable, "words": sys.orig_argv,
        "environment": dict(os.environ), "tmp": tempfile.gettempdir(),
        "is_child": os.getppid() == int(os.environ["STARTED_BY"]),
        "leads": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
        "handlers": {n: str(signal.getsignal(n)) for n in (1, 2, 13, 15)},
        "blocked": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))),
        "stdin": sys.stdin.read(),
        "cmdline": [w for w in open("/proc/self/cmdline").read().split(chr(0)) if w],
        "environ": sorted(w for w in open("/proc/self/environ").read().split(chr(0)) if w),
    }
"""
OUTER = f"""{FACTS}
import subprocess
print(json.dumps(facts()), flush=True)
print("to stderr", file=sys.stderr)
os.environ["STARTED_BY"] = str(os.getpid())
signal.signal(signal.SIGHUP, signal.SIG_IGN)
words = [sys.executable, "-u", "inner.py", "an argument"]
with open("inner.log", "w") as log:
    sys.exit(subprocess.Popen(words, stdout=log, start_new_session=True).wait())
"""
INNER = f"""{FACTS}
print(json.dumps(facts()))
print("flushed at once, with -u", end="")
os._exit(7)
"""


FORKING = pytest.mark.skipif(not forked.is_forking(), reason="programs are executed here")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "outer.py").write_text(OUTER)
    (tmp_path / "inner.py").write_text(INNER)
    return tmp_path


def start(folder: Path, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    variables = environment(STARTED_BY=str(os.getpid()), TMPDIR=str(folder))
    words = (sys.executable, *words)
    return forked.run(words, cwd=folder, env=variables, stdin=subprocess.DEVNULL, **options)


def outcome(folder: Path) -> list[Any]:
    done = start(folder, "outer.py", "a=1", "b c")
    inner, last = (folder / "inner.log").read_text().splitlines()
    return [done.returncode, done.stderr, json.loads(done.stdout), json.loads(inner), last]


@FORKING
def test_a_forked_program_sees_what_an_executed_one_sees(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm = outcome(folder)
    monkeypatch.setenv(COLD, "1")
    cold = outcome(folder)
    for facts in cold[2:4]:
        assert facts["environment"].pop(COLD)
        facts["environ"].remove(f"{COLD}=1")
    for facts in (*warm[2:4], *cold[2:4]):  # pids of the two runs
        pid = facts["environment"].pop("STARTED_BY")
        facts["environ"].remove(f"STARTED_BY={pid}")
    assert warm == cold
    assert cold[0] == 7


@FORKING
def test_it_is_forked(folder: Path) -> None:
    code = "import sys; print('torchrec' in sys.modules)"
    assert start(folder, "-c", code).stdout == "True\n"


@pytest.mark.parametrize(
    ("code", "exit_code", "said"),
    [
        ("raise SystemExit(3)", 3, ""),
        ("import sys; sys.exit('a reason')", 1, "a reason"),
        ("raise KeyError('lost')", 1, "KeyError: 'lost'"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
        ("import atexit, sys; atexit.register(print, 'at exit', file=sys.stderr)", 0, "at exit"),
    ],
    ids=["code", "text", "error", "killed", "at-exit"],
)
def test_ends(code: str, exit_code: int, said: str, folder: Path) -> None:
    done = start(folder, "-c", code)
    assert done.returncode == exit_code
    assert done.stderr.rstrip().endswith(said)


def test_signals_and_descriptors(folder: Path) -> None:
    """The program reads what is written to it, and ends by a signal that is sent to it."""
    code = "import sys, time; print(sys.stdin.readline(), flush=True); time.sleep(100)"
    with Process(
        [sys.executable, "-c", code],
        cwd=folder,
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as running:
        assert running.stdin is not None
        assert running.stdout is not None
        running.stdin.write("a line\n")
        running.stdin.flush()
        assert running.stdout.readline() == "a line\n"
        assert running.poll() is None
        running.send_signal(signal.SIGTERM)
        assert running.wait(30) == -signal.SIGTERM


def test_a_limit_kills(folder: Path) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        start(folder, "-c", "import time; time.sleep(100)", timeout=1)


def test_what_counts_at_the_start_is_executed(folder: Path) -> None:
    code = "import sys; print('torchrec' in sys.modules, sys.warnoptions)"
    words = [sys.executable, "-c", code]
    done = forked.run(words, cwd=folder, env=environment(PYTHONWARNINGS="ignore"))
    assert done.stdout == "False ['ignore']\n"
