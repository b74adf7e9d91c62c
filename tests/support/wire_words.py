"""Reports and commands by words, as tests say them, and the typed messages that they are."""

import re
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, get_args

from scalai.core.messages import commands, reports
from scalai.core.messages import shared as messages
from scalai.core.tensors.holders import SourceList
from scalai.launch.coordinator.calls import StoreIdentity
from scalai.runtime.codec import decode
from scalai.runtime.connections import Address, connect
from scalai.store.manifest import manifest_of_bytes
from scalai.store.parts import snapshot_name


def word_of(kind: type) -> str:
    """Return the word for a kind of message: ``workers_failed`` for ``WorkersFailed``."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()


REPORTS = {word_of(kind): kind for kind in get_args(reports.Report)}


SHORT = {"part": "manifest", "parts": "manifests"}


def report_of(word: str, **facts: Any) -> Any:
    """Return the report that a word names; lists among its facts become tuples. A sealed part says
    of which snapshot it is."""
    given = {
        SHORT.get(name, name): tuple(value) if isinstance(value, list) else value
        for name, value in facts.items()
    }
    if word == "sealed":
        part: Any = given.get("manifest")
        given["snapshot"] = snapshot_name(manifest_of_bytes(part, "a")) if part is not None else ""
    return REPORTS[word](**given)


def store_identity(named: Sequence[object] | None) -> StoreIdentity | None:
    """Return the identity of a store that a test names by a machine, a number, and perhaps a
    host."""
    if named is None:
        return None
    machine, number, *host = named
    assert isinstance(number, int)
    return StoreIdentity("/".join(map(str, (machine, *host))), number, 0)


def told_by(command: commands.Command) -> dict[str, Any]:
    """Return a command's fields by name, those of its workers and their place among them."""
    found: dict[str, Any] = {"command": word_of(type(command))}
    for part in (command, getattr(command, "workers", None)):
        for field in fields(part) if part is not None else ():
            found[field.name] = getattr(part, field.name)
    found.pop("workers", None)
    if found.get("sources") is not None:
        found["sources"] = found["sources"].value.hosts
    placement = found.get("placement")
    for field in fields(placement) if placement is not None else ():
        found[field.name] = getattr(placement, field.name)
    if placement is not None:
        found["group"] = list(placement.group)
    return found


def workers(
    round: int = 1, first_rank: int = 0, local_world_size: int = 1, **facts: Any
) -> commands.Workers:
    """Return which workers a host runs; what is not given is of no interest."""
    placement = commands.Placement(
        hosts=messages.Shared(group := facts.pop("group", ("a",))),
        counts=messages.Shared((local_world_size,) * len(group)),
        group_rank=0,
        first_rank=first_rank,
        local_world_size=local_world_size,
        world_size=facts.pop("world_size", first_rank + local_world_size),
    )
    given = {
        "run": "r",
        "degrees": {"tp": 1, "pp": 1, "dp": placement.world_size},
        "micro_batch_size": None,
        "master_addr": "127.0.0.1",
        "master_port": 1,
        "generation": None,
        "restorable_step": None,
        "facts": messages.JsonText.of({}),
        "snapshot_every": 0,
    }
    return commands.Workers(round=round, placement=placement, **{**given, **facts})


def start(
    round: int = 1,
    first_rank: int = 0,
    local_world_size: int = 1,
    *,
    sources: messages.Shared[SourceList] | None = None,
    is_built: bool = False,
    **facts: Any,
) -> commands.Start:
    """Return the command that begins a round."""
    found = workers(round, first_rank, local_world_size, **facts)
    return commands.Start(found, sources, is_built)


def call_raw(address: Address, token: bytes, data: bytes) -> str:
    """Send bytes where a request is expected; return the error that is answered."""
    with connect(address, token, 30) as framed:
        framed.send(data)
        answer = framed.receive()
    assert answer[:1] == b"\1", answer
    return decode(answer[1:], tuple[str, str])[1]


class Told:
    """What an agent's part has reported, as events with their facts."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def __call__(self, report: reports.Report) -> None:
        values = {field.name: getattr(report, field.name) for field in fields(report)}
        self.events.append({"event": word_of(type(report)), **values})

    def words(self) -> list[str]:
        """Return what was reported, in order."""
        return [event["event"] for event in self.events]
