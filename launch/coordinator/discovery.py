"""Finding a job's coordinator, or starting it beside the first agent."""

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
"""Variables of an agent for its own children; a coordinator is none."""
LOCK = "coordinator.lock"
LOCK_TIMEOUT_S = 2 * JOIN_TIMEOUT_S
"""Longer than the holder of the lock waits for the coordinator that it starts."""
LOCK_QUIET_S = 5.0
LOOK_S = 0.5
WAITING_S = 2.0
"""Wait for a coordinator after which the log says so."""

log = logging.getLogger(__name__)


Newest = tuple[LeaseEntry | None, LeaseEntry | None]
"""The newest entries of the two registers of a job (``registers_of``)."""


def job_directory(spec: JobSpec) -> Path:
    """Return this machine's folder of the job, made if it is not there. Raises ``StoreError`` where
    it is not this user's alone."""
    with open_below(spec.store_dir or default_store_dir(), spec.job, make=True) as folder:
        return folder.path


def clear_away(folder: Path, address: tuple[str, int], *, is_last: bool) -> None:
    """Remove the card of a coordinator that has ended, and no other's; the folder too, unless it
    holds a store, where nobody uses the job's name again (``is_last``).

    Nothing is removed while an agent looks for a coordinator there: it sees that nobody answers, or
    has started another one.
    """
    try:
        with suppress(PeerError, FileNotFoundError), one_at_a_time(folder, is_patient=False):
            remove_card(folder, of=address)
            if is_last and not (folder / CARD).exists():
                (folder / LOCK).unlink(missing_ok=True)
                with suppress(OSError):
                    folder.rmdir()
    except (ScalaiError, OSError) as error:  # the job has ended as it has ended
        log.warning("event=card_left in %s: %s Nobody answers there any more.", folder, error)


@dataclass(frozen=True, slots=True)
class Place:
    """Address of a job's coordinator, and the job's token; ``started``: the process, where this
    agent has just started it; ``is_here``: the coordinator is on this machine."""

    address: tuple[str, int]
    token: bytes = field(repr=False)
    started: "subprocess.Popen[bytes] | None" = None
    is_here: bool = False

    @property
    def is_new(self) -> bool:
        """Whether this agent has just started the coordinator."""
        return self.started is not None


def find_coordinator(spec: JobSpec, token: str | None = None) -> Place:
    """Return the place of the job's coordinator; start one beside this agent where there is none.

    Agents on one machine find it by a card in the job's folder. With ``--coordinator HOST:PORT``
    the first agent on that host starts it, unless one answers there already, or a register names
    another host; other hosts wait for it.

    Args:
        token: The job's secret, if a person gave one.

    Raises:
        UsageError: Several hosts, and no token; or a standalone job with the name of a job that
            runs here.
        RefusedError: Another run of the job lives, and has the durable directory.
        StoreError: The job's folder is not this user's alone.
        PeerError: Nobody answers there within the time.
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
    """Return the place of this machine's coordinator of the job."""
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
    """Return the place of a coordinator of this job that listens at the named address already:
    another container of this machine may share its address, and not its memory. Only a holder of
    that memory can start the next one."""
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
    """Return the place of the coordinator once it answers: at the address on another host, or at
    the register's address."""
    wait_s = JOIN_TIMEOUT_S + (CLAIM_S if register is not None else 0.0)
    deadline, key = time.monotonic() + wait_s, token.encode()
    while True:
        if register is not None:
            with suppress(PeerError):  # it says nothing: the named address may answer
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
    """Start a coordinator, or return the present one, or one that another agent starts meanwhile:
    of two at one moment one alone gets the lease."""
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
    """Whether another coordinator has claimed a term since."""
    for register, entry in zip(registers_of(spec), before, strict=True):
        now = None if register is None else register.newest()
        if now is not None and now.term > (entry.term if entry is not None else 0):
            return True
    return False


def await_turn(
    spec: JobSpec, endpoint: str | None, token: str | None
) -> tuple[Place | None, Newest]:
    """Wait until a coordinator may be started, or return a living one by a register; also return
    the newest entries by then.

    Raises:
        RefusedError: Another run of the job lives, and has the durable directory.
        UsageError: The job has a register for its hosts, and no token.
        PeerError: A register cannot be reached, or its holder lives and does not answer here within
            the time.
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
        durable = spec.durable_dir
        assert durable is not None
        return None, (entry, await_ownership(owned, durable))


def lease_holder(
    spec: JobSpec, register: Register, endpoint: str | None, token: str | None
) -> tuple[Place | None, LeaseEntry | None]:
    """Return the place of the holder of the job's lease (None: nobody holds it), and the newest
    entry. Raises as ``await_turn``."""
    deadline = time.monotonic() + JOIN_TIMEOUT_S
    durable = None if spec.options.coordinator_lease is not None else spec.durable_dir

    def is_meant(entry: LeaseEntry) -> bool:
        """Whether a person who names this coordinator means that run: a named register is."""
        return durable is None or endpoint in (entry.named, join_endpoint(*entry.address))

    def call(entry: LeaseEntry) -> Place | None:
        if token is None or not is_meant(entry):
            return None
        try:
            Channel(entry.address, token.encode()).close()
        except PeerError:
            return None
        return Place(entry.address, token.encode(), is_here=is_here(entry.host))

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
    """Start a coordinator that outlives this agent, and wait until it answers.

    Args:
        term: Number of the coordinator.
        is_successor: It takes the place of one that has died.
        succeeds: Machine of the coordinator before it, where agents of the job still live.
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
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it has ended: below it is asked why
        with process.stdin as order:
            orders = {"job": spec.to_json(), "token": token, "term": term}
            orders |= {"succeeds": succeeds, "is_successor": is_successor}
            order.write(json.dumps(orders).encode())
    deadline = time.monotonic() + JOIN_TIMEOUT_S
    while time.monotonic() < deadline:
        now = read_holder(folder)
        card = read_card(folder) if now is not None and now.term >= term else None
        if card is not None:
            return Place(*card, started=process, is_here=True)
        if process.poll() is not None:
            assert process.stdout is not None
            with process.stdout as said:
                why = said.read().decode().strip()
            kinds = {kind.exit_code: kind for kind in (UsageError, RefusedError)}
            ended = f"the coordinator ended at once, with exit code {process.poll()}."
            raise kinds.get(process.returncode, PeerError)(why or ended)
        time.sleep(0.02)
    process.kill()  # it may wait for a register that hangs, and must not begin later
    raise PeerError(
        f"the coordinator does not answer at {host}:{port} after {JOIN_TIMEOUT_S:.0f} s. Name "
        "another --coordinator HOST:PORT."
    )


def next_term(spec: JobSpec, folder: Path, newest: Newest) -> tuple[int, bool]:
    """Return the number of the job's next coordinator, and whether it takes the place of a dead
    one: a card or an entry was left."""
    before, (entry, _) = read_holder(folder), newest
    terms = [each.term for each in (before, *newest) if each is not None]
    has_died = before is not None if entry is None else not entry.is_over
    return 1 + max(terms, default=0), has_died and not spec.is_fresh


@contextmanager
def one_at_a_time(folder: Path, *, is_patient: bool = True) -> Iterator[None]:
    """Keep two agents of one machine from both starting a coordinator.

    Args:
        is_patient: Wait for one that is at it, and make the folder if it is not there.

    Raises:
        PeerError: Another one is at it (for longer than that may take); names its process.
    """
    descriptor = _locked(folder, LOCK_TIMEOUT_S if is_patient else 0.0, make=is_patient)
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _locked(folder: Path, patience_s: float, *, make: bool) -> int:
    """Return a descriptor of the folder's lock, held until it is closed. A file that its last
    holder has removed does not count: two processes would hold two."""
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
    """Lock an open file, or name the process that holds it for too long."""
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
    """Whether an address of ``host`` can be bound on this machine."""
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
