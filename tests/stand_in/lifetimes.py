"""Whether memory is given back while another stream may still use it.

A freed block may be handed out again at once to whoever allocates on the stream it was allocated
on. That is safe if all uses on other streams are known to be over by then: the block was recorded
on that stream (``record_stream``), its own stream has waited for an event after the use, or the
host has.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tests.stand_in.log import Entry, Kind, stream_name

Clock = dict[int, int]  # by stream, how many of its operators are over


@dataclass
class _Block:
    allocated: Entry
    last_use: dict[int, tuple[int, Entry]] = field(default_factory=dict)
    recorded: set[int] = field(default_factory=set)


def _advance(clock: Clock, other: Clock) -> None:
    for stream, count in other.items():
        clock[stream] = max(clock.get(stream, 0), count)


def violations(entries: Iterable[Entry]) -> list[str]:
    """Each block that is freed too early, with the lines of its use and its allocation."""
    blocks: dict[int, _Block] = {}
    counts: Clock = {}
    seen: dict[int, Clock] = {}  # by stream, what the next operator on it comes after
    events: dict[int, Clock] = {}
    host: Clock = {}
    found: dict[str, None] = {}

    def clock_of(stream: int) -> Clock:
        return {**seen.setdefault(stream, {}), stream: counts.get(stream, 0)}

    for entry in entries:
        stream = entry.stream
        match entry.kind:
            case Kind.ALLOCATE:
                blocks[entry.ids[0]] = _Block(entry)
            case Kind.OPERATOR | Kind.COLLECTIVE:
                counts[stream] = counts.get(stream, 0) + 1
                for number in entry.ids:
                    if number in blocks:
                        blocks[number].last_use[stream] = (counts[stream], entry)
            case Kind.RECORD_STREAM:
                if entry.ids[0] in blocks:
                    blocks[entry.ids[0]].recorded.add(stream)
            case Kind.RECORD_EVENT:
                events[entry.ids[0]] = clock_of(stream)
            case Kind.WAIT_EVENT:
                _advance(seen.setdefault(stream, {}), events.get(entry.ids[0], {}))
            case Kind.SYNC:
                if entry.name == "device.synchronize":
                    for other in list(counts):
                        _advance(host, clock_of(other))
                elif entry.name == "event.synchronize":
                    _advance(host, events.get(entry.ids[0], {}))
                else:
                    _advance(host, clock_of(stream))
            case Kind.FREE:
                block = blocks.pop(entry.ids[0], None)
                if block is not None:
                    known = clock_of(block.allocated.stream)
                    _advance(known, host)
                    for text in _unsafe(block, known):
                        found[text] = None
    return list(found)


def _unsafe(block: _Block, known: Clock) -> list[str]:
    home = block.allocated.stream
    return [
        f"{use.name} on {stream_name(stream)} ({use.place}) uses memory of {stream_name(home)} "
        f"that is freed without record_stream; allocated at {block.allocated.place}"
        for stream, (count, use) in block.last_use.items()
        if stream != home and stream not in block.recorded and known.get(stream, 0) < count
    ]
