"""The part of ``recovery.py`` in which a host is told that it will be taken away: what it holds is
elsewhere once its agent has ended."""

import time
from dataclasses import dataclass
from pathlib import Path

from recovery_hosts import Hosts
from recovery_runs import BEHIND, LEFT, NAMES, SLOTS, VICTIM, Marks, ScalaiSide, Size, wait

NOTICE_S = 30
"""Seconds that a host is given, as by the providers whose notice is the shortest."""


@dataclass(frozen=True)
class Notice:
    """Seconds from the notice until the host has ended by itself, seconds until the others have
    made a step without it, and steps that were made once more."""

    left_s: float
    goes_on_s: float
    steps_lost: int


class NoticedSide(ScalaiSide):
    """A job whose last host listens to a file."""

    def command(self, hosts: Hosts, host: str, home: Path) -> list[str]:
        given = super().command(hosts, host, home)
        return [*given, "--preemption", f"file:{_notice(home)}"] if host == VICTIM else given


def _notice(home: Path) -> Path:
    return home / "notice"


def take_away(size: Size, home: Path) -> Notice:
    """Tell a host that trains that its time is nearly over, and wait until the others go on."""
    home.mkdir()
    marks, world = home / "marks", sum(SLOTS.values())
    with Hosts(NAMES, home) as hosts:
        NoticedSide(size).start(hosts, NAMES, home)
        wait(lambda: _made(marks, world) >= BEHIND, f"{BEHIND} steps", home)
        before = min(Marks(marks).rounds)
        aside = _notice(home).with_suffix(".partial")
        aside.write_text(str(NOTICE_S))
        noticed_at = time.monotonic()
        aside.rename(_notice(home))
        wait(lambda: not hosts.processes(VICTIM), "the end of what ran on the host", home)
        left_s = time.monotonic() - noticed_at

        def goes_on() -> bool:
            found = Marks(marks)
            last = max(found.rounds)
            return last > before and found.made(last, LEFT) > 0

        wait(goes_on, f"a step of {LEFT} ranks", home)
        found = Marks(marks)
        last = max(found.rounds)
        first = min(e["step"] for e in found.rounds[last][0] if e["event"] == "step")
        goes_on_s = found.when(last, "step", first) - noticed_at
        return Notice(left_s, goes_on_s, found.made(before, world) + 1 - first)


def _made(marks: Path, world: int) -> int:
    found = Marks(marks)
    return max((found.made(number, world) for number in found.rounds), default=0)


def figures(size: Size, folder: Path, runs: int) -> list[Notice]:
    """Return what became of each notice."""
    return [take_away(size, folder / f"notice-{number}") for number in range(runs)]
