"""Kinds of faults to inject into a running job, their times, and their allowed cost.

A kind is one row of ``KINDS``: its target, the expected effect, the limit of lost steps, and the
job's words as a sign of its injection. ``launch/chaos/verdicts.py`` judges the observations.
"""

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from scalai.core.errors import UsageError


class Target(Enum):
    """Target of a fault; it sets the number of hosts struck at once."""

    WORKER = "a worker"
    AGENT = "an agent"
    HOST = "a host"
    HOSTS = "as many hosts as keep each other's state"
    MOST_HOSTS = "one host more than keep each other's state"
    COORDINATOR = "the coordinator"
    STORE = "a host's store"
    DISK = "the durable directory"
    LINK = "a host's link"


class Effect(Enum):
    """Expected reaction of the job to a fault."""

    ROUND = "it begins another round"
    NOTED = "it says so, and trains on"
    ENDS = "it ends, or goes on from a whole state; undone, the same commands go on where it ended"


class Loss(Enum):
    """Limit of repeated steps."""

    NONE = "none"
    SNAPSHOT = "those since the newest snapshot that outlives the fault: two intervals at most"
    SNAPSHOT_AND_STEP = (
        "those since the newest snapshot that outlives the fault: two intervals and a step at most"
    )
    """Workers whose agent hangs get no order for a snapshot, and wait in the update behind it,
    which others have made."""
    DISK = "those since the newest generation in the durable directory"


class Heard(Enum):
    """The job's way to learn of a fault."""

    PROCESS = "a process ends, or its connections"
    SILENCE = "an agent says nothing"
    HANG = "no worker makes a step"
    WORD = "somebody says so"


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of fault.

    ``sign``: pattern of the job's words in its log, status or reports; empty: the injection itself
    shows it. ``station``: its own place of a change; empty: any.
    """

    name: str
    about: str
    target: Target
    effect: Effect
    loss: Loss
    heard: Heard
    sign: str
    station: str = ""


W, A, H = Target.WORKER, Target.AGENT, Target.HOST
ROUND, NOTED = Effect.ROUND, Effect.NOTED
_ROWS = (
    Kind("kill-worker", "a worker is killed (SIGKILL), as the kernel does for memory",
         W, ROUND, Loss.SNAPSHOT, Heard.PROCESS, r"was killed by SIGKILL"),
    Kind("segv-worker", "a worker has a segmentation fault (SIGSEGV)",
         W, ROUND, Loss.SNAPSHOT, Heard.PROCESS, r"segmentation fault|killed by SIGSEGV"),
    Kind("abort-worker", "a worker aborts (SIGABRT)",
         W, ROUND, Loss.SNAPSHOT, Heard.PROCESS, r"killed by SIGABRT"),
    Kind("bus-worker", "a worker has a bus error (SIGBUS), as where shared memory is full",
         W, ROUND, Loss.SNAPSHOT, Heard.PROCESS, r"killed by SIGBUS"),
    Kind("exit-worker", "a worker exits with code 7",
         W, ROUND, Loss.SNAPSHOT, Heard.PROCESS, r"exited with 7\b", "step"),
    Kind("raise-worker", "the script raises RuntimeError on a rank, which still holds its state",
         W, ROUND, Loss.NONE, Heard.WORD, r"the script raised RuntimeError", "step"),
    Kind("memory-worker", "memory ends in a worker (MemoryError)",
         W, ROUND, Loss.NONE, Heard.WORD, r"out of host memory", "step"),
    Kind("tear-worker", "a worker is killed in the middle of an update",
         W, ROUND, Loss.SNAPSHOT, Heard.PROCESS, r"was killed by SIGKILL", "update"),
    Kind("kill-in-snapshot", "a worker is killed while it writes a snapshot",
         W, ROUND, Loss.SNAPSHOT, Heard.PROCESS, r"was killed by SIGKILL", "written"),
    Kind("kill-in-recovery", "a worker is killed, and another one while the job recovers",
         W, ROUND, Loss.SNAPSHOT, Heard.PROCESS, r"was killed by SIGKILL", "restore"),
    Kind("stop-worker", "a worker hangs (SIGSTOP)",
         W, ROUND, Loss.SNAPSHOT, Heard.HANG, r"hangs: no worker has made a step"),
    Kind("term-worker", "a worker gets SIGTERM, as of a scheduler that means its whole host",
         W, NOTED, Loss.NONE, Heard.WORD, ""),
    Kind("int-worker", "a worker gets SIGINT, as from a terminal",
         W, NOTED, Loss.NONE, Heard.WORD, ""),
    Kind("kill-agent", "an agent is killed; its host's memory stays",
         A, ROUND, Loss.SNAPSHOT, Heard.PROCESS, r"event=lost host="),
    Kind("kill-agents", "all agents are killed at once, the last one too; their memory stays",
         A, ROUND, Loss.SNAPSHOT, Heard.PROCESS, r"event=lost host="),
    Kind("kill-in-commit", "an agent is killed between a snapshot and its commit",
         A, ROUND, Loss.SNAPSHOT, Heard.PROCESS, r"event=lost host=", "sealed"),
    Kind("stop-agent", "an agent hangs (SIGSTOP), its workers train on",
         A, ROUND, Loss.SNAPSHOT_AND_STEP, Heard.SILENCE, r"event=lost host=\S+ silent for"),
    Kind("term-agent", "an agent is told to end (SIGTERM): its host drains",
         A, ROUND, Loss.NONE, Heard.WORD, r"event=signal SIGTERM"),
    Kind("int-agent", "an agent is interrupted (SIGINT): its host drains",
         A, ROUND, Loss.NONE, Heard.WORD, r"event=signal SIGINT"),
    Kind("hup-agent", "an agent's terminal closes (SIGHUP): its host drains",
         A, ROUND, Loss.NONE, Heard.WORD, r"event=signal SIGHUP"),
    Kind("usr1-agent", "a scheduler says that a host's time is over (SIGUSR1): it drains",
         A, ROUND, Loss.NONE, Heard.WORD, r"event=signal SIGUSR1"),
    Kind("notice", "a preemption notice comes by --preemption file:PATH",
         A, ROUND, Loss.NONE, Heard.WORD, r"event=notice host="),
    Kind("duplicate-host", "a second agent of a host starts",
         A, NOTED, Loss.NONE, Heard.WORD, ""),
    Kind("fail-health", "a worker dies, and its host's --health-check 'test -e PATH' fails",
         H, ROUND, Loss.SNAPSHOT, Heard.PROCESS, r"fails its health check"),
    Kind("kill-host", "a host dies with all of its processes and its memory",
         H, ROUND, Loss.SNAPSHOT, Heard.PROCESS, r"event=lost host="),
    Kind("stop-host", "a host stands still: all of its processes hang (SIGSTOP)",
         H, ROUND, Loss.SNAPSHOT, Heard.SILENCE, r"event=lost host=\S+ silent for"),
    Kind("kill-hosts", "as many hosts as there are replicas die at once with their memory",
         Target.HOSTS, ROUND, Loss.SNAPSHOT, Heard.PROCESS, r"event=lost host="),
    Kind("kill-more-hosts", "one host more than there are replicas die at once with their memory, "
         "and nobody else holds their state", Target.MOST_HOSTS, ROUND, Loss.DISK, Heard.PROCESS,
         # The newest snapshot is whole again where the disk has the parts of the dead.
         r"event=recovery .*from='a durable directory'|event=attached generation="),
    Kind("full-memory", "the store's file system is full, and a host drains",
         Target.STORE, Effect.ENDS, Loss.SNAPSHOT, Heard.WORD, r"No space left on device"),
    Kind("corrupt-store", "bytes of the newest generation change in a host's store, and it is read",
         Target.STORE, Effect.ENDS, Loss.SNAPSHOT, Heard.WORD, r"event=damage generation"),
    Kind("truncate-store", "files of the newest generation are cut in a host's store, and are read",
         Target.STORE, Effect.ENDS, Loss.SNAPSHOT, Heard.WORD,
         r"event=damage generation"),
    Kind("full-disk", "the disk of the durable directory is full",
         Target.DISK, NOTED, Loss.NONE, Heard.WORD, r"event=not_archived .*No space left"),
    Kind("refuse-disk", "the durable directory of the job cannot be written any more",
         Target.DISK, NOTED, Loss.NONE, Heard.WORD, r"event=not_archived .*cannot be written"),
    Kind("torn-lease", "the entry in the durable directory that says which run has it is torn",
         Target.DISK, NOTED, Loss.NONE, Heard.WORD, r"event=torn_lease"),
    Kind("second-run", "a second run of the job starts elsewhere, with the same durable directory",
         Target.DISK, NOTED, Loss.NONE, Heard.WORD, ""),
    Kind("damage-disk", "the newest generation on the disk is cut, and then more hosts die than "
         "there are replicas", Target.DISK, ROUND, Loss.DISK, Heard.PROCESS,
         r"event=recovery .*from='a durable directory'"),
    Kind("clock-forward", "a host comes back with a monotonic clock that is a day ahead",
         H, ROUND, Loss.SNAPSHOT, Heard.PROCESS, r"event=lost host="),
    Kind("clock-back", "a host comes back with a monotonic clock that has just begun",
         H, ROUND, Loss.SNAPSHOT, Heard.PROCESS, r"event=lost host="),
    Kind("drop-link", "a host's link swallows all that is sent",
         Target.LINK, ROUND, Loss.SNAPSHOT, Heard.SILENCE, r"event=lost host="),
    Kind("cut-pair", "two hosts lose what they send each other; the others hear both",
         Target.LINK, ROUND, Loss.SNAPSHOT, Heard.HANG, r"event=unheard "),
    Kind("reset-link", "all connections of a host are reset",
         Target.LINK, ROUND, Loss.SNAPSHOT, Heard.PROCESS, ""),
    Kind("slow-link", "a host's link gives 256 kbit/s",
         Target.LINK, NOTED, Loss.NONE, Heard.WORD, ""),
    Kind("stop-coordinator", "the coordinator stands still for a while (SIGSTOP)",
         Target.COORDINATOR, NOTED, Loss.NONE, Heard.WORD, r"event=coordinator_silent"),
    Kind("term-coordinator", "the coordinator gets SIGTERM",
         Target.COORDINATOR, NOTED, Loss.NONE, Heard.WORD, ""),
    Kind("int-coordinator", "the coordinator gets SIGINT",
         Target.COORDINATOR, NOTED, Loss.NONE, Heard.WORD, ""),
    Kind("kill-coordinator", "the coordinator is killed: another one takes its place",
         Target.COORDINATOR, NOTED, Loss.NONE, Heard.PROCESS, r"event=adopted round="),
)  # fmt: skip
KINDS = {kind.name: kind for kind in _ROWS}
TRIGGERS = {
    **dict.fromkeys(("freeze", "emergency", "relaunch", "plan", "move", "moved", "restore",
                     "proof"), "kill-worker"),
    **dict.fromkeys(("drain", "write", "leave", "build"), "term-agent"),
    **dict.fromkeys(("step", "update", "train", "written", "seal", "sealed", "commit",
                     "committed"), ""),
}  # fmt: skip
"""Stations at which a process may be struck, by what makes the job pass them; nothing: it does so
by itself."""
SIGNALS = {
    "kill-worker": "SIGKILL", "segv-worker": "SIGSEGV", "abort-worker": "SIGABRT",
    "bus-worker": "SIGBUS", "term-worker": "SIGTERM", "int-worker": "SIGINT",
    "stop-worker": "SIGSTOP", "kill-agent": "SIGKILL",
    "stop-agent": "SIGSTOP", "term-agent": "SIGTERM", "int-agent": "SIGINT",
    "hup-agent": "SIGHUP", "usr1-agent": "SIGUSR1", "exit-worker": "exit 7",
    "raise-worker": "raise RuntimeError",
    "memory-worker": "raise MemoryError", "tear-worker": "SIGKILL", "kill-in-snapshot": "SIGKILL",
    "kill-in-recovery": "SIGKILL", "kill-in-commit": "SIGKILL",
}  # fmt: skip
"""What befalls one process, by kind."""


@dataclass(frozen=True, slots=True)
class At:
    """Time of a fault.

    ``step``: once the job has made this step; ``after_s``: seconds after the schedule's begin;
    ``station``: a place of a change; none: the schedule's number of steps after the job is whole
    again.
    """

    step: int | None = None
    after_s: float | None = None
    station: str = ""

    def __str__(self) -> str:
        if self.step is not None:
            return f"step {self.step}"
        if self.after_s is not None:
            return f"{self.after_s:g} s"
        return f"station {self.station}" if self.station else "in turn"


@dataclass(frozen=True, slots=True)
class Wanted:
    """A requested kind with its time."""

    kind: Kind
    at: At


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of a schedule: its ``kind``, the struck ``hosts``, its worker's place on the host
    (from 0), its time ``at``, and the least number of steps since the job was whole again."""

    kind: Kind
    hosts: tuple[str, ...]
    worker: int
    at: At
    steps: int

    def __str__(self) -> str:
        where = "" if self.kind.target is Target.COORDINATOR else f" on {','.join(self.hosts)}"
        when = f"{self.steps} steps later" if self.at == At() else f"at {self.at}"
        return f"{self.kind.name}{where} {when}"


def parse(text: str) -> Wanted:
    """Read ``KIND``, ``KIND@step=N``, ``KIND@s=SECONDS`` or ``KIND@station=PLACE``.

    Raises:
        UsageError: There is no such kind or station, or the kind has one of its own.
    """
    name, _, when = text.strip().partition("@")
    kind = KINDS.get(name)
    if kind is None:
        raise UsageError(f"there is no fault {name!r}. Use some of: {', '.join(KINDS)}.")
    if not when:
        return Wanted(kind, At(station=kind.station))
    key, _, value = when.partition("=")
    if key == "step" and re.fullmatch(r"\d+", value):
        return Wanted(kind, At(int(value), station=kind.station))
    if key == "s" and re.fullmatch(r"\d+(\.\d+)?", value):
        return Wanted(kind, At(after_s=float(value), station=kind.station))
    if key == "station" and value in TRIGGERS and name in SIGNALS and not kind.station:
        return Wanted(kind, At(station=value))
    raise UsageError(
        f"{text!r}: a fault strikes @step=N, @s=SECONDS, or, where it is a signal to a worker or "
        f"an agent, @station=PLACE, of {', '.join(TRIGGERS)}."
    )


def struck(kind: Kind, replicas: int) -> int:
    """Return the number of hosts struck at once by a kind."""
    if kind.target is Target.HOSTS:
        return max(1, replicas)
    return replicas + 1 if kind.target is Target.MOST_HOSTS or kind.name == "damage-disk" else 1


def schedule(
    seed: int,
    wanted: Sequence[Wanted],
    hosts: Mapping[str, int],
    *,
    least_hosts: int,
    replicas: int,
    every: int,
    rounds: int = 1,
    others: int = 0,
) -> tuple[Fault, ...]:
    """Return the faults with their hosts, in order.

    Args:
        seed: Equal seeds give equal schedules.
        wanted: Kinds, each once in each of ``rounds``, in random order.
        hosts: Number of workers of each reachable host.
        least_hosts: Hosts left alone at each time.
        replicas: Other hosts with copies of a host's state. Only one kind, by its purpose, takes
            the memory of more hosts at once.
        every: Least steps between the recovery from a fault and the next one.
        others: Further hosts of the job, never struck.

    Raises:
        UsageError: Too few hosts for a kind and the job's need.
    """
    chance = random.Random(seed)
    found = []
    for number in range(rounds):
        order = sorted(wanted, key=lambda each: (each.kind.name, str(each.at)))
        chance.shuffle(order)
        order.sort(key=lambda each: each.kind.effect is Effect.ENDS)
        for each in order:
            count = struck(each.kind, replicas)
            is_short = count > len(hosts) or count + least_hosts > len(hosts) + others
            if is_short and _takes_hosts(each.kind):
                raise UsageError(
                    f"{each.kind.name} strikes {count} of {len(hosts)} hosts (replicas: "
                    f"{replicas}), and the job needs {least_hosts}. Start more hosts, or leave it "
                    "out."
                )
            names = sorted(chance.sample(sorted(hosts), min(count, len(hosts))))
            worker = chance.randrange(max(1, hosts[names[0]]))
            later = chance.randint(0, max(0, every // 4))
            at = each.at if number == 0 else At(station=each.at.station)
            found.append(Fault(each.kind, tuple(names), worker, at, every + later))
    return tuple(found)


def _takes_hosts(kind: Kind) -> bool:
    """Whether the job has to go on with fewer hosts."""
    return kind.effect is ROUND and kind.target not in (Target.WORKER, Target.STORE)


def most_steps_lost(
    kind: Kind, snapshot_every: int | None, since_generation: int, since_disk: int | None
) -> int | None:
    """Return the limit of lost steps; None: no limit is stated.

    Args:
        snapshot_every: Steps between two snapshots; None: none on the way.
        since_generation: Steps from the newest generation to the fault.
        since_disk: Steps from the newest generation on disk; None: none there.
    """
    if kind.loss is Loss.NONE:
        return 0
    # A snapshot is made while replicas of the one before are: at most, two intervals are lost.
    room = 2 * snapshot_every if snapshot_every else since_generation + 1
    if kind.loss is Loss.SNAPSHOT:
        return room
    if kind.loss is Loss.SNAPSHOT_AND_STEP:
        return room + bool(snapshot_every)
    return None if since_disk is None else since_disk + room
