"""``scalai autoscale``: gives devices to running jobs, and takes them, as a policy says.

It is hands on what runs the jobs, and no scheduler: it starts nothing and ends nothing. All that it
knows is in the jobs' coordinators. Where it dies, nothing happens to a job, and the next one goes
on.
"""

import argparse
import json
import logging
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scalai.core.cluster.policies import POLICIES
from scalai.core.cluster.question import ClusterJob, Question
from scalai.core.cluster.steady import steady
from scalai.core.errors import AnswerError, PeerError, RefusedError, ScalaiError, UsageError
from scalai.core.exit_codes import FAILED
from scalai.core.jsonable import Json
from scalai.launch.commands.autoscale_hands import Hand, hand_of
from scalai.launch.commands.autoscale_jobs import LOOK_S, JobWatch, Seen, read_job, view
from scalai.launch.commands.status import seconds
from scalai.launch.config.endpoint import split_endpoint
from scalai.launch.coordinator.leases import CLAIM_S, Lease, await_holder
from scalai.launch.coordinator.registers import LeaseEntry, open_register
from scalai.launch.logs import configure
from scalai.launch.program import show

EVERY_S = 60.0
"""Seconds between two decisions without an event."""
GRACE_S = 90.0
"""Longest wait for the first answer of a job that was there before, in seconds: a takeover by
another host takes 60."""
SOON_S = 10.0
"""Seconds until a missing first answer is worth a line."""
REPEAT_S = 30.0
"""Seconds between two requests for one change."""
GIVE_UP_S = 600.0
"""Longest wait for a change, in seconds."""
REFUSED_S = 60.0
"""Rest of a refused size, in seconds."""
NEED_LENGTH = ("optimus", "shortest")
"""Policies that need ``steps`` of each job."""
OWNER = "autoscale"
"""Name of the lease."""

log = logging.getLogger("scalai.autoscale")


@dataclass(frozen=True, slots=True)
class Devices:
    """Devices on equal hosts."""

    hosts: int
    per_host: int

    @property
    def count(self) -> int:
        return self.hosts * self.per_host

    def without(self, count: int) -> "Devices":
        """What is left beside jobs with so many."""
        if self.hosts == 1:
            return Devices(1, max(0, self.per_host - count))
        return Devices(max(0, self.hosts - -(-count // self.per_host)), self.per_host)


def read_devices(text: str) -> Devices:
    """Read ``N``, ``HOSTSxN``, or a file with such a text. Raises ``UsageError``."""
    found = re.fullmatch(r"(?:(\d{1,6})x)?(\d{1,6})", text.strip())
    if found is None:
        try:
            content = Path(text).read_text()[:64]
        except (OSError, ValueError) as error:
            raise UsageError(
                f"--devices {text}: expected N, HOSTSxN, or a file with one of them ({error})."
            ) from error
        found = re.fullmatch(r"(?:(\d{1,6})x)?(\d{1,6})", content.strip())
        if found is None:
            raise UsageError(f"{text} holds {content!r}; expected N or HOSTSxN.")
    return Devices(int(found[1] or 1), int(found[2]))


@dataclass(frozen=True, slots=True)
class Sought:
    """A size that a job was asked to take, and the times of the first and the newest request."""

    devices: int
    since: float
    at: float


class Autoscaler:
    """Looks at jobs, decides and acts. One thread calls it.

    Args:
        folder: The jobs' files.
        devices: As ``--devices``; a file is read at each look.
        policy: Name of a policy.
        hand: Changes the jobs.
        tell: Takes each decision: as a line, and as JSON.
        may_act: Whether this process owns the jobs.
    """

    def __init__(
        self,
        folder: Path,
        devices: str,
        policy: str,
        hand: Callable[[int], Hand],
        tell: Callable[[str, Json], object],
        *,
        every_s: float = EVERY_S,
        is_dry: bool = False,
        may_act: Callable[[], bool] = lambda: True,
    ) -> None:
        self._folder, self._devices_text = folder, devices
        self._devices = read_devices(devices)
        self._hand = hand(self._devices.per_host)
        self._name, self._policy = policy, steady(POLICIES[policy])
        self._every_s, self._is_dry = every_s, is_dry
        self._tell, self._may_act = tell, may_act
        self._memory: Mapping[str, float] = {}
        self._watches: dict[str, JobWatch] = {}
        self._began = time.time()
        self._new: set[str] = set()
        """Jobs whose file came while this process ran."""
        self._has_looked = False
        self._said: dict[str, str] = {}
        """Problems that have been said, by what they are of."""
        self._refused: dict[tuple[str, int], float] = {}
        self._sought: dict[str, Sought] = {}
        self._target: dict[str, int] = {}
        self._told: dict[str, int] = {}
        """Sizes that an engine has been told."""
        self._known: Mapping[str, object] = {}
        self._had: Mapping[str, int] = {}
        """Devices of the jobs at the newest decision."""
        self._decided: float | None = None
        self._again = ""
        """Why the next decision comes before its time."""
        self.meters: Callable[[str, Mapping[str, str], float], object] = lambda *about: None

    # ------------------------------------------------------------------ looking

    def look(self) -> None:
        """Read the files, and what the watches have heard."""
        try:
            devices = read_devices(self._devices_text)
            if self._hand.is_engine and devices.per_host != self._devices.per_host:
                raise UsageError(f"hosts of {devices.per_host} devices need a new start.")
            self._problem("devices", "")
            self._devices = devices
        except UsageError as error:
            self._problem("devices", f"{error} The former number counts: {self._devices.count}.")
        try:
            paths = {path.stem: path for path in sorted(self._folder.glob("*.toml"))}
            self._problem("jobs", "")
        except OSError as error:
            self._problem("jobs", f"{self._folder} cannot be read: {error}")
            return
        for name in self._watches.keys() - paths.keys():
            self._watches.pop(name).close()
            self._sought.pop(name, None)
        for name, path in paths.items():
            self._take(name, path)
        self._has_looked = True

    def _take(self, name: str, path: Path) -> None:
        """Watch a job by its file; one that cannot be read keeps its former content."""
        watch = self._watches.get(name)
        try:
            if watch is not None and path.stat().st_mtime == watch.file.at:
                return
            file = read_job(path)
            if self._name in NEED_LENGTH and file.steps is None:
                raise UsageError(f"{path}: the policy {self._name} needs its length: steps = N.")
            self._problem(f"file {name}", "")
        except (UsageError, OSError) as error:
            self._problem(f"file {name}", f"{error} What was read before counts.")
            return
        if watch is not None:
            watch.close()
        elif self._has_looked:
            self._new.add(name)
        per_host = self._devices.per_host if self._devices.hosts > 1 else file.devices[1]
        self._watches[name] = JobWatch(file, per_host, asks_sizes=not self._hand.is_engine)

    def _problem(self, what: str, text: str) -> None:
        """Say a problem once, and its end."""
        before = self._said.get(what, "")
        if text and not before:
            log.warning("event=problem what=%r %s", what, text)
        elif before and not text:
            log.info("event=problem_over what=%r", what)
        self._said[what] = text

    @property
    def waits_for(self) -> list[str]:
        """Jobs without a first answer that may hold devices."""
        if time.time() - self._began > GRACE_S:
            return []
        seen = {name: watch.seen for name, watch in self._watches.items()}
        return [
            name
            for name, each in seen.items()
            if each.status is None and not each.ending and not (name in self._new and each.tries)
        ]

    def _states(self) -> Iterator[tuple[str, str, Seen]]:
        for name, watch in self._watches.items():
            seen = watch.seen
            if seen.ending and not seen.is_resumable:
                state = "ended"
            elif seen.status is None or seen.ending:
                state = "waits"
            else:
                state = "silent" if seen.problem else "runs" if seen.workers else "waits"
            self._say_silence(name, state, seen)
            yield name, state, seen

    def _say_silence(self, name: str, state: str, seen: Seen) -> None:
        if state != "silent":
            self._problem(f"job {name}", "")
            return
        since = time.strftime("%H:%M:%S", time.localtime(seen.since))
        self._problem(
            f"job {name}",
            f"it has not answered since {since} and keeps its {seen.devices} devices: "
            f"{seen.problem} Remove its file if it has ended.",
        )

    # ------------------------------------------------------------------ deciding

    def turn(self) -> bool:
        """Look, decide after an event or when it is time, and act. Returns whether every job has
        what the newest decision gives it."""
        self.look()
        states = list(self._states())
        if names := self.waits_for:
            if time.time() - self._began > SOON_S:
                text = f"{', '.join(names)} may have devices: none is given."
                self._problem("first answers", text)
            return False
        self._problem("first answers", "")
        now = time.time()
        self._settle(states, now)
        known = self._facts(states)
        why = _news(self._known, known) + [self._again] * bool(self._again)
        is_due = self._decided is None or now - self._decided >= self._every_s
        if why or is_due:
            self._decide(states, now, why)
            self._known, self._decided, self._again = self._facts(states), now, ""
        return self._act(states, now)

    def _facts(self, states: list[tuple[str, str, Seen]]) -> dict[str, object]:
        """What makes an event where it changes."""
        facts: dict[str, object] = {"devices": self._devices.count}
        for name, state, seen in states:
            target = self._target.get(name)
            facts[f"job {name}"] = state
            # A size on the way to the one that was decided is no event.
            is_on_way = target is not None and seen.devices in (target, self._had.get(name))
            size = target if is_on_way else seen.devices
            facts[f"size {name}"] = size if state == "runs" else None
            facts[f"file {name}"] = self._watches[name].file.at
            facts[f"slots {name}"] = seen.sizes
        return facts

    def _settle(self, states: list[tuple[str, str, Seen]], now: float) -> None:
        """Forget requests that were carried out, or came to nothing."""
        for name, state, seen in states:
            sought = self._sought.get(name)
            if sought is None or (state == "silent"):
                continue
            if state == "ended" or (seen.devices == sought.devices and seen.is_training):
                del self._sought[name]
            elif now - sought.since > GIVE_UP_S:
                del self._sought[name]
                self._refuse(name, sought.devices, f"not within {GIVE_UP_S:.0f} s")
        self._refused = {key: until for key, until in self._refused.items() if until > now}

    def _refuse(self, name: str, devices: int, why: str) -> None:
        self._refused[name, devices] = time.time() + REFUSED_S
        self._target.pop(name, None)
        self._again = f"{name} does not take {devices} devices now"
        self.meters("changes", {"job": name, "outcome": "refused"}, 1)
        log.warning("event=not_changed job=%s devices=%d %s", name, devices, why)

    def _question(self, states: list[tuple[str, str, Seen]], now: float) -> Question:
        left = self._devices.without(sum(seen.devices for _, s, seen in states if s == "silent"))
        jobs = []
        for name, state, seen in states:
            if state in ("runs", "waits"):
                file, sought = self._watches[name].file, self._sought.get(name)
                jobs.append(
                    view(
                        file, seen, now, self._devices.per_host,
                        most=self._hand.most(file, seen),
                        is_valid=lambda size, of=name: self._can_have(of, size),  # type: ignore[misc]
                        pending=None if sought is None else (sought.devices, sought.since),
                    )
                )  # fmt: skip
        jobs.sort(key=lambda job: (job.submitted_s, job.name))
        return Question(now, tuple(jobs), left.hosts, left.per_host)

    def _can_have(self, name: str, devices: int) -> bool:
        watch = self._watches[name]
        is_possible = self._hand.can_have(watch.file, watch.seen, devices)
        return is_possible and (name, devices) not in self._refused

    def _decide(self, states: list[tuple[str, str, Seen]], now: float, why: list[str]) -> None:
        question = self._question(states, now)
        answer = self._policy(question, self._memory)
        self._memory = answer.memory
        target = {job.name: answer.devices.get(job.name, 0) for job in question.jobs}
        # A request under way is known as the present size.
        before = {name: seen.devices for name, _, seen in states}
        is_new = target != self._target
        self._target, self._had = target, before
        self.meters("decisions", {}, 1)
        if why or is_new:
            lines = [_explained(job, before[job.name], target) for job in question.jobs]
            over = sum(target.values()) - question.devices
            short = f"; {over} devices too few" if over > 0 else ""
            text = f"{'; '.join(why) or 'a minute has gone'}: {', '.join(lines) or 'no job'}{short}"
            self._tell(
                ("dry run: " * self._is_dry) + text,
                {
                    "at": now, "policy": self._name, "dry_run": self._is_dry, "why": why,
                    "devices": self._devices.count,
                    "jobs": {
                        job.name: {
                            "before": before[job.name], "after": target[job.name],
                            "speed": _speed(job, target[job.name]),
                            "pause_s": round(job.pause_s, 3),
                        }
                        for job in question.jobs
                    },
                    "silent": [name for name, state, _ in states if state == "silent"],
                },
            )  # fmt: skip

    # ------------------------------------------------------------------ acting

    def _act(self, states: list[tuple[str, str, Seen]], now: float) -> bool:
        """Ask for what is missing, shrinking jobs first; growth waits until there is room."""
        seen_of = {name: (state, seen) for name, state, seen in states}
        taken = {name: self._taken(name, seen) for name, (_, seen) in seen_of.items()}
        self._measure(seen_of)
        if self._is_dry:
            return True
        is_done = True
        for name, target in sorted(
            self._target.items(), key=lambda each: each[1] - taken.get(each[0], 0)
        ):
            state, seen = seen_of.get(name, ("ended", Seen()))
            is_wanted = state == "runs" or (self._hand.is_engine and state == "waits")
            if not is_wanted or not target or not self._is_to_ask(name, seen, target):
                continue
            is_done = False
            others = sum(count for other, count in taken.items() if other != name)
            if target > seen.devices and others + target > self._devices.count:
                continue
            if self._ask(name, target, now):
                taken[name] = max(seen.devices, target)
        return is_done and not self._sought

    def _taken(self, name: str, seen: Seen) -> int:
        """Devices that a job has, or may take at any moment."""
        sought = self._sought.get(name)
        return max(seen.devices, 0 if sought is None else sought.devices)

    def _is_to_ask(self, name: str, seen: Seen, target: int) -> bool:
        sought = self._sought.get(name)
        if sought is not None and sought.devices == target:
            return time.time() - sought.at > REPEAT_S and seen.is_training
        is_known = not self._hand.is_engine or self._told.get(name) == target
        return seen.devices != target or not is_known

    def _ask(self, name: str, target: int, now: float) -> bool:
        if not self._may_act():
            self._problem("lease", "the lease is not renewed: nothing is changed until it is.")
            return False
        self._problem("lease", "")
        try:
            answer = self._hand.give(self._watches[name], target, is_dry=False)
        except ScalaiError as error:
            if isinstance(error, PeerError) and not isinstance(error, AnswerError):
                self._problem(f"change of {name}", f"{error} It is tried again.")
            else:
                self._refuse(name, target, str(error))
            return False
        self._problem(f"change of {name}", "")
        before = self._sought.get(name)
        since = before.since if before is not None and before.devices == target else now
        self._sought[name] = Sought(target, since, now)
        self._told[name] = target
        if since == now:
            self.meters("changes", {"job": name, "outcome": "asked"}, 1)
        log.info("event=scale job=%s devices=%d %s", name, target, answer)
        return True

    def _measure(self, seen_of: Mapping[str, tuple[str, Seen]]) -> None:
        held = {name: seen.devices for name, (_, seen) in seen_of.items()}
        self.meters("devices", {"state": "all"}, self._devices.count)
        self.meters("devices", {"state": "held"}, sum(held.values()))
        for name, (state, _) in seen_of.items():
            self.meters("job_devices", {"job": name}, held[name])
            self.meters("job_silent", {"job": name}, state == "silent")

    def close(self) -> None:
        for watch in self._watches.values():
            watch.close()


def _news(before: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """Events since the last decision, in words."""
    found = []
    for key in [*now, *(key for key in before if key not in now)]:
        old, new = before.get(key), now.get(key)
        kind, _, name = key.partition(" ")
        if old == new or (kind in ("file", "slots") and key not in before):
            continue
        if kind == "devices" and before:
            found.append(f"devices {old} -> {new}")
        elif kind == "job":
            found.append(f"{name} {new or 'is gone'}")
        elif kind == "size" and isinstance(old, int) and isinstance(new, int):
            found.append(f"{name} has {new} devices, {old} before")
        elif kind == "file" and new is not None:
            found.append(f"the file of {name} has changed")
        elif kind == "slots" and isinstance(new, frozenset):
            found.append(f"{name} can have {', '.join(map(str, sorted(new)))} devices")
    return found


def _speed(job: ClusterJob, devices: int) -> float | None:
    """Speed at a size, relative to the present one; None: there is none."""
    rates = job.rates
    now = float(rates[job.devices]) if job.devices < len(rates) else 0.0
    return round(float(rates[devices]) / now, 3) if now and devices < len(rates) else None


def _explained(job: ClusterJob, before: int, target: Mapping[str, int]) -> str:
    after = target[job.name]
    if not before:
        return f"{job.name} waits" if not after else f"{job.name} may have {after}"
    if after == before:
        return f"{job.name} {before}"
    speed = _speed(job, after)
    said = f"{speed:.2f} of its speed, " if speed is not None else ""
    return f"{job.name} {before} -> {after} ({said}pauses {job.pause_s:.1f} s)"


# ---------------------------------------------------------------------- the command


def add_parser(commands: Any) -> None:
    """Add the command."""
    about = (
        "Give devices to running jobs, and take them, as a policy says; it starts and ends none. "
        "Decides at each event and each minute, and says each decision in a line."
    )
    parser = commands.add_parser(
        "autoscale", help="give devices to many running jobs by a policy", description=about
    )
    add = parser.add_argument
    add("--jobs", type=Path, required=True, metavar="DIR", help="folder with a file a job, .toml")
    add(
        "--devices", required=True, metavar="N|HxN|FILE",
        help="devices: N on one host, N on each of H hosts, or a file that says so, read again and "
        "again",
    )  # fmt: skip
    add(
        "--policy", choices=tuple(POLICIES), default="goodput",
        help="who gets how many (default: goodput)",
    )  # fmt: skip
    engine = parser.add_mutually_exclusive_group()
    engine.add_argument(
        "--kubernetes", action="store_const", const="kubernetes", dest="engine",
        help="give whole hosts: set the pods of each Indexed Job",
    )  # fmt: skip
    engine.add_argument(
        "--slurm", action="store_const", const="slurm", dest="engine",
        help="give whole hosts: set the throttle of each array, and drain tasks",
    )  # fmt: skip
    add("--every", type=seconds, default=EVERY_S, metavar="S",
        help=f"seconds between decisions without an event ({EVERY_S:g})")  # fmt: skip
    add(
        "--lease", metavar="PLACE",
        help="where one autoscaler owns the jobs, as --coordinator-lease (default: the folder)",
    )  # fmt: skip
    add("--metrics-port", metavar="[HOST:]PORT", help="Prometheus metrics (host: 127.0.0.1)")
    add("--metrics-file", type=Path, metavar="FILE.prom", help="the same as a file")
    add("--once", action="store_true", help="one decision, and return when it is carried out")
    add("--dry-run", action="store_true", help="decide, and change nothing")
    add("--json", action="store_true", help="one JSON object a decision")
    parser.set_defaults(run=_run, engine="")


def _run(args: argparse.Namespace) -> int:
    configure("autoscale")
    if not args.jobs.is_dir():
        raise UsageError(f"--jobs {args.jobs}: there is no such folder.")

    def tell(line: str, found: Json) -> None:
        if args.json:
            print(json.dumps(found), flush=True)
        else:
            show(f"{time.strftime('%H:%M:%S')} {line}")

    end = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: end.set())
    owner = None if args.dry_run else _own(args.lease or f"file:{args.jobs.resolve()}")
    scaler = Autoscaler(
        args.jobs, args.devices, args.policy,
        lambda per_host: hand_of(args.engine, per_host), tell,
        every_s=args.every, is_dry=args.dry_run,
        may_act=lambda: owner is None or owner.is_fresh(),
    )  # fmt: skip
    metrics = None
    try:
        if args.metrics_port or args.metrics_file:
            metrics = _Metrics(args.metrics_port, args.metrics_file)
            scaler.meters = metrics.note
        return _loop(scaler, owner, end, is_once=args.once)
    finally:
        scaler.close()
        if metrics is not None:
            metrics.close()
        if owner is not None:
            owner.end(is_over=True)


def _loop(scaler: Autoscaler, owner: Lease | None, end: threading.Event, *, is_once: bool) -> int:
    began = time.time()
    while not end.is_set():
        if owner is not None and owner.is_superseded:
            raise RefusedError(f"another autoscaler owns these jobs now: {owner.problem}")
        is_done = scaler.turn()
        if is_once and is_done:
            return 0
        if is_once and time.time() - began > GIVE_UP_S + GRACE_S:
            log.error("event=exit not carried out within %.0f s", time.time() - began)
            return FAILED
        end.wait(LOOK_S)
    return 0


def _own(place: str) -> Lease:
    """Take the ownership of the jobs, from a dead owner at once on this machine, else after
    ``CLAIM_S``. Raises ``RefusedError``: another autoscaler lives."""
    register = open_register(place, OWNER)

    def refuse(entry: LeaseEntry, unchanged_s: float) -> None:
        raise RefusedError(
            f"another autoscaler on machine {entry.machine} owns these jobs ({place}; it has shown "
            f"that it lives {unchanged_s:.0f} s ago). Stop that one, or try --dry-run."
        )

    _, newest = await_holder(register, lambda entry: None, refuse)
    term = 1 if newest is None else newest.term + 1
    lease = Lease(register, LeaseEntry(term, socket.gethostname(), 1), lambda: OWNER)
    lease.start()
    log.info("event=owner place=%s term=%d; a silent one is waited for up to %.0f s", place, term,
             CLAIM_S)  # fmt: skip
    return lease


class _Metrics:
    """Metrics of docs/cluster.md. Raises ``RefusedError`` without prometheus_client."""

    def __init__(self, port: str | None, file: Path | None) -> None:
        try:
            from prometheus_client import (
                CollectorRegistry,
                Counter,
                Gauge,
                disable_created_metrics,
            )
            from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
        except ModuleNotFoundError as error:
            raise RefusedError(
                f"prometheus_client is not installed ({error}): pip install 'scalai[metrics]'."
            ) from error
        from scalai.launch.coordinator.feeds import MetricsFile, MetricsServer

        disable_created_metrics()  # type: ignore[no-untyped-call]  # it has no types
        registry = CollectorRegistry()
        kinds = {
            "devices": (Gauge, "Devices: all, and those with a worker.", ["state"]),
            "job_devices": (Gauge, "Devices of a job.", ["job"]),
            "job_silent": (Gauge, "Whether a job does not answer.", ["job"]),
            "decisions": (Counter, "Decisions.", []),
            "changes": (Counter, "Changes of a job's devices.", ["job", "outcome"]),
        }
        self._metrics: dict[str, Any] = {
            name: kind(f"scalai_autoscale_{name}", about, labels, registry=registry)
            for name, (kind, about, labels) in kinds.items()
        }
        self._lock = threading.Lock()
        self._open: list[Any] = []

        def text() -> bytes:
            with self._lock:
                return generate_latest(registry)

        if file is not None:
            self._open.append(MetricsFile(file, text))
        if port is not None:
            address = split_endpoint(port if ":" in port else f"127.0.0.1:{port}")
            self._open.append(MetricsServer(address, text, CONTENT_TYPE_LATEST))

    def note(self, name: str, labels: Mapping[str, str], value: float) -> None:
        with self._lock:
            metric = self._metrics[name]
            metric = metric.labels(**labels) if labels else metric
            if name in ("decisions", "changes"):
                metric.inc(value)
            else:
                metric.set(value)

    def close(self) -> None:
        for each in self._open:
            each.close(1.0)
