"""An agent as a member of its job: opening, joining, ending."""

import logging
import os
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from scalai.core.errors import PeerError, UsageError
from scalai.core.host import actions, events
from scalai.core.host.state import HostSettings, HostState
from scalai.core.host.succession import underway
from scalai.core.job.remembered import Underway
from scalai.core.messages.shared import JsonText
from scalai.launch.agent.caretaker import say_ahead
from scalai.launch.agent.data_plane import DataPlaneServer
from scalai.launch.agent.holdings import Holdings
from scalai.launch.agent.host_checks import DeviceMemory, HealthCheck
from scalai.launch.agent.link import CoordinatorLink
from scalai.launch.agent.loop import THREADS, Agent, Loop
from scalai.launch.agent.performer import Hands, Performer
from scalai.launch.agent.progress import ProgressWatch, Stacks
from scalai.launch.agent.replica_fetch import ReplicaRate, Replicas
from scalai.launch.agent.torch_elastic import WorkerSet
from scalai.launch.agent.worker_group import VISIBLE_DEVICES, WorkerCalls, WorkerGroups
from scalai.launch.command_runner import CommandRunner
from scalai.launch.config.constants import constant
from scalai.launch.config.job_spec import JobSpec
from scalai.launch.coordinator.calls import HostLists, Join, StoreIdentity
from scalai.launch.coordinator.discovery import Place
from scalai.launch.coordinator.next_coordinator import Succession
from scalai.launch.coordinator.registers import registers_of
from scalai.launch.slow_files import said
from scalai.runtime.control import MAX_WORKERS
from scalai.runtime.lanes import Lanes
from scalai.store.host import HostStore
from scalai.store.secure import Folder

REPLACE_SILENT_S = 60.0
"""Seconds of silence before a coordinator on this machine is replaced."""

log = logging.getLogger(__name__)


class Participant:
    """An agent as a member of its job, with its store, its servers and its link to the coordinator.

    Args:
        spec: The job, by this host's command line.
        served: Opened store, servers and link.
        progress: Watches for workers without steps.
    """

    def __init__(
        self, spec: JobSpec, agent: Agent, served: "OpenResources", progress: ProgressWatch
    ) -> None:
        self._spec, self._agent = spec, agent
        self._served, self._progress = served, progress

    # ------------------------------------------------------------------ the job

    def enter(self) -> None:
        """Join the job. Raises ``PeerError``: it is refused, or nobody answers."""
        self._served.holdings.attach()
        answer = self._served.link.join(self._brings())
        self._served.holdings.begin(answer)
        self._follow()

    def rejoin(self) -> None:
        """Join again beside the loop; with live workers or a filled store, without waiting for a
        disk."""

        def joined() -> None:
            self._agent.feed(events.Done(actions.Rejoin()))
            self._follow()

        def join(failed: Exception | None) -> None:
            if failed is None:
                self._served.link.rejoin(self._brings(), joined)
            else:
                text = f"event=not_rejoined host={self._agent.state.host}: {failed} The agent ends."
                self._agent.feed(events.Failed(actions.Rejoin(), text))

        if self._agent.state.round is None:
            self._served.holdings.attach_beside(join)
        else:
            join(None)

    def _follow(self) -> None:
        self._served.link.follow(self._agent, self._agent.obey, lambda: self._progress.stalled)

    def _brings(self) -> Callable[[str], Join]:
        served, state = self._served, self._agent.state
        found, spec, named = served.holdings.found(), JsonText.of(self._spec.to_json()), HostLists()
        parts, sealed = named.take(found.parts), named.take(found.sealed)
        return lambda incarnation: Join(
            job=self._spec.job,
            host=state.host,
            incarnation=incarnation,
            store=_identity(served.store.directory),
            slots=state.slots,
            address=served.data.address,
            parts=parts,
            sealed=sealed,
            hosts=named.lists,
            damaged=found.damaged,
            spec=spec,
            domain=self._spec.options.domain or "",
            has_check=self._spec.config.probe.health_check is not None,
            underway=self._underway(),
            last_round=state.last_round,
            term=served.link.term,
            remembered=state.remembered,
            examined=found.examined,
        )

    def _underway(self) -> Underway | None:
        state = self._agent.state
        if state.round is None:
            return None
        return underway(state, self._served.performer.seen(state.round))

    @property
    def started(self) -> "subprocess.Popen[bytes] | None":
        """The coordinator's process, if this agent started it."""
        return self._served.link.place.started

    def replaced(self) -> None:
        """A new coordinator has replaced a lost one; in the loop."""
        if self.started is not None:
            say_ahead(self._spec)
        self._agent.feed(events.CoordinatorReplaced())

    def expelled(self, error: PeerError) -> None:
        """The job goes on without this host; in the loop."""
        self._agent.feed(events.Expelled(str(error)))

    def lost(self, error: PeerError) -> None:
        """The coordinator is gone, or refuses this host; in the loop."""
        served = self._served
        self._agent.feed(
            events.JobLost(
                f"event=coordinator_lost {error} Workers stop; what was committed stays in "
                f"{served.store.directory} ({served.holdings.newest()}): start the job again. If "
                "it has ended meanwhile, this host has not heard how: look for event=exit in the "
                "log of the coordinator or of another host."
            )
        )

    def run(self) -> int:
        """Work until the coordinator ends it. Returns the exit code."""
        served = self._served
        with ExitStack() as closing:  # the last one first, whatever goes wrong in another
            closing.callback(served.holdings.close)
            closing.callback(served.workers.close)
            closing.callback(served.data.close)
            closing.callback(served.succession.close)
            closing.callback(served.link.close)
            closing.callback(served.performer.close)
            try:
                return self._agent.run()
            except Exception:  # our own slip: workers must not outlive the loop unseen
                log.exception(
                    "event=crashed host=%s: the agent itself has failed. Its workers end; the "
                    "state stays in %s.", self._agent.state.host, served.store.directory,
                )  # fmt: skip
                return 1

    # ------------------------------------------------------------------ any thread

    def leave(self) -> None:
        """A first SIGTERM or SIGINT: drain."""
        silence_s = self._served.link.silence_s
        if silence_s is not None:
            log.warning(
                "event=leaving host=%s: the coordinator has been silent for %.0f s, so nobody can "
                "stop the job at one step. After %.0f s (drain_timeout_s), or at a second signal, "
                "this host leaves all the same; its newest generation stays in %s.",
                self._agent.state.host, silence_s, self._spec.config.resize.drain_timeout_s,
                self._served.store.directory,
            )  # fmt: skip
        self._agent.leave()

    def noticed(self, source: str, left_s: float | None) -> None:
        """A source announces this host's removal in ``left_s`` seconds (None: unknown); repeated
        while it holds."""
        self._agent.noticed(source, left_s)

    def notice_withdrawn(self, source: str) -> None:
        """The source withdraws its notice."""
        self._agent.notice_withdrawn(source)

    def show_stacks(self) -> None:
        """Log where the workers are, within moments."""
        self._agent.show_stacks()

    def stop_now(self, code: int) -> None:
        """A second signal: end at once; the state stays for a restarted agent."""
        self._agent.stop_now(code)

    def set_slots(self, slots: int) -> None:
        """The device probe reports a new number."""
        self._agent.set_slots(slots)


@dataclass(frozen=True, slots=True)
class OpenResources:
    """Open resources of a member."""

    store: HostStore
    holdings: Holdings
    data: DataPlaneServer
    succession: Succession
    link: CoordinatorLink
    workers: WorkerCalls
    performer: Performer


def open_agent(
    spec: JobSpec,
    host: str,
    slots: int,
    place: Place,
    interface: str,
    make_workers: Callable[[], WorkerSet],
) -> Participant:
    """Open an agent's resources, and join the job.

    Args:
        spec: The job, by this host's command line.
        slots: Number of workers this host can run.
        interface: Address of this host for others.
        make_workers: Returns an empty set of workers.

    Raises:
        UsageError: There are too many slots.
        PeerError: The coordinator does not answer, or refuses this host.
        StoreError: The store cannot be opened.
    """
    _check_slots(slots)
    loop = Loop()
    with ExitStack() as opened:
        with said("what the store holds, and what it has attached of another disk"):
            store = HostStore(spec.job, host, spec.store_dir, spec.store_budget_bytes)
        opened.callback(store.close)
        directory = _agent_folder(store)
        data = DataPlaneServer(store, place.token, interface, ports=spec.ports)
        opened.callback(data.close)
        succession = Succession(spec, interface, lambda: agent.state.leave.is_asked)
        opened.callback(succession.close)
        link = _open_link(spec, host, place, succession, loop, lambda: member)
        opened.callback(link.close)
        lanes, stacks = Lanes(THREADS, loop.put), Stacks(directory)
        lanes.start()
        holdings = Holdings(spec, store, link.tell, lanes, loop.put)
        hands = Hands(
            spec=spec,
            host=host,
            token=place.token,
            store=store,
            holdings=holdings,
            groups=WorkerGroups(spec, directory, make_workers),
            stacks=stacks,
            lanes=lanes,
            tell=link.tell,
            feed=lambda event: agent.put(event),
            rejoin=lambda: member.rejoin(),
            is_over=lambda: agent.is_over(),
            health=_health_check(spec, host),
            memory=_device_memory(),
        )
        rate = ReplicaRate(host, constant("store.replica_slowdown"))
        performer = Performer(hands, Replicas(store, place.token, rate))
        state = _first_state(spec, host, slots, performer)
        agent = Agent(
            state, performer, loop, lambda: _watch(agent, progress, stacks, rate, data, lanes)
        )
        progress = ProgressWatch(host, agent, stacks, constant("resize.stall_s"))
        workers = WorkerCalls(directory, loop.put, agent.call, agent.worker_gone)
        opened.callback(workers.close)
        served = OpenResources(store, holdings, data, succession, link, workers, performer)
        member = Participant(spec, agent, served, progress)
        member.enter()
        opened.pop_all()  # from now on the member closes it
    return member


def _open_link(
    spec: JobSpec,
    host: str,
    place: Place,
    succession: Succession,
    loop: Loop,
    member: Callable[[], Participant],
) -> CoordinatorLink:
    """Return the link to the coordinator; ``member`` must exist before it joins."""
    link = CoordinatorLink(
        place, spec.job, host, _patience_s(spec, place), loop.put,
        lambda error: member().lost(error), lambda error: member().expelled(error),
        succeed=succession.find, replaced=lambda: member().replaced(),
    )  # fmt: skip
    succession.watch_while(lambda: link.silence_s is not None)
    return link


def _patience_s(spec: JobSpec, place: Place) -> float:
    """Return the seconds of silence before the coordinator counts as gone.

    Less for a process of this machine, to be ended and replaced, and with a register, to look up
    the successor.
    """
    most_s = spec.config.resize.coordinator_timeout_s
    is_found = place.is_here or registers_of(spec)[0] is not None
    return min(most_s, REPLACE_SILENT_S) if is_found else most_s


def _agent_folder(store: HostStore) -> Path:
    with Folder.open(store.directory / "agent", make=True) as folder:
        return folder.path


def _check_slots(slots: int) -> None:
    if slots > MAX_WORKERS:
        raise UsageError(f"{slots} workers on one host; at most {MAX_WORKERS} are supported.")


def _first_state(spec: JobSpec, host: str, slots: int, performer: Performer) -> HostState:
    settings = HostSettings(
        host,
        spec.is_elastic,
        spec.config.resize.drain_timeout_s,
        hang_s=spec.config.resize.hang_s,
        cores=len(os.sched_getaffinity(0)),
    )
    return HostState(settings, slots, time.monotonic(), performer.generations())


def _device_memory() -> DeviceMemory:
    visible = os.environ.get(VISIBLE_DEVICES)
    return DeviceMemory(visible.split(",") if visible else None)


def _health_check(spec: JobSpec, host: str) -> HealthCheck:
    probe, variables = spec.config.probe, {"SCALAI_HOST": host, "SCALAI_JOB": spec.job}
    commands = CommandRunner(constant("probe.health_timeout_s"))
    return HealthCheck(probe.health_check, variables, commands)


def _watch(
    agent: Agent, progress: ProgressWatch, stacks: Stacks, rate: ReplicaRate,
    data: DataPlaneServer, lanes: Lanes,
) -> None:  # fmt: skip
    progress.watch()
    if agent.round is not None:
        rate.space(agent.round.workers.snapshot_every)
    rate.look(progress.seen, is_giving=data.is_giving)
    stacks.watch()
    lanes.look()


def _identity(directory: Path) -> StoreIdentity:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    found = directory.stat()
    return StoreIdentity(boot, found.st_dev, found.st_ino)
