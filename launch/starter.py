"""How the workers of a round are started: where they meet, and what they begin from."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in its __all__

from scalai.core import actions
from scalai.core import membership as m
from scalai.core.assignment import place_ranks
from scalai.launch.generations import Generations
from scalai.launch.roster import Roster
from scalai.store.manifest import manifest_message

Json = Any


class Starter:
    """Tells the agents which workers to start, and hosts these workers' rendezvous.

    Args:
        run: The name of this run of the job.
        interface: The address at which workers meet.
        roster: The agents, and the commands that wait for them.
        generations: What workers may begin from.
    """

    def __init__(self, run: str, interface: str, roster: Roster, generations: Generations) -> None:
        self._run = run
        self._interface = interface
        self._roster = roster
        self._generations = generations
        self._store: TCPStore | None = None
        self._store_ahead: TCPStore | None = None

    def build(self, ahead: m.Ahead, newest: int | None) -> None:
        """Start the next round's workers beside the present ones, which will go on to a later
        generation than the ``newest``."""
        self._store_ahead = self._new_store()
        self._command("build", ahead.round, ahead.assignment, self._store_ahead, newest)

    def give_up(self) -> None:
        """The workers that were built ahead will not be needed."""
        self._store_ahead = None

    def start(self, action: actions.StartRound) -> None:
        """Start the workers of a round, or let those that were built ahead begin."""
        self._store, self._store_ahead = self._store_ahead or self._new_store(), None
        sources = {}
        if action.generation is not None:
            for host, part in self._generations.parts(action.generation).items():
                address = self._roster[host].address
                sources[host] = {"address": address, "part": manifest_message(part)}
        self._command(
            "start",
            action.round,
            action.assignment,
            self._store,
            action.generation,
            {"sources": sources, "is_built": action.is_built},
        )

    def _new_store(self) -> TCPStore:
        """Return what the workers of a round meet at (TORCHELASTIC_USE_AGENT_STORE): a new one a
        round, so that no key is stale."""
        return TCPStore(
            self._interface,
            0,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(minutes=10),
        )

    def _command(
        self,
        command: str,
        round: int,
        assignment: m.Assignment,
        store: TCPStore,
        generation: int | None,
        more: Mapping[str, Json] | None = None,
    ) -> None:
        """Tell each host of an assignment which workers to start, and what is known of the newest
        generation."""
        step = None if generation is None else self._generations.step(generation)
        facts = {} if generation is None else self._generations.facts(generation)
        for host, place in place_ranks(assignment).items():
            what = {
                "command": command,
                "run": self._run,
                "round": round,
                "generation": generation,
                "restorable_step": step,
                "facts": facts,
                "degrees": assignment.degrees.to_json(),
                "micro_batch_size": assignment.micro_batch_size,
                "master_addr": self._interface,
                "master_port": store.port,
                **place,
                **(more or {}),
            }
            self._roster.command([host], what)
