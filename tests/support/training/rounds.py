"""What a test says of a job of several rounds, and what it gets to see of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from scalai.core.job.function_proof import Numbers
from support.training.worker_pool import WorkerPool


@dataclass(frozen=True)
class Round:
    """What one round of a job is.

    Attributes:
        script: ``module:function`` of what stands for the user's script.
        arguments: What it is called with, by name.
        folder: Where the rounds of the job leave their state.
        number: Of the round, from 0.
        world: Its ranks.
        stop_at: The step behind which its workers leave; None: it runs to the script's end.
        settings: What the elastic configuration says to the hooks.
        facts: What the first round told.
        port: Where its ranks meet, on this machine.
    """

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


def play(
    pool: WorkerPool,
    folder: Path,
    script: str,
    rounds: Sequence[tuple[int, int | None]],
    settings: Mapping[str, Any] | None = None,
    **arguments: Any,
) -> list[list[Seen]]:
    """Run a script of ``round_scripts`` through rounds, [rounds, ranks].

    Args:
        rounds: Of each round its ranks, and the step behind which it is left; None: at the script's
            end. The first one that does not leave is the last.
        settings: What the elastic configuration says to the hooks.
        arguments: The script's.
    """
    folder.mkdir(exist_ok=True)
    made: list[list[Seen]] = []
    facts: dict[str, Any] = {}
    for number, (world, stop_at) in enumerate(rounds):
        meeting = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        given = Round(
            f"round_scripts:{script}", arguments, str(folder), number, world, stop_at,
            dict(settings or {}), facts, meeting.port,
        )  # fmt: skip
        made.append(pool.run("rounds_worker:run", [(given,)] * world))
        facts = made[-1][0].facts
        if {seen.ending for seen in made[-1]} != {"left"}:
            break
    return made


def notes(made: Sequence[Sequence[Seen]], rank: int = 0) -> list[dict[str, Any]]:
    """Return what one rank noted, over all rounds."""
    return [values for ranks in made for values in ranks[rank].notes]


def log(made: Sequence[Sequence[Seen]]) -> list[str]:
    """Return what rank 0 logged, over all rounds."""
    return [line for ranks in made for line in ranks[0].log]
