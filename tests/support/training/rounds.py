"""What a test says of a job of several rounds, and what it gets to see of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from scalai.core.job.function_proof import Numbers
from support.training.worker_pool import WorkerPool


@dataclass(frozen=True)
class Round:
    """One round of a job: its script, ``module:function``, with arguments by name, the folder where
    rounds leave their state, its number from 0, its ranks, the step behind which its workers leave
    (None: the script's end), the hooks' settings, and the first round's facts."""

    script: str
    arguments: dict[str, Any]
    folder: str
    number: int
    world: int
    stop_at: int | None
    settings: dict[str, Any]
    facts: dict[str, Any]
    port: int


@dataclass
class Seen:
    """What a rank of a round noted, logged, and how it ended: ``left``, ``finished``, or an error.
    ``facts`` are what it told; ``numbers`` those of its first step, and of one behind its stop."""

    notes: list[dict[str, Any]] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    numbers: list[Numbers] = field(default_factory=list)
    ending: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


class Player:
    """Runs scripts of ``round_scripts`` through rounds, below a folder."""

    def __init__(self, pool: WorkerPool, folder: Path) -> None:
        self._pool, self.folder = pool, folder

    def __call__(
        self, script: str, rounds: Sequence[tuple[int, int | None]], *, at: Any = "job",
        settings: Any = None, fails: Any = False, **arguments: Any,
    ) -> list[list[Seen]]:  # fmt: skip
        """Run a script, [rounds, ranks].

        Args:
            rounds: Of each round its ranks, and the step behind which it is left; None: at the
                script's end. The first one that does not leave is the last.
            at: Folder of the job's state.
            settings: What the elastic configuration says to the hooks.
            fails: Whether the script ends otherwise than by the rounds.
            arguments: The script's.
        """
        folder = self.folder / at
        folder.mkdir(exist_ok=True)
        made: list[list[Seen]] = []
        facts: dict[str, Any] = {}
        for number, (world, stop_at) in enumerate(rounds):
            meeting = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            given = Round(
                f"round_scripts:{script}", arguments, str(folder), number, world, stop_at,
                dict(settings or {}), facts, meeting.port,
            )  # fmt: skip
            made.append(self._pool.run("rounds_worker:run", [(given,)] * world))
            facts = made[-1][0].facts
            if {seen.ending for seen in made[-1]} != {"left"}:
                break
        if not fails:
            expected = ["finished" if stop_at is None else "left" for _, stop_at in rounds]
            for ranks, ending in zip(made, expected, strict=True):
                assert {seen.ending for seen in ranks} == {ending}
        return made


def notes(made: Sequence[Sequence[Seen]], having: str = "") -> list[dict[str, Any]]:
    """Return what rank 0 noted, over all rounds, with an entry of a name."""
    return [values for ranks in made for values in ranks[0].notes if not having or having in values]


def told(made: Sequence[Sequence[Seen]], event: str) -> list[str]:
    """Return what rank 0 logged of an event, over all rounds."""
    return [line for ranks in made for line in ranks[0].log if line.startswith(f"event={event} ")]


def line(of: str) -> str:
    """Return where ``round_scripts`` has a comment that marks a line."""
    lines = Path(__file__).with_name("round_scripts.py").read_text().splitlines()
    (number,) = (n for n, text in enumerate(lines, 1) if text.endswith(f"# line: {of}"))
    return f"round_scripts.py:{number}"
