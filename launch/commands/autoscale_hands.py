"""Hands of ``scalai autoscale``: they give devices to a job, or take them, by what runs it."""

from typing import Protocol

from scalai.core.errors import PeerError, UsageError
from scalai.launch.command_runner import CommandRunner, NoAnswerError, last_line
from scalai.launch.commands.autoscale_jobs import JobFile, JobWatch, Seen
from scalai.launch.commands.kubernetes_job import scale_job
from scalai.launch.coordinator.person_calls import Scale

COMMAND_S = 20.0
"""Longest command of Slurm, in seconds."""


class Hand(Protocol):
    """Changes the devices of jobs; the job itself follows when its hosts come or go.

    Attributes:
        is_engine: It starts hosts by itself up to the number that it has: it is told each.
    """

    is_engine: bool

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


class Slots:
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


class Hosts:
    """Whole hosts, of ``per_host`` devices each, that an engine starts and ends."""

    is_engine = True

    def __init__(self, per_host: int) -> None:
        self._per_host = per_host

    def most(self, file: JobFile, seen: Seen) -> int:
        return file.devices[1]

    def can_have(self, file: JobFile, seen: Seen, devices: int) -> bool:
        return devices % self._per_host == 0

    def _hosts(self, devices: int) -> int:
        return max(1, devices // self._per_host)


class Kubernetes(Hosts):
    """Pods of an Indexed Job. Kueue admits them within its quota: until then they wait."""

    def give(self, watch: JobWatch, devices: int, *, is_dry: bool) -> str:
        return scale_job(watch.file.engine, self._hosts(devices), is_dry=is_dry)


class Slurm(Hosts):
    """Tasks of an array, as in ``examples/slurm/array.sh``: the throttle says how many run, and the
    last ones drain where there are more."""

    def __init__(self, per_host: int) -> None:
        super().__init__(per_host)
        self._commands = CommandRunner(COMMAND_S)

    def give(self, watch: JobWatch, devices: int, *, is_dry: bool) -> str:
        name, hosts = watch.file.engine, self._hosts(devices)
        array, tasks = self._running(name)
        leaving = [f"{array}_{task}" for task in sorted(tasks)[hosts:]]
        text = f"array {array} of {name}: {len(tasks)} tasks run; throttle {hosts}"
        text += f"; {', '.join(leaving)} drain" if leaving else ""
        if not is_dry:
            self._run("scontrol", "update", f"JobId={array}", f"ArrayTaskThrottle={hosts}")
            for task in leaving:  # Slurm 22.05 may say that it could not, and has
                self._run("scancel", "--signal=USR1", task, may_fail=True)
        return text

    def _running(self, name: str) -> tuple[str, list[int]]:
        """The array of this name whose turn it is, and its running tasks."""
        query = ("--noheader", "--array", f"--name={name}", "--states=PENDING,RUNNING")
        output = self._run("squeue", *query, "--format=%F %K %T")
        rows = [row for line in output.splitlines() if len(row := line.split()) == 3]
        running = [(row[0], int(row[1])) for row in rows if row[2] == "RUNNING"]
        arrays = {array for array, _ in running} or {row[0] for row in rows}
        if not arrays or (running and len(arrays) > 1):
            raise UsageError(
                f"{len(arrays)} arrays of the name {name!r} run or wait; expected one that runs "
                f"(squeue --name={name}). Give each job a name of its own."
            )
        return min(arrays, key=int), [task for _, task in running]

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
