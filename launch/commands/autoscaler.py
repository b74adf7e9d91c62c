"""The turn of ``scalai autoscale``: look at the jobs, decide, and have the hands ask for it."""

import logging
import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from scalai.core.cluster.policies import POLICIES
from scalai.core.cluster.question import ClusterJob, Question
from scalai.core.cluster.steady import steady
from scalai.core.errors import ScalaiError, UsageError
from scalai.core.jsonable import Json
from scalai.launch.commands.autoscale_hands import Hand, Meter, Requests
from scalai.launch.commands.autoscale_jobs import JobFile, Jobs, Known, Problems
from scalai.launch.commands.autoscale_view import view

EVERY_S = 60.0
"""Seconds between two decisions without an event."""
ENGINE_S = 10.0
"""Seconds between two looks at the engine."""
SOON_S = 10.0
"""Seconds until a missing first answer is worth a line."""
NEED_LENGTH = ("optimus", "shortest")
"""Policies that need ``steps`` of each job."""
LIVE = tuple(name for name in POLICIES if name != "qssf")
"""Policies for jobs that run: ``qssf`` orders starts by a history of ended jobs."""

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
        if self.hosts == 1 and count < self.per_host:
            return Devices(1, self.per_host - count)
        return Devices(max(0, self.hosts - -(-count // self.per_host)), self.per_host)


_DEVICES = re.compile(r"(?:(\d{1,6})x)?0*([1-9]\d{0,5})")


def read_devices(text: str) -> Devices:
    """Read ``N``, ``HOSTSxN``, or a file with such a text. Raises ``UsageError``."""
    found = _DEVICES.fullmatch(text.strip())
    if found is None:
        try:
            content = Path(text).read_text()[:64]
        except (OSError, ValueError) as error:
            raise UsageError(
                f"--devices {text}: expected N, HOSTSxN (N from 1 on), or a file with one of them "
                f"({error})."
            ) from error
        found = _DEVICES.fullmatch(content.strip())
        if found is None:
            raise UsageError(f"{text} holds {content!r}; expected N or HOSTSxN, N from 1 on.")
    return Devices(int(found[1] or 1), int(found[2]))


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
        meter: Meter = lambda *about: None,
    ) -> None:
        self._devices_text, self._devices = devices, read_devices(devices)
        self._name, self._policy = policy, steady(POLICIES[policy])
        self._every_s, self._is_dry, self._tell, self._meter = every_s, is_dry, tell, meter
        self._hand, self._problems = hand(self._devices.per_host), Problems()
        per_host = self._devices.per_host if self._devices.hosts > 1 else None
        self._jobs = Jobs(
            folder, per_host, self._problems, asks_sizes=not self._hand.is_engine, check=self._check
        )
        self._requests = Requests(self._hand, self._jobs, self._problems, may_act, meter)
        self._heard_at = time.monotonic()
        """Time without a missing first answer."""
        self._memory: Mapping[str, float] = {}
        self._target: dict[str, int] = {}
        self._facts: Mapping[str, object] = {}
        """What makes an event where it changes, at the newest decision."""
        self._had: Mapping[str, int] = {}
        """Devices of the jobs at the newest decision."""
        self._decided: float | None = None
        self._engine_at = -math.inf
        self._again = ""
        """Why the next decision comes before its time."""
        self._measured: set[str] = set()

    def _check(self, file: JobFile) -> None:
        if self._name in NEED_LENGTH and file.steps is None:
            raise UsageError(f"{file.name}: the policy {self._name} needs its length: steps = N.")

    def turn(self) -> bool:
        """Look, decide after an event or when it is time, and act. Returns whether every job has
        what the newest decision gives it."""
        self._read_devices()
        jobs, now = self._jobs.look(), time.monotonic()
        if names := self._jobs.waits_for:
            if now - self._heard_at > SOON_S:
                text = f"{', '.join(names)} may have devices: none is given."
                self._problems.note("first answers", text)
            return False
        self._problems.note("first answers")
        self._heard_at = now
        self._look_at_engine(jobs, now)
        self._drop(self._requests.settle(jobs, now))
        why = _news(self._facts, self._facts_of(jobs)) + [self._again] * bool(self._again)
        if why or self._decided is None or now - self._decided >= self._every_s:
            self._decide(jobs, why)
            self._facts, self._decided, self._again = self._facts_of(jobs), now, ""
        self._measure(jobs)
        if self._is_dry:
            return True
        is_done, refused = self._requests.pursue(self._target, jobs, self._given.count, now)
        self._drop(refused)
        return is_done

    def _read_devices(self) -> None:
        try:
            devices = read_devices(self._devices_text)
            if self._hand.is_engine and devices.per_host != self._devices.per_host:
                raise UsageError(f"hosts of {devices.per_host} devices need a new start.")
            self._problems.note("devices")
            self._devices = devices
        except UsageError as error:
            text = f"{error} The former number counts: {self._devices.count}."
            self._problems.note("devices", text)

    def _look_at_engine(self, jobs: Mapping[str, Known], now: float) -> None:
        if now - self._engine_at < ENGINE_S:
            return
        self._engine_at = now
        try:
            self._hand.look([known.file for known in jobs.values() if known.state != "ended"])
            self._problems.note("engine")
        except ScalaiError as error:
            self._problems.note("engine", f"{error} What was read before counts.")

    @property
    def _given(self) -> Devices:
        """The devices, as far as the engine gives them to these jobs."""
        if not self._hand.is_engine:
            return self._devices
        return Devices(self._hand.within(self._devices.hosts), self._devices.per_host)

    def _drop(self, refused: list[tuple[str, int]]) -> None:
        """Decide again without sizes that jobs do not take now."""
        for name, devices in refused:
            self._target.pop(name, None)
            self._again = f"{name} does not take {devices} devices now"

    def _facts_of(self, jobs: Mapping[str, Known]) -> dict[str, object]:
        facts: dict[str, object] = {"devices": self._given.count}
        for name, known in jobs.items():
            target, size = self._target.get(name), known.seen.devices
            facts[f"job {name}"] = known.state
            # A size on the way to the one that was decided is no event.
            is_on_way = target is not None and size in (target, self._had.get(name))
            at = target if is_on_way else size
            facts[f"size {name}"] = at if known.state == "runs" else None
            facts[f"file {name}"] = known.file
            facts[f"slots {name}"] = known.seen.sizes
            facts[f"waits {name}"] = self._hand.waits(known.file)
        return facts

    def _question(self, jobs: Mapping[str, Known], now: float, clock: float) -> Question:
        left, found = self._left(jobs), list[ClusterJob]()
        for name, known in jobs.items():
            if known.state in ("runs", "waits"):
                sought = self._requests.pending(name)
                found.append(
                    view(
                        known.file, known.seen, now, self._devices.per_host,
                        most=self._hand.most(known.file, known.seen),
                        is_valid=lambda size, of=known: self._requests.can_have(of, size),  # type: ignore[misc]
                        pending=None if sought is None else (sought.devices, clock - sought.since),
                    )
                )  # fmt: skip
        found.sort(key=lambda job: (job.submitted_s, job.name))
        return Question(now, tuple(found), left.hosts, left.per_host)

    def _left(self, jobs: Mapping[str, Known]) -> Devices:
        """The devices beside silent jobs: one that has never answered may have its most of those
        that no other job is known to have."""
        silent = [known for known in jobs.values() if known.state == "silent"]
        left = self._given.without(sum(known.seen.devices for known in silent))
        running = sum(known.seen.devices for known in jobs.values() if known.state == "runs")
        unheard = sum(known.file.devices[1] for known in silent if known.seen.status is None)
        return left.without(min(left.without(running).count, unheard))

    def _decide(self, jobs: Mapping[str, Known], why: list[str]) -> None:
        now = time.time()
        question = self._question(jobs, now, time.monotonic())
        answer = self._policy(question, self._memory)
        self._memory = answer.memory
        target = {job.name: answer.devices.get(job.name, 0) for job in question.jobs}
        # A request under way is known as the present size.
        before = {name: known.seen.devices for name, known in jobs.items()}
        is_new = target != self._target
        self._target, self._had = target, before
        self._meter("decisions", {}, 1)
        if why or is_new:
            reasons = {name: self._hand.waits(known.file) for name, known in jobs.items()}
            waits = {name: reason for name, reason in reasons.items() if reason}
            lines = [
                _explained(job, before[job.name], target)
                + (f" (waits for quota: {waits[job.name]})" if job.name in waits else "")
                for job in question.jobs
            ]
            over = sum(target.values()) - question.devices
            short = f"; {over} devices too few" if over > 0 else ""
            text = f"{'; '.join(why) or 'a minute has gone'}: {', '.join(lines) or 'no job'}{short}"
            self._tell(
                ("dry run: " * self._is_dry) + text,
                {
                    "at": now, "policy": self._name, "dry_run": self._is_dry, "why": why,
                    "devices": self._given.count,
                    "jobs": {
                        job.name: {
                            "before": before[job.name], "after": target[job.name],
                            "speed": _speed(job, target[job.name]),
                            "pause_s": round(job.pause_s, 3),
                        }
                        for job in question.jobs
                    },
                    "silent": [name for name, known in jobs.items() if known.state == "silent"],
                    "waits": waits,
                },
            )  # fmt: skip

    def _measure(self, jobs: Mapping[str, Known]) -> None:
        held = {name: known.seen.devices for name, known in jobs.items()}
        self._meter("devices", {"state": "all"}, self._given.count)
        self._meter("devices", {"state": "held"}, sum(held.values()))
        for name, known in jobs.items():
            self._meter("job_devices", {"job": name}, held[name])
            self._meter("job_silent", {"job": name}, known.state == "silent")
        for name in self._measured - jobs.keys():
            self._meter("job_devices", {"job": name}, None)
            self._meter("job_silent", {"job": name}, None)
        self._measured = set(jobs)

    def close(self) -> None:
        self._jobs.close()


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
        elif kind == "waits" and new is not None and new != (old or ""):
            found.append(f"{name} {'waits for quota' if new else 'has its quota'}")
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
