"""The coordinator as a process of its own: ``python -m scalai.launch.coordinator.process FOLDER
HOST:PORT < ORDER``, the job and its token as JSON."""

import errno
import json
import logging
import os
import sys
import threading
from contextlib import suppress
from pathlib import Path

from scalai.core.errors import ScalaiError, UsageError
from scalai.launch import host_signals
from scalai.launch.config.endpoint import (
    join_endpoint,
    read_card,
    split_endpoint,
    write_card,
    write_ending,
)
from scalai.launch.config.job_spec import JobSpec
from scalai.launch.coordinator.control_file import watch_orders
from scalai.launch.coordinator.discovery import (
    await_turn,
    clear_away,
    next_term,
    one_at_a_time,
)
from scalai.launch.coordinator.leases import CLAIM_S, Lease
from scalai.launch.coordinator.losses import Patience, PortProbe
from scalai.launch.coordinator.registers import (
    LEASES,
    LeaseEntry,
    NoLinksError,
    Register,
    registers_of,
)
from scalai.launch.coordinator.server import STOOD_DOWN, Coordinator
from scalai.launch.coordinator.watch import JobReaders
from scalai.launch.logs import configure, say
from scalai.launch.program import named
from scalai.launch.slow_files import drain

REPORTS_S = 5.0
"""Wait for the disk of the reports, in seconds."""
ALONE_S = 60.0
"""Wait for a first or another agent before the coordinator ends, in seconds."""
SWITCH_S = 0.1
"""Longest turn of a running thread, in seconds; waiting threads wake up this often to ask for
theirs. Python's 5 ms are too short for two threads per host: thousands would do nothing but ask."""

log = logging.getLogger("scalai.coordinator")


def expect_many_threads() -> None:
    """Prepare this process for connections of many hosts, a thread each."""
    sys.setswitchinterval(SWITCH_S)


def serve(
    spec: JobSpec, folder: Path, host: str, port: int, token: bytes, alone_s: float = ALONE_S
) -> int:
    """Run the coordinator of a job until it ends or nobody has been there for ``alone_s`` seconds.
    Returns the job's exit code.

    Raises:
        RefusedError, UsageError: The job cannot run, or has a coordinator here.
        PeerError: The address is taken, the lease is unreadable, or another process hangs in its
            search for this job's coordinator.
    """
    heard = _heard(spec)
    _check_reports(spec)
    holder, newest = await_turn(spec, join_endpoint(host, port), token.decode())
    if holder is not None:
        raise UsageError(
            f"the coordinator at {join_endpoint(*holder.address)} holds the lease of the job "
            f"{spec.job!r}. Agents find it; another one is started where it is gone."
        )
    # An agent of this machine may be starting one: two must not listen, nor leave two cards.
    with one_at_a_time(folder):
        card = read_card(folder)
        if card is not None:
            there = join_endpoint(*card[0])
            raise UsageError(
                f"the job {spec.job!r} has a coordinator on this machine already, at {there}. "
                "Agents here find it. A coordinator by hand is started before the first of them."
            )
        term, is_successor = next_term(spec, folder, newest)
        coordinator = open_coordinator(
            spec, folder, (host, port), token, term, alone_s, is_successor=is_successor
        )
        address = _leave_card(coordinator, folder, host, token)
    coordinator.heard = heard
    return _run(coordinator, spec, folder, address)


def _check_reports(spec: JobSpec) -> None:
    """Raise ``RefusedError`` where a job that begins has no place for its reports. A successor goes
    on without, and so does a job whose disk does not answer."""
    folder, faults = spec.report_dir, list[OSError]()
    if folder is None:
        return

    def look() -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            faults.append(error)

    looking = threading.Thread(target=look, name="reports", daemon=True)
    looking.start()
    looking.join(REPORTS_S)
    with named("--report-dir", folder):
        for fault in faults:
            raise fault


def _heard(spec: JobSpec) -> host_signals.HeardSignals:
    """Handle the host's signals from here on."""
    host_signals.name(spec.options.signals_to_handle)
    heard = host_signals.HeardSignals()
    heard.listen()
    return heard


def open_coordinator(
    spec: JobSpec,
    folder: Path,
    address: tuple[str, int],
    token: bytes,
    term: int,
    alone_s: float = ALONE_S,
    *,
    is_successor: bool = False,
    succeeds: str = "nobody",
) -> Coordinator:
    """Listen, and take the job's lease and durable directory, if it has them.

    Args:
        alone_s: Wait for agents, in seconds.
        succeeds: Machine of the predecessor, as in ``start_coordinator``. "here" skips the wait for
            the lease's register; any predecessor skips that for the durable directory.

    Raises:
        UsageError: Another coordinator has claimed this term.
        PeerError: The address is taken, or a register is unreachable.
    """
    patience, probe = Patience(lost_after_s=spec.config.resize.silent_s), PortProbe(token)
    watch = JobReaders(spec, address[0])  # before any event
    try:
        coordinator = Coordinator(
            spec, address, token, say, alone_s, patience, term=term, is_successor=is_successor,
            probe=probe,
        )  # fmt: skip
    except ScalaiError:
        watch.close()
        raise
    coordinator.watch = watch
    probe.start()
    entry = LeaseEntry(
        term, address[0], int(coordinator.address[1]), named=spec.options.coordinator or ""
    )
    register, owned = registers_of(spec)
    here = term - 1 if succeeds == "here" else None
    anywhere = None if succeeds == "nobody" else term - 1

    def hold(register: Register, waits_over: int | None) -> Lease | None:
        try:
            lease = Lease(register, entry, coordinator.run_name, waits_over=waits_over)
        except NoLinksError as error:
            if register is not owned:
                raise
            log.warning("event=no_owner %s Nothing there can tell a second run of the job.", error)
            return None
        lease.start()
        return lease

    try:
        if register is not None:
            coordinator.lease = hold(register, here)
        if owned is register:
            coordinator.owns = coordinator.lease
        elif owned is not None:
            coordinator.owns = hold(owned, anywhere)
    except ScalaiError:
        coordinator.close()
        watch.close()
        raise
    return coordinator


def _leave_card(coordinator: Coordinator, folder: Path, host: str, token: bytes) -> tuple[str, int]:
    """Write the card for agents. Returns its address."""
    assert not isinstance(coordinator.address, str)
    address = host, coordinator.address[1]
    write_card(folder, address, token, coordinator.term)
    return address


def _run(coordinator: Coordinator, spec: JobSpec, folder: Path, address: tuple[str, int]) -> int:
    expect_many_threads()
    log.info(
        "event=coordinator job=%s term=%d address=%s: it runs on this host. If its process "
        "dies, an agent of this host starts another one, and the workers train on meanwhile",
        spec.job, coordinator.term, join_endpoint(*address),
    )  # fmt: skip
    _say_lease(coordinator, spec)
    if spec.options.control_file is not None:
        watch_orders(
            Path(spec.options.control_file), coordinator.obey,
            lambda why: coordinator.note_refusal("the control file", "for an order", why),
        )  # fmt: skip
    try:
        code = coordinator.run()
        if code != STOOD_DOWN:
            if not spec.options.is_standalone:  # its folder goes with it
                with suppress(ScalaiError, OSError):
                    write_ending(folder, code, coordinator.ended_by, spec.report_dir)
        return code
    finally:
        clear_away(folder, address, is_last=spec.options.is_standalone)
        if coordinator.watch is not None:
            coordinator.watch.close()
        drain()


def _say_lease(coordinator: Coordinator, spec: JobSpec) -> None:
    """Log the cost of a loss of this machine."""
    if coordinator.lease is not None:
        log.info(
            "event=lease register='%s': where this machine is lost, another host that reaches this "
            "takes over after %.0f s", coordinator.lease.register, CLAIM_S,
        )  # fmt: skip
    elif spec.options.coordinator is not None and spec.max_hosts > 1:
        log.warning(
            "event=lease register=none: the loss of this machine ends the job, which keeps its "
            "state. With --durable-dir on a disk that all hosts reach, or %s, another host takes "
            "over", LEASES,
        )  # fmt: skip


def main() -> int:
    """Run as an agent's coordinator. The reason for a failed start goes to standard output, for the
    agent; the exit code gives its kind."""
    folder = Path(sys.argv[1])
    host, port = split_endpoint(sys.argv[2])
    order = json.loads(sys.stdin.read())
    options = order["job"]["options"]
    configure("coordinator", str(options["log_format"]), str(options["log_level"]))
    token = str(order["token"]).encode()
    try:
        spec = JobSpec.from_json(order["job"])
        heard = _heard(spec)
        if not order["is_successor"] and order["succeeds"] == "nobody":
            _check_reports(spec)
        coordinator = open_coordinator(
            spec, folder, (host, port), token, int(order["term"]),
            is_successor=bool(order["is_successor"]), succeeds=str(order["succeeds"]),
        )  # fmt: skip
    except ScalaiError as error:
        print(error, flush=True)
        return error.exit_code
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # the agent may end before the job does
    # The agent that started this process holds the lock until the card is there.
    address = _leave_card(coordinator, folder, host, token)
    coordinator.heard = heard
    return _run(coordinator, spec, folder, address)


if __name__ == "__main__":
    sys.exit(main())
