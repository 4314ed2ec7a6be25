"""Every configuration key, group and command: its type and default.

A commit that changes ``configuration.md`` (HOTREC_UPDATE_GOLDEN=1) says which key moved, was added
or dropped.
"""

from __future__ import annotations

from configuration_keys import Key, keys_of, keys_of_choices, settings_of

from hotrec.cli.commands import COMMANDS
from hotrec.cli.store import groups_of, options_of
from hotrec.config.fields import VARIANTS
from hotrec.config.roots import ROOTS
from tests.frozen.record import check_text


def test_the_interface_is_the_recorded_one() -> None:
    parts = [
        commands(),
        *(roots(name) for name in ROOTS),
        *(choices(group) for group in groups_of("config")),
    ]
    check_text("configuration.md", "\n".join(parts))


def commands() -> str:
    lines = (
        f"{name}: root {command.config_name}, first word {command.first!r}"
        f"{', parallel' if command.is_parallel else ''}"
        for name, command in COMMANDS.items()
    )
    return "\n".join(["# Commands", *lines, ""])


def roots(name: str) -> str:
    """The keys of a root; those of a group with variants are with the group."""
    shown = [key for key in keys_of(ROOTS[name], "") if key.name.split(".")[0] not in VARIANTS]
    return table(f"Root {name}", shown)


def choices(group: str) -> str:
    """A group's choices with what their files set, and the keys of its variants."""
    settings = settings_of("config", group)
    lines = [f"{name}: {settings[name]}" for name in options_of(group)]
    if group not in VARIANTS:
        return "\n".join([f"# Group {group}", *lines, ""])
    keys = keys_of_choices(f"{group}.", VARIANTS[group], settings)
    return "\n".join([f"# Group {group}", *lines, "", table(f"Keys of {group}", keys)])


def table(title: str, keys: list[Key]) -> str:
    lines = (f"{key.name}: {key.values}; default {key.default}" for key in keys)
    return "\n".join([f"# {title}", *lines, ""])
