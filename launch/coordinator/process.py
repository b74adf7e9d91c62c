"""The coordinator as a process of its own: ``python -m scalai.launch.coordinator.process FOLDER
HOST:PORT < ORDER``, the job and its token as JSON."""

import json
import logging
import os
import sys
from contextlib import suppress
from pathlib import Path

from scalai.core.errors import ScalaiError, UsageError
from scalai.core.witness import Known
from scalai.launch import host_signals
from scalai.launch.config.endpoint import (
    join_endpoint,
    read_card,
    split_endpoint,
    write_card,
    write_ending,
)
from scalai.launch.config.identity import secure_process
from scalai.launch.config.job import JobSpec
from scalai.launch.coordinator.calls import Moved
from scalai.launch.coordinator.discovery import (
    Place,
    clear_away,
    elected_from,
    is_here,
    lease_holder,
    next_term,
    one_at_a_time,
)
from scalai.launch.coordinator.elected import forward
from scalai.launch.coordinator.leases import (
    Entry,
    Lease,
    Register,
    await_ownership,
    open_ownership,
    open_register,
)
from scalai.launch.coordinator.losses import Patience
from scalai.launch.coordinator.refusals import Refusals
from scalai.launch.coordinator.server import STOOD_DOWN, Coordinator
from scalai.launch.coordinator.vote_file import forget_electorate, known_of_json
from scalai.launch.logs import configure, say
from scalai.launch.patient_writer import drain

ALONE_S = 60.0
"""How long a coordinator waits for a first or another agent before it ends."""
SWITCH_S = 0.1
"""How long a thread that runs may keep the others waiting, which wake up once in so long to ask for
it. Python's 5 ms are too short for two threads a host: with thousands that wait, asking is all that
they do."""

log = logging.getLogger("scalai.coordinator")


def expect_many_threads() -> None:
    """Have this process serve the connections of many hosts, each in its own thread."""
    sys.setswitchinterval(SWITCH_S)


def serve(
    spec: JobSpec, folder: Path, host: str, port: int, token: bytes, alone_s: float = ALONE_S
) -> int:
    """Be the coordinator of a job until it ends, or nobody has been there for ``alone_s``. Returns
    the job's exit code.

    Raises:
        RefusedError, UsageError: The job cannot be run, or has a coordinator here.
        PeerError: The address cannot be listened on, the lease cannot be read, or somebody who
            looks for this job's coordinator here stands still.
    """
    heard = _heard(spec)
    secure_process(spec.options.tls)
    register = open_register(spec.options.coordinator_lease, spec.job)
    if register is not None:
        holder = lease_holder(register, join_endpoint(host, port), token.decode())
        if holder is not None:
            raise _held(spec, holder)
    # An agent of this machine may be starting one: two must not listen, nor leave two cards.
    with one_at_a_time(folder):
        card = read_card(folder)
        if card is not None:
            there = join_endpoint(*card[0])
            raise UsageError(
                f"the job {spec.job!r} has a coordinator on this machine already, at {there}. "
                "Agents here find it. A coordinator by hand is started before the first of them."
            )
        holder, known = elected_from(spec, folder, token.decode())
        if holder is not None:
            raise _held(spec, holder)
        term, is_successor = next_term(spec, folder, known)
        coordinator = _open(
            spec, folder, (host, port), token, term, alone_s, is_successor=is_successor, known=known
        )
        address = _leave_card(coordinator, folder, host, token)
    _forward(coordinator, spec, folder, address, token)
    coordinator.heard = heard
    return _run(coordinator, spec, folder, address)


def _heard(spec: JobSpec) -> host_signals.Heard:
    """Hear the signals that a host is sent from here on."""
    host_signals.name(spec.options.signals_to_handle)
    heard = host_signals.Heard()
    heard.listen()
    return heard


def _held(spec: JobSpec, holder: Place) -> UsageError:
    return UsageError(
        f"the coordinator at {join_endpoint(*holder.address)} holds the lease of the job "
        f"{spec.job!r}. Agents find it; another one is started where it is gone."
    )


def _open(
    spec: JobSpec,
    folder: Path,
    address: tuple[str, int],
    token: bytes,
    term: int,
    alone_s: float = ALONE_S,
    *,
    is_successor: bool,
    known: Known,
    succeeds: bool = False,
) -> Coordinator:
    """Listen, and hold the job's lease where it has one, and its durable directory. ``succeeds``:
    its agents live, and wait for no disk.

    Raises:
        RefusedError: Another run of the job lives, and has the durable directory.
    """
    durable = spec.durable_dir if spec.is_elastic else None
    owned = open_ownership(spec.options.coordinator_lease, durable, spec.job)
    before = term - 1
    if owned is not None and durable is not None and not succeeds:
        term = max(term, 1 + await_ownership(owned, durable, spec.job))
    patience = Patience(lost_after_s=spec.config.resize.silent_s)
    coordinator = Coordinator(
        spec, address, token, say, alone_s, patience, term=term, is_successor=is_successor,
        refusals=Refusals(token),
    )  # fmt: skip
    register: Register | None = open_register(spec.options.coordinator_lease, spec.job)
    if spec.may_vote:
        register = coordinator.elect(folder).register(known, token)
    entry = Entry(term, address[0], int(coordinator.address[1]))
    try:
        if register is not None:
            coordinator.lease = Lease(register, entry, coordinator.run_name)
        if owned is not None:
            over = before if succeeds else None
            coordinator.owns = Lease(owned, entry, coordinator.run_name, waits_over=over)
    except ScalaiError:
        coordinator.close()
        raise
    return coordinator


def _leave_card(coordinator: Coordinator, folder: Path, host: str, token: bytes) -> tuple[str, int]:
    """Have agents find this coordinator. Returns where it listens."""
    assert not isinstance(coordinator.address, str)
    address = host, coordinator.address[1]
    write_card(folder, address, token, coordinator.term)
    return address


def _forward(
    coordinator: Coordinator,
    spec: JobSpec,
    folder: Path,
    address: tuple[str, int],
    token: bytes,
) -> None:
    """Have agents find the later one of two coordinators, where this one was elected or another one
    is."""
    coordinator.forward = lambda moved: write_card(
        folder, (moved.host, moved.port), token, moved.term
    )
    if spec.may_vote:
        moved = Moved(spec.job, coordinator.term, *address)
        forward(spec.options.coordinator, moved, token, is_here)


def _run(coordinator: Coordinator, spec: JobSpec, folder: Path, address: tuple[str, int]) -> int:
    expect_many_threads()
    log.info(
        "event=coordinator job=%s term=%d address=%s:%d: it runs on this host. If its process "
        "dies, an agent of this host starts another one, and the workers train on meanwhile",
        spec.job, coordinator.term, *address,
    )  # fmt: skip
    try:
        code = coordinator.run()
        if code != STOOD_DOWN:
            forget_electorate(folder)
            if not spec.options.is_standalone:  # whose folder goes with it
                with suppress(ScalaiError, OSError):
                    write_ending(folder, code, coordinator.ended_by)
        return code
    finally:
        clear_away(folder, address, is_last=spec.options.is_standalone)
        drain()


def main() -> int:
    """Be the coordinator that an agent starts. What stands in the way of a start is written to
    standard output, which the agent reads; the exit code says what kind it is."""
    configure("coordinator")
    folder = Path(sys.argv[1])
    host, port = split_endpoint(sys.argv[2])
    order = json.loads(sys.stdin.read())
    token = str(order["token"]).encode()
    try:
        spec = JobSpec.from_json(order["job"])
        heard = _heard(spec)
        secure_process(spec.options.tls)
        known = known_of_json(order["vote"])
        coordinator = _open(
            spec, folder, (host, port), token, int(order["term"]),
            is_successor=bool(order["is_successor"]), known=known,
            succeeds=bool(order["succeeds"]),
        )  # fmt: skip
    except ScalaiError as error:
        print(error, flush=True)
        return error.exit_code
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # the agent may end before the job does
    # The agent that has started this process holds the lock until the card is there.
    address = _leave_card(coordinator, folder, host, token)
    _forward(coordinator, spec, folder, address, token)
    coordinator.heard = heard
    return _run(coordinator, spec, folder, address)


if __name__ == "__main__":
    sys.exit(main())
