"""Command lines in the documentation: a shell reads them as they stand, and hotrec takes them."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from itertools import islice, takewhile, zip_longest
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep

from hotrec.cli.app import _complete
from hotrec.cli.commands import COMMANDS
from hotrec.cli.stage import check_data
from hotrec.cli.store import build_config, compose_config
from tests.policy.source import REPOSITORY

# The log of changes has commands of earlier versions.
PAGES = [
    *sorted((REPOSITORY / "docs").glob("*.md")),
    *sorted(path for path in REPOSITORY.glob("*.md") if path.name != "CHANGELOG.md"),
    REPOSITORY / "docker" / "README.md",
]
# What zsh, the shell of macOS, or bash expands where it stands without quotes.
EXPANDED = re.compile(r"[][(){}*?!^~]")
PROGRAMS = r"hotrec|torchrun|sbatch|docker|launch/torchrun\.sh"
NAMES = "|".join(COMMANDS)


def lines_of(page: Path) -> Iterator[str]:
    """The command lines of a page: of its blocks, and in its text those with words."""
    text = page.read_text()
    blocks = re.findall(r"^```console\n(.*?)^```|((?:^ {4}[^\n]*\n)+)", text, re.M | re.S)
    for block in blocks:
        for line in "".join(block).replace("\\\n", " ").splitlines():
            if block[0] or re.match(rf" *(?:hotrec (?:{NAMES})|docker) ", line):
                yield re.sub(r"<[\w ]+>", "x", line.strip())  # a placeholder
    prose = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    for span in re.findall(rf"`(hotrec\s(?:{NAMES})\s[^`]+)`", prose):
        if "..." not in span:
            yield re.sub(r"<[\w ]+>", "x", " ".join(span.split()))


def command_in(line: str) -> tuple[str, list[str]] | None:
    """The hotrec command of a line, with the words after its name."""
    words = shlex.split(line, comments=True)
    words = words[len(list(takewhile(lambda word: re.match(r"[A-Z_]+=", word), words))) :]
    if not words or not re.fullmatch(PROGRAMS, words[0]) or any("examples/" in w for w in words):
        return None
    places = [place for place, word in enumerate(words) if word in COMMANDS]
    if words[0] == "docker":
        places = places[-1:] if any(word.startswith(("hotrec:", "--rm")) for word in words) else []
    elif words != ["hotrec"]:
        assert places, f"no command: {line}"
        assert words[0] != "hotrec" or places[0] == 1, f"no command: {line}"
    return (words[places[0]], words[places[0] + 1 :]) if places else None


def jobs_of(overrides: list[str]) -> Iterator[list[str]]:
    """The overrides of the first jobs of a sweep, with the first values of each key."""
    choices = []
    for override in OverridesParser.create().parse_overrides(overrides):
        key, value = override.get_key_element(), override.value()
        if isinstance(value, IntervalSweep):
            choices.append([f"{key}={value.start}", f"{key}={value.end}"])
        elif override.is_sweep_override():
            choices.append([f"{key}={value}" for value in override.sweep_string_iterator()])
        else:
            choices.append([str(override.input_line)])
    for job in islice(zip_longest(*choices), 2):
        yield [word or words[0] for word, words in zip(job, choices, strict=True)]


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the log that examples name, as one page describes it."""
    shown = r"```yaml\n# conf/(data/\w+\.yaml)\n(.*?)```"
    text = (REPOSITORY / "docs" / "your_own_data.md").read_text()
    [(name, content)] = re.findall(shown, text, re.DOTALL)
    (tmp_path / "own" / "data").mkdir(parents=True)
    (tmp_path / "own" / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "own"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_shell_reads_the_lines(page: Path) -> None:
    script = "\n".join(lines_of(page))
    done = subprocess.run(["bash", "-n", "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for line in script.splitlines():
        bare = re.sub(r"'[^']*'|\"[^\"$`]*\"|(?:^| )#.*", "", line)
        assert not EXPANDED.search(bare), f"a shell expands what stands without quotes: {line}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_hotrec_takes_the_lines(page: Path, conf: Path) -> None:
    for line in lines_of(page):
        found = command_in(line)
        if found is None:
            continue
        name, words = found
        if "--help" in words:
            continue
        for word in words:
            if word.startswith("runs/"):
                Path(word).mkdir(parents=True, exist_ok=True)
        overrides = _complete(name, words)[1]
        # Hydra's launchers and sweepers may not be installed.
        overrides = [word for word in overrides if not word.startswith("hydra")]
        for job in jobs_of(overrides):
            of_log = [f"hydra.searchpath=[file://{conf}]", *job]
            config = build_config(compose_config(COMMANDS[name].config_name, of_log))
            check_data(name, config)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_files_and_targets_of_lines_exist(page: Path) -> None:
    makefile = (REPOSITORY / "Makefile").read_text()
    for line in lines_of(page):
        words = shlex.split(line, comments=True)
        for word in words:
            if re.match(r"(launch|examples|benchmarks|docker)/", word):
                assert (REPOSITORY / word.partition(":")[0]).exists(), line
        if words[:1] == ["make"]:
            assert re.search(rf"^{words[1]}:", makefile, re.MULTILINE), line
