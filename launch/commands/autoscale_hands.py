"""Hands of ``scalai autoscale``: they give devices to a job, or take them, by what runs it; and the
requests that are under way."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from scalai.core.errors import AnswerError, PeerError, ScalaiError, UsageError
from scalai.launch.command_runner import CommandRunner, NoAnswerError, last_line
from scalai.launch.commands.autoscale_jobs import (
    JobFile,
    Jobs,
    JobWatch,
    Known,
    Problems,
    Seen,
)
from scalai.launch.commands.kubernetes_job import FLAG, scale_job
from scalai.launch.commands.kueue import Lane, Share, pods_by_lane, read_shares
from scalai.launch.coordinator.api_servers import KubernetesApi
from scalai.launch.coordinator.person_calls import Scale

COMMAND_S = 20.0
"""Longest command of Slurm, in seconds."""
REPEAT_S = 30.0
"""Seconds between two requests for one change, and behind a failed one."""
GIVE_UP_S = 600.0
"""Longest wait for a change, in seconds."""
REFUSED_S = 60.0
"""Rest of a refused size, in seconds."""
LONGEST_REST_S = 6 * 3600.0
"""Longest rest of a size that has not come again and again, in seconds."""

log = logging.getLogger("scalai.autoscale")


class Hand(Protocol):
    """Changes the devices of jobs; the job itself follows when its hosts come or go.

    Attributes:
        is_engine: It starts hosts by itself up to the number that it has: it is told each.
    """

    is_engine: bool

    def look(self, files: Sequence[JobFile]) -> None:
        """Read what the engine gives the jobs, for the questions below. It may take seconds.

        Raises:
            PeerError: The former answer counts.
        """

    def within(self, hosts: int) -> int:
        """Hosts that the jobs can have together, of so many."""

    def waits(self, file: JobFile) -> str:
        """Why the engine has not given a size yet; empty: it has."""

    def most(self, file: JobFile, seen: Seen) -> int:
        """Most devices that a job can have now."""

    def can_have(self, file: JobFile, seen: Seen, devices: int) -> bool:
        """Whether it can have this number."""

    def give(self, watch: JobWatch, devices: int, *, is_dry: bool) -> str:
        """Ask for this number of devices; returns the answer.

        Raises:
            PeerError: Nobody answers, or the answer is a refusal.
            ScalaiError: It is not possible.
        """


class _Unbound:
    """An engine that says nothing of what it gives."""

    def look(self, files: Sequence[JobFile]) -> None: ...

    def within(self, hosts: int) -> int:
        return hosts

    def waits(self, file: JobFile) -> str:
        return ""


class Slots(_Unbound):
    """Workers on hosts that have joined: ``scalai scale --nproc``."""

    is_engine = False

    def most(self, file: JobFile, seen: Seen) -> int:
        return min(file.devices[1], seen.slots) if seen.workers else file.devices[1]

    def can_have(self, file: JobFile, seen: Seen, devices: int) -> bool:
        return (
            devices in seen.sizes if seen.workers and seen.sizes is not None else not seen.workers
        )

    def give(self, watch: JobWatch, devices: int, *, is_dry: bool) -> str:
        scale = Scale(devices, None, None, dry_run=is_dry, job=watch.file.job)
        return str(watch.call(scale)["reason"])


class Hosts(_Unbound):
    """Whole hosts, of ``per_host`` devices each, that an engine starts and ends."""

    is_engine = True

    def __init__(self, per_host: int) -> None:
        self._per_host = per_host

    def most(self, file: JobFile, seen: Seen) -> int:
        return file.devices[1]

    def can_have(self, file: JobFile, seen: Seen, devices: int) -> bool:
        return devices % self._per_host == 0

    def _hosts(self, devices: int) -> int:
        return max(1, -(-devices // self._per_host))


class Kubernetes(Hosts):
    """Pods of an Indexed Job; in a queue of Kueue, no more than its quota holds."""

    def __init__(self, per_host: int) -> None:
        super().__init__(per_host)
        self._shares: Mapping[str, Share | None] = {}
        self._lanes: Mapping[Lane, int | None] = {}

    def look(self, files: Sequence[JobFile]) -> None:
        self._shares = read_shares(KubernetesApi.of_pod(FLAG), [file.engine for file in files])
        self._lanes = pods_by_lane(share for share in self._shares.values() if share is not None)

    def within(self, hosts: int) -> int:
        limits = [pods for pods in self._lanes.values() if pods is not None]
        is_bound = limits and len(limits) == len(self._lanes) and None not in self._shares.values()
        return min(hosts, sum(limits)) if is_bound else hosts

    def waits(self, file: JobFile) -> str:
        share = self._shares.get(file.engine)
        return "" if share is None else share.waits

    def most(self, file: JobFile, seen: Seen) -> int:
        share = self._shares.get(file.engine)
        pods = None if share is None else self._lanes[share.lane]
        if pods is None:
            return file.devices[1]
        return max(seen.devices, min(file.devices[1], pods * self._per_host))

    def give(self, watch: JobWatch, devices: int, *, is_dry: bool) -> str:
        name, pods = watch.file.engine, self._hosts(devices)
        if self._shares.get(name) is not None:
            self._check(name, pods)
        return scale_job(name, pods, is_dry=is_dry)

    def _check(self, name: str, pods: int) -> None:
        """Raises ``PeerError``: a growth is beyond the quota of this moment."""
        share = read_shares(KubernetesApi.of_pod(FLAG), [name]).get(name)
        if share is not None and share.more is not None:
            most = share.pods + share.more
            if pods > max(share.pods, most):
                raise PeerError(f"Kueue's quota holds {most} pods of Job {name}, not {pods}.")


class Slurm(Hosts):
    """Tasks of an array, as in ``examples/slurm/array.sh``: the throttle says how many run, and the
    last ones drain where there are more."""

    def __init__(self, per_host: int) -> None:
        super().__init__(per_host)
        self._commands = CommandRunner(COMMAND_S)

    def give(self, watch: JobWatch, devices: int, *, is_dry: bool) -> str:
        name, hosts = watch.file.engine, self._hosts(devices)
        array, tasks, waiting = self._tasks(name)
        if hosts > len(tasks) + waiting:
            raise UsageError(
                f"array {array} of {name} has {len(tasks)} tasks that run and {waiting} that wait, "
                f"of {hosts}. Submit one with more tasks; it goes on from there."
            )
        leaving = [f"{array}_{task}" for task in sorted(tasks)[hosts:]]
        text = f"array {array} of {name}: {len(tasks)} tasks run; throttle {hosts}"
        text += f"; {', '.join(leaving)} drain" if leaving else ""
        if not is_dry:
            self._run("scontrol", "update", f"JobId={array}", f"ArrayTaskThrottle={hosts}")
            for task in leaving:  # Slurm 22.05 may say that it could not, and has
                self._run("scancel", "--signal=USR1", task, may_fail=True)
        return text

    def _tasks(self, name: str) -> tuple[str, list[int], int]:
        """The array of this name whose turn it is, its running tasks, and the number of those that
        wait."""
        query = ("--me", "--noheader", "--array", f"--name={name}", "--states=PENDING,RUNNING")
        output = self._run("squeue", *query, "--format=%F %K %T")
        # A job that is no array has the task N/A.
        rows = [row for line in output.splitlines()
                if len(row := line.split()) == 3 and row[1].isdecimal()]  # fmt: skip
        running = [(row[0], int(row[1])) for row in rows if row[2] == "RUNNING"]
        arrays = {array for array, _ in running} or {row[0] for row in rows}
        if not arrays or (running and len(arrays) > 1):
            raise UsageError(
                f"{len(arrays)} arrays of the name {name!r} run or wait; expected one that runs "
                f"(squeue --name={name}). Give each job a name of its own."
            )
        array = min(arrays, key=int)
        waiting = sum(row[0] == array and row[2] == "PENDING" for row in rows)
        return array, [task for _, task in running], waiting

    def _run(self, *command: str, may_fail: bool = False) -> str:
        try:
            code, output = self._commands.run(command)
        except NoAnswerError as error:
            if may_fail:
                return ""
            raise PeerError(str(error)) from error
        if code and not may_fail:
            raise PeerError(f"{' '.join(command)} ends with {code}: {last_line(output)}")
        return output


def hand_of(engine: str, per_host: int) -> Hand:
    """The hand for an engine; empty: none."""
    kinds: dict[str, type[Kubernetes] | type[Slurm]] = {"kubernetes": Kubernetes, "slurm": Slurm}
    return kinds[engine](per_host) if engine else Slots()


@dataclass(frozen=True, slots=True)
class Sought:
    """A size that a job was asked to take, and the times of the first and the newest request, by
    the monotonic clock."""

    devices: int
    since: float
    at: float


Meter = Callable[[str, Mapping[str, str], float | None], object]
"""Takes a metric's name, its labels and its value; None: it is no more."""


class Requests:
    """Asks for the devices that were decided, until the jobs have them. Times are of the monotonic
    clock.

    Args:
        may_act: Whether this process owns the jobs.
    """

    def __init__(
        self,
        hand: Hand,
        jobs: Jobs,
        problems: Problems,
        may_act: Callable[[], bool],
        meter: Meter,
    ) -> None:
        self._hand, self._jobs, self._problems = hand, jobs, problems
        self._may_act, self._meter = may_act, meter
        self._sought: dict[str, Sought] = {}
        self._refused: dict[tuple[str, int], float] = {}
        """Ends of the rests of sizes."""
        self._rests: dict[tuple[str, int], float] = {}
        """Newest rests of sizes that have not come, in seconds."""
        self._failed: dict[str, float] = {}
        """Times of the newest requests that failed."""
        self._told: dict[str, int] = {}
        """Sizes that were asked for last."""

    def pending(self, name: str) -> Sought | None:
        return self._sought.get(name)

    def can_have(self, known: Known, devices: int) -> bool:
        """Whether a job can have a size, and has not just refused it."""
        is_refused = (known.file.name, devices) in self._refused
        return not is_refused and self._hand.can_have(known.file, known.seen, devices)

    def settle(self, jobs: Mapping[str, Known], now: float) -> list[tuple[str, int]]:
        """Forget requests that were carried out. Returns jobs and sizes that came to nothing."""
        lost = []
        for name, sought in list(self._sought.items()):
            known = jobs.get(name)
            if known is None or known.state == "ended":
                del self._sought[name]
            elif known.state == "silent":
                continue
            elif known.seen.devices == sought.devices and known.seen.is_training:
                del self._sought[name]
                self._rests.pop((name, sought.devices), None)
            elif now - sought.since > GIVE_UP_S:
                del self._sought[name]
                size = name, sought.devices
                rest_s = min(2 * self._rests.get(size, REFUSED_S / 2), LONGEST_REST_S)
                self._rests[size] = rest_s
                lost.append(size)
                self._refuse(*size, f"not within {GIVE_UP_S:.0f} s", now + rest_s)
        self._refused = {key: until for key, until in self._refused.items() if until > now}
        self._rests = {key: rest_s for key, rest_s in self._rests.items() if key[0] in jobs}
        self._failed = {name: at for name, at in self._failed.items() if name in jobs}
        self._told = {name: devices for name, devices in self._told.items() if name in jobs}
        return lost

    def _refuse(self, name: str, devices: int, why: str, until: float) -> None:
        self._refused[name, devices] = until
        self._meter("changes", {"job": name, "outcome": "refused"}, 1)
        log.warning("event=not_changed job=%s devices=%d %s", name, devices, why)

    def pursue(
        self, target: Mapping[str, int], jobs: Mapping[str, Known], most: int, now: float
    ) -> tuple[bool, list[tuple[str, int]]]:
        """Ask for what is missing, shrinking jobs first; growth waits until there is room.

        Args:
            target: Devices by job.
            most: All devices.

        Returns:
            Whether nothing is missing or under way; jobs and sizes that were refused.
        """
        taken = {name: self._taken(name, known.seen) for name, known in jobs.items()}
        is_done, refused = True, []
        for name, devices in sorted(target.items(), key=lambda of: of[1] - taken.get(of[0], 0)):
            known = jobs.get(name)
            if known is None or not devices or not self._is_to_ask(known, devices, now):
                continue
            is_done = False
            others = sum(count for other, count in taken.items() if other != name)
            if devices > known.seen.devices and others + devices > most:
                continue
            if now - self._failed.get(name, -math.inf) < REPEAT_S:
                continue
            try:
                if self._ask(name, devices, now):
                    taken[name] = max(known.seen.devices, devices)
            except ScalaiError as error:
                self._refuse(name, devices, str(error), now + REFUSED_S)
                refused.append((name, devices))
        return is_done and not self._sought, refused

    def _taken(self, name: str, seen: Seen) -> int:
        """Devices that a job has, or may take at any moment."""
        sought = self._sought.get(name)
        return max(seen.devices, 0 if sought is None else sought.devices)

    def _is_to_ask(self, known: Known, devices: int, now: float) -> bool:
        name, seen = known.file.name, known.seen
        if known.state != "runs" and not (self._hand.is_engine and known.state == "waits"):
            return False
        sought = self._sought.get(name)
        if sought is not None and sought.devices == devices:
            return now - sought.at > REPEAT_S and seen.is_training
        # Without an engine a job that was asked for nothing stays as it is.
        told = self._told.get(name, None if self._hand.is_engine else devices)
        return seen.devices != devices or told != devices

    def _ask(self, name: str, devices: int, now: float) -> bool:
        """Ask once; False: nobody can be asked now. Raises ``ScalaiError``: it is refused."""
        if not self._may_act():
            text = "the lease is not renewed: nothing is changed until it is."
            self._problems.note("lease", text)
            return False
        self._problems.note("lease")
        try:
            answer = self._hand.give(self._jobs[name], devices, is_dry=False)
        except ScalaiError as error:
            self._failed[name] = now
            if not isinstance(error, PeerError) or isinstance(error, AnswerError):
                raise
            self._problems.note(f"change of {name}", f"{error} It is tried again.")
            return False
        self._failed.pop(name, None)
        self._problems.note(f"change of {name}")
        before = self._sought.get(name)
        since = before.since if before is not None and before.devices == devices else now
        self._sought[name] = Sought(devices, since, now)
        self._told[name] = devices
        if since == now:
            self._meter("changes", {"job": name, "outcome": "asked"}, 1)
        log.info("event=scale job=%s devices=%d %s", name, devices, answer)
        return True
