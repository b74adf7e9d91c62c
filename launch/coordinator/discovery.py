"""Find a job's coordinator, or start it beside the first agent."""

import fcntl
import json
import logging
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from scalai.core.errors import (
    PeerError,
    RefusedError,
    ScalaiError,
    UsageError,
    VersionError,
)
from scalai.launch import host_signals
from scalai.launch.config.endpoint import (
    CARD,
    TOKEN_VARIABLE,
    join_endpoint,
    read_card,
    read_holder,
    remove_card,
    split_endpoint,
)
from scalai.launch.config.job_spec import JobSpec
from scalai.launch.coordinator.leases import (
    CLAIM_S,
    await_holder,
    await_ownership,
    named,
    second_run,
)
from scalai.launch.coordinator.registers import LEASE_FLAG, LeaseEntry, Register, registers_of
from scalai.launch.slow_files import said
from scalai.runtime.calls import Channel
from scalai.store.places import default_store_dir
from scalai.store.secure import open_below

JOIN_TIMEOUT_S = 60.0
COORDINATOR = ("-m", "scalai.launch.coordinator.process")
OF_AN_AGENT = {"SCALAI_AGENT", "SCALAI_AGENT_PID", "SCALAI_PRELOAD"}
"""An agent's variables for its own children, hidden from a coordinator."""
LOCK = "coordinator.lock"
LOCK_TIMEOUT_S = 2 * JOIN_TIMEOUT_S
"""Longer than the lock's holder waits for a new coordinator, in seconds."""
LOCK_QUIET_S = 5.0
ENDED_S = 5.0
"""Time for a killed coordinator to be gone, in seconds."""
LOOK_S = 0.5
WAITING_S = 2.0
"""Wait for a coordinator before it is logged, in seconds."""

log = logging.getLogger(__name__)


Newest = tuple[LeaseEntry | None, LeaseEntry | None]
"""Newest entries of a job's two registers (``registers_of``)."""


def job_directory(spec: JobSpec) -> Path:
    """This machine's folder of the job, made on demand. Raises ``StoreError`` if other users have
    access."""
    with open_below(spec.store_dir or default_store_dir(), spec.job, make=True) as folder:
        return folder.path


def clear_away(folder: Path, address: tuple[str, int], *, is_last: bool) -> None:
    """Remove the card of an ended coordinator, and no other's; with ``is_last`` also the folder,
    unless it holds a store.

    While an agent looks for a coordinator there, nothing is removed: it sees that nobody answers,
    or has started another one.
    """
    try:
        with suppress(PeerError, FileNotFoundError), one_at_a_time(folder, is_patient=False):
            remove_card(folder, of=address)
            if is_last and not (folder / CARD).exists():
                (folder / LOCK).unlink(missing_ok=True)
                with suppress(OSError):
                    folder.rmdir()
    except (ScalaiError, OSError) as error:  # the job's result stands
        log.warning("event=card_left in %s: %s Nobody answers there any more.", folder, error)


@dataclass(frozen=True, slots=True)
class Place:
    """Address of a job's coordinator, and the job's token.

    Attributes:
        started: The coordinator's process, if this agent has just started it.
        is_here: The coordinator is on this machine.
    """

    address: tuple[str, int]
    token: bytes = field(repr=False)
    started: "subprocess.Popen[bytes] | None" = None
    is_here: bool = False

    @property
    def is_new(self) -> bool:
        return self.started is not None


def find_coordinator(spec: JobSpec, token: str | None = None) -> Place:
    """Find the job's coordinator, or start one beside this agent.

    Agents on one machine find it by a card in the job's folder. With ``--coordinator HOST:PORT``
    the first agent on that host starts it, unless one answers there already or a register names
    another host; other hosts wait for it.

    Args:
        token: The job's secret, if a person gave one.

    Raises:
        UsageError: Several hosts and no token, or a standalone job with the name of a job here.
        RefusedError: Another living run of the job has the durable directory.
        StoreError: Other users have access to the job's folder.
        PeerError: Nobody answers in time.
    """
    endpoint, folder = spec.options.coordinator, job_directory(spec)
    if endpoint is None or _is_named_here(endpoint):
        return _start_first(spec, folder, endpoint, token)
    if token is None:
        raise UsageError(
            f"the coordinator {endpoint} is on another host; set {TOKEN_VARIABLE} to the same "
            f"secret on all hosts, "
            "for example to the output of: openssl rand -hex 32"
        )
    with said(f"the coordinator at {endpoint}", WAITING_S):
        return _awaited(endpoint, token, registers_of(spec)[0])


def _of_card(spec: JobSpec, folder: Path) -> Place | None:
    """The coordinator on this machine's card."""
    card = read_card(folder)
    if card is None:
        return None
    if spec.options.is_standalone:
        raise UsageError(
            f"a job {spec.job!r} runs on this machine, and --standalone joins none. Give "
            "this one another --job, or leave --job out."
        )
    return Place(*card, is_here=is_here(card[0][0]))


def _is_named_here(endpoint: str) -> bool:
    """Whether the coordinator's address is this machine's. Waits for an unknown name: a pod's name
    may come up with the pod."""
    host, deadline = split_endpoint(endpoint)[0], time.monotonic() + JOIN_TIMEOUT_S
    with said(f"the name {host} of the coordinator {endpoint}, which is unknown", WAITING_S):
        while True:
            try:
                return is_here(host)
            except UsageError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(LOOK_S)


def _answering(endpoint: str | None, token: str | None) -> Place | None:
    """A coordinator of this job at the named address already. Another container of this machine may
    share its address and not its memory; only a holder of the memory can start the next one."""
    if endpoint is None or token is None:
        return None
    address = split_endpoint(endpoint)
    try:
        Channel(address, token.encode()).close()
    except VersionError:
        raise
    except PeerError:
        return None
    return Place(address, token.encode())


def _awaited(endpoint: str, token: str, register: Register | None) -> Place:
    """Wait for the coordinator, at the named address or the register's."""
    wait_s = JOIN_TIMEOUT_S + (CLAIM_S if register is not None else 0.0)
    deadline, key = time.monotonic() + wait_s, token.encode()
    while True:
        if register is not None:
            with suppress(PeerError):  # without an entry the named address may answer
                entry = register.newest()
                if entry is not None and not entry.is_over:
                    Channel(entry.address, key).close()
                    return Place(entry.address, key, is_here=is_here(entry.host))
        try:
            Channel(split_endpoint(endpoint), key).close()
            return Place(split_endpoint(endpoint), key)
        except VersionError:
            raise
        except PeerError as error:
            if time.monotonic() > deadline:
                raise PeerError(
                    f"no coordinator at {endpoint} after {wait_s:.0f} s ({error}). Start the agent "
                    "of that host, or `scalai coordinator` there."
                ) from error
            time.sleep(0.2)


def _start_first(spec: JobSpec, folder: Path, endpoint: str | None, token: str | None) -> Place:
    """Start a coordinator, or find the present or a simultaneous one: of two at one moment only one
    gets the lease."""
    deadline = time.monotonic() + CLAIM_S + JOIN_TIMEOUT_S
    while True:
        with one_at_a_time(folder):
            found = _of_card(spec, folder)
        found = found or _answering(endpoint, token)
        if found is not None:
            return found
        found, newest = await_turn(spec, endpoint, token)  # without the lock: it may take a while
        if found is not None:
            return found
        try:
            with one_at_a_time(folder):
                found = _of_card(spec, folder) or _answering(endpoint, token)
                if found is not None:
                    return found
                term, is_successor = next_term(spec, folder, newest)
                return start_coordinator(
                    spec, folder, endpoint, token, term, is_successor=is_successor
                )
        except (UsageError, PeerError) as error:
            found = _answering(endpoint, token)  # another container of this machine was first
            if found is not None:
                return found
            if not _has_lost(spec, newest) or time.monotonic() > deadline:
                raise
            log.info("event=waiting another coordinator has claimed the term: %s", error)


def _has_lost(spec: JobSpec, before: Newest) -> bool:
    """Whether another coordinator has claimed a term since ``before``."""
    for register, entry in zip(registers_of(spec), before, strict=True):
        now = None if register is None else register.newest()
        if now is not None and now.term > (entry.term if entry is not None else 0):
            return True
    return False


def await_turn(
    spec: JobSpec, endpoint: str | None, token: str | None
) -> tuple[Place | None, Newest]:
    """Wait for the right to start a coordinator, or find a living one by a register. Also returns
    the newest entries by then.

    Raises:
        RefusedError: Another living run of the job has the durable directory.
        UsageError: The job has a register for its hosts, and no token.
        PeerError: A register is unreachable, or its living holder does not answer here in time.
    """
    register, owned = registers_of(spec)
    is_told = spec.options.coordinator_lease is not None and register is not None
    if is_told and (endpoint is None or token is None):
        raise UsageError(
            f"{LEASE_FLAG} is for jobs on several hosts: give --coordinator HOST:PORT, and "
            f"{TOKEN_VARIABLE}, the same on all of them."
        )
    with said("the register that says which coordinator the job has, and whether it lives"):
        entry = None
        if register is not None:
            found, entry = lease_holder(spec, register, endpoint, token)
            if found is not None:
                return found, (entry, None)
        if owned is None or owned is register:
            return None, (entry, entry if owned is not None else None)
        durable, before = spec.durable_dir, entry
        assert durable is not None

        def taken_over(owner: LeaseEntry) -> Place | None:
            """The coordinator of another host that has taken over during this wait."""
            with suppress(PeerError):
                now = None if register is None else register.newest()
                return None if now in (None, before) else _at(now, token)
            return None

        found, owner = await_ownership(owned, durable, found=taken_over)
        return found, (entry, owner)


def lease_holder(
    spec: JobSpec, register: Register, endpoint: str | None, token: str | None
) -> tuple[Place | None, LeaseEntry | None]:
    """Holder of the job's lease (None: nobody), and the newest entry. Raises as ``await_turn``."""
    deadline = time.monotonic() + JOIN_TIMEOUT_S
    durable = None if spec.options.coordinator_lease is not None else spec.durable_dir

    def is_meant(entry: LeaseEntry) -> bool:
        """Whether a person with this endpoint means this entry's run; a named register always
        does."""
        return durable is None or endpoint in (entry.named, join_endpoint(*entry.address))

    def call(entry: LeaseEntry) -> Place | None:
        return _at(entry, token) if is_meant(entry) else None

    def refuse(entry: LeaseEntry, unchanged_s: float) -> None:
        is_late = time.monotonic() > deadline
        if durable is not None and (is_late or token is None or not is_meant(entry)):
            raise second_run(durable, entry, unchanged_s)
        if is_late:
            raise PeerError(
                f"{named(entry)} renews its lease ({register}), and does not answer here within "
                f"{JOIN_TIMEOUT_S:.0f} s: is this host cut off from it?"
            )

    return await_holder(register, call, refuse)


def _at(entry: LeaseEntry | None, token: str | None) -> Place | None:
    """The coordinator of a register's entry, if it answers with this secret."""
    if entry is None or entry.is_over or token is None:
        return None
    try:
        Channel(entry.address, token.encode()).close()
    except PeerError:
        return None
    return Place(entry.address, token.encode(), is_here=is_here(entry.host))


def start_coordinator(
    spec: JobSpec,
    folder: Path,
    endpoint: str | None,
    token: str | None,
    term: int = 1,
    *,
    is_successor: bool = False,
    succeeds: Literal["nobody", "here", "elsewhere"] = "nobody",
) -> Place:
    """Start a coordinator that outlives this agent, and wait for its answer.

    Args:
        endpoint: Address for the coordinator; None: this machine, any port.
        token: The job's secret; None: a new one.
        succeeds: Machine of the predecessor, if agents of the job still live.
    """
    token = token or secrets.token_hex(32)
    host, port = split_endpoint(endpoint) if endpoint else ("127.0.0.1", 0)
    command = [sys.executable, *COORDINATOR]
    with host_signals.blocked():
        process = subprocess.Popen(
            [*command, str(folder), join_endpoint(host, port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env={name: value for name, value in os.environ.items() if name not in OF_AN_AGENT},
        )
    assert process.stdin is not None and process.stdout is not None
    with suppress(BrokenPipeError):  # it has ended; the reason follows below
        with process.stdin as order:
            orders = {"job": spec.to_json(), "token": token, "term": term}
            orders |= {"succeeds": succeeds, "is_successor": is_successor}
            order.write(json.dumps(orders).encode())
    deadline = time.monotonic() + JOIN_TIMEOUT_S
    with process.stdout as said:  # with its card it writes there no more
        while time.monotonic() < deadline:
            now = read_holder(folder)
            card = read_card(folder) if now is not None and now.term >= term else None
            if card is not None:
                return Place(*card, started=process, is_here=True)
            if process.poll() is not None:
                why = said.read().decode().strip()
                kinds = {kind.exit_code: kind for kind in (UsageError, RefusedError)}
                ended = f"the coordinator ended at once, with exit code {process.poll()}."
                raise kinds.get(process.returncode, PeerError)(why or ended)
            time.sleep(0.02)
        process.kill()  # it may hang at a register, and must not begin later
        with suppress(subprocess.TimeoutExpired):
            process.wait(ENDED_S)
    raise PeerError(
        f"the coordinator does not answer at {join_endpoint(host, port)} after "
        f"{JOIN_TIMEOUT_S:.0f} s. Name another --coordinator HOST:PORT."
    )


def next_term(spec: JobSpec, folder: Path, newest: Newest) -> tuple[int, bool]:
    """Number of the job's next coordinator, and whether it succeeds a dead one (with a card or
    entry left)."""
    before, (entry, _) = read_holder(folder), newest
    terms = [each.term for each in (before, *newest) if each is not None]
    has_died = before is not None if entry is None else not entry.is_over
    return 1 + max(terms, default=0), has_died and not spec.is_fresh


@contextmanager
def one_at_a_time(folder: Path, *, is_patient: bool = True) -> Iterator[None]:
    """Keep two agents of one machine from both starting a coordinator.

    Args:
        is_patient: Wait for the other agent, and make a missing folder.

    Raises:
        PeerError: Another agent holds the lock (for too long); names its process.
    """
    descriptor = _locked(folder, LOCK_TIMEOUT_S if is_patient else 0.0, make=is_patient)
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _locked(folder: Path, patience_s: float, *, make: bool) -> int:
    """A descriptor of the folder's lock, held until closed. A file removed by its last holder does
    not count: two processes would hold two."""
    while True:
        with open_below(folder.parent, folder.name, make=make) as job:
            descriptor = job.open_file(LOCK, os.O_RDWR | os.O_CREAT)
        try:
            _take_turn(descriptor, folder / LOCK, patience_s)
        except PeerError:
            os.close(descriptor)
            raise
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)


def _take_turn(descriptor: int, path: Path, patience_s: float) -> None:
    """Lock an open file, or name a process that holds it for too long."""
    began, has_said = time.monotonic(), False
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waited_s = time.monotonic() - began
        holder = os.pread(descriptor, 20, 0).decode(errors="replace") or "that has just begun"
        if waited_s >= patience_s:
            raise PeerError(
                f"process {holder} has been looking for this job's coordinator for "
                f"{waited_s:.0f} s (it holds {path}). Is it stopped? Let it go on, or end it."
            )
        if waited_s > LOCK_QUIET_S and not has_said:
            has_said = True
            log.warning("event=waiting for process %s, which holds %s", holder, path)
        time.sleep(0.05)


def is_here(host: str) -> bool:
    """Whether this machine can bind an address of ``host``."""
    try:
        for family, kind, *_, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with socket.socket(family, kind) as probe:
                try:
                    probe.bind(address)
                    return True
                except OSError:
                    continue
    except socket.gaierror as error:
        raise UsageError(
            f"--coordinator names host {host!r}, which is unknown: {error}."
        ) from error
    return False
