"""Carries out a schedule of faults against a running job, one by one, and observes each outcome.

At the end all injections are undone, whatever happens.
"""

import fcntl
import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from scalai.core.errors import PeerError, UsageError
from scalai.launch.chaos import job_processes as processes
from scalai.launch.chaos.injectors import CLOCK_S, injector_of
from scalai.launch.chaos.kinds import Effect, Fault, Wanted, most_steps_lost, schedule
from scalai.launch.chaos.scene import (
    Injected,
    Scene,
    StartSettings,
    Watch,
    least_hosts,
    settings_of,
)
from scalai.launch.chaos.verdicts import FaultOutcome, Verdict, problems, step_to_pass, to_json

ENDS_S = 20.0
"""Seconds without progress before the injection is undone."""
STARTS = 4
"""Most starts of a failing agent."""
LED = 4
"""Most times that the job is led to a station that its recoveries pass by."""


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """The request.

    ``every``: steps between the recovery from a fault and the next one; ``bite_s``: time limit in
    seconds for the detection of a fault, and for the recovery; ``is_restarting``: ended agents are
    started again; ``hosts``: hosts to strike, empty: any here.
    """

    seed: int
    wanted: tuple[Wanted, ...]
    every: int
    out: Path
    rounds: int = 1
    bite_s: float = 60.0
    is_restarting: bool = True
    logs: tuple[Path, ...] = ()
    hosts: tuple[str, ...] = ()


@dataclass(slots=True)
class Cast:
    """The job's hosts on this machine: the start of each agent, and agents started again."""

    hosts: tuple[str, ...]
    world: int
    commands: dict[str, processes.AgentCommand]
    started: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)
    starts: dict[str, int] = field(default_factory=dict)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Lock out other injectors of faults into the job. Raises ``UsageError``: another one is
    active, or there is no such job."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise UsageError(
            f"no job {folder.name!r} runs here (looked in {folder}). Name it by its name and "
            "--store-dir."
        ) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(f"another command injects faults into {folder.name!r}.") from error
        yield
    finally:
        os.close(descriptor)


class Chaos:
    """One schedule against one job.

    Args:
        folder: ``<store>/<job>``.
        say: Callback for a line of progress.
    """

    def __init__(self, folder: Path, plan: FaultPlan, say: Callable[[str], None]) -> None:
        self._folder, self._plan, self._say = folder, plan, say
        self._watch = Watch(folder, plan.logs)
        self._settings = StartSettings(None, 1, None)
        self._cast = Cast((), 0, {})
        self._begun = time.monotonic()

    def prepare(self) -> tuple[Fault, ...]:
        """Look at the job and return its schedule; nothing is injected yet.

        Raises:
            UsageError: No agent of it runs here, or it has fewer hosts than a fault strikes.
            PeerError: It does not train.
        """
        if not processes.agents(self._folder):
            raise UsageError(
                f"no agent of job {self._folder.name!r} runs on this machine (looked in "
                f"{self._folder}). Run this where its hosts are."
            )
        if not self._watch.wait(self._trains, self._plan.bite_s):
            raise PeerError(
                f"job {self._folder.name!r} does not train (status: {self._watch.status}). Faults "
                "are injected into a job that makes steps."
            )
        status = self._watch.status
        assert status is not None
        here = processes.agents(self._folder)
        workers = {host: count for host, count in status["workers"].items() if host in here}
        if not workers:
            raise UsageError(
                f"no workers of job {self._folder.name!r} run on this machine, but on "
                f"{', '.join(status['workers']) or 'no host'}. Run this where they are."
            )
        commands = {host: processes.AgentCommand.of(pid) for host, pid in here.items()}
        self._cast = Cast(tuple(workers), status["world_size"], commands)
        self._settings = settings_of(self._folder)
        strangers = sorted(set(self._plan.hosts) - workers.keys())
        if strangers:
            raise UsageError(
                f"--hosts {','.join(strangers)}: no workers of the job here, but of "
                f"{', '.join(workers)}."
            )
        struck = {host: workers[host] for host in self._plan.hosts or workers}
        return schedule(
            self._plan.seed, self._plan.wanted, struck, others=len(workers) - len(struck),
            least_hosts=least_hosts(self._folder),
            replicas=self._settings.replicas, every=self._plan.every, rounds=self._plan.rounds,
        )  # fmt: skip

    def _trains(self) -> bool:
        status = self._watch.status
        return bool(status and status["phase"] == "running" and status["step"] is not None)

    def run(self, faults: Sequence[Fault]) -> Verdict:
        """Carry a schedule out. An interrupted run is undone, and judged as far as it came: see
        ``outcomes``."""
        self.outcomes: list[FaultOutcome] = []
        self._say(f"hosts {', '.join(self._cast.hosts)}; {len(faults)} faults")
        try:
            for fault in faults:
                outcome = self._one(fault)
                self.outcomes.append(outcome)
                self._note(outcome)
                if not self._is_alive():
                    self._say("the job has ended: no further fault can be injected")
                    left = faults[len(self.outcomes) :]
                    self.outcomes += [
                        FaultOutcome(each, trouble="the job had ended") for each in left
                    ]
                    break
        finally:
            # Who is interrupted may have killed an agent and not started it again yet.
            if self._plan.is_restarting and self._watch.status is not None:
                self._start_again({})
            self._watch.close()
        return Verdict(self._plan.seed, tuple(self.outcomes))

    def _is_alive(self) -> bool:
        return self._watch.status is not None or bool(processes.agents(self._folder))

    def _one(self, fault: Fault) -> FaultOutcome:
        """Wait for the time of a fault, inject it, and observe the outcome."""
        if not self._await_time(fault):
            return FaultOutcome(fault, trouble="the job did not get to the time of this fault")
        with ExitStack() as undo:
            scene = Scene(
                self._folder, self._watch, fault, self._settings, self._cast.commands,
                self._plan.out, undo,
            )  # fmt: skip
            try:
                skipped = injector_of(fault).obstacle(scene)
                if fault.kind.name in CLOCK_S and not self._plan.is_restarting:
                    skipped = "its host has to be started again"
                if skipped:
                    return FaultOutcome(fault, skipped=skipped)
                return self._strike(fault, scene)
            except ProcessLookupError as error:
                return FaultOutcome(fault, trouble=f"its target is not there: {error}")

    def _await_time(self, fault: Fault) -> bool:
        """Return True once the job is whole and a fault is due; False: it never was."""
        watch, at = self._watch, fault.at
        watch.wait(lambda: self._is_whole() or not self._is_alive(), self._plan.bite_s)
        if not self._is_whole():
            return False
        since = watch.step or 0
        due = at.step if at.step is not None else since + fault.steps
        if at.after_s is not None:
            left_s = at.after_s - (time.monotonic() - self._begun)
            watch.wait(lambda: False, max(0.0, left_s))
            return self._is_whole()
        # A job may take hours to a step that was named: as long as it makes steps it is waited for.
        newest, seen_at = since, time.monotonic()
        while (watch.step or 0) < due:
            watch.look()
            if (watch.step or 0) > newest:
                newest, seen_at = watch.step or 0, time.monotonic()
            if not self._is_alive() or time.monotonic() > seen_at + self._plan.bite_s:
                return False
            time.sleep(0.05)
        return True

    def _is_whole(self) -> bool:
        return self._watch.is_whole(self._cast.hosts, self._cast.world)

    def _strike(self, fault: Fault, scene: Scene) -> FaultOutcome:
        watch, plan = self._watch, self._plan
        step, limit = watch.step or 0, self._limit(fault)
        self._say(f"step {step}: {fault}")
        from_here, wall, began = len(watch.log.text), time.time(), time.monotonic()
        injected = injector_of(fault).inject(scene)
        outcome = FaultOutcome(fault, step=step, limit=limit)
        sign = _Sign(fault, injected, watch, from_here, wall)
        led_at = [wall]

        def is_seen() -> bool:
            if scene.before and watch.rounds_since(wall):
                self._start_again(scene.before)  # it shows once the host is back
            is_there = sign.is_there()
            if is_there or injected.again is None:
                return is_there
            rounds = watch.rounds_since(led_at[-1])
            if rounds and len(led_at) < LED and self._is_back(step_to_pass(step, rounds), {}):
                self._say(f"  {fault.at} was passed by: once more, at step {watch.step}")
                led_at.append(time.time())
                injected.again()
            return False

        if watch.wait(is_seen, plan.bite_s):
            struck = (injected.struck_at and injected.struck_at()) or wall
            outcome = replace(
                outcome, sign=sign.words, seen_s=round(max(0.0, time.time() - struck), 2)
            )
            wall = struck
        if outcome.is_seen and fault.kind.effect is not Effect.NOTED:
            # Without agents no round comes before they are started again.
            watch.wait(
                lambda: bool(watch.rounds_since(wall)) or not processes.agents(self._folder),
                plan.bite_s if fault.kind.effect is Effect.ROUND else min(plan.bite_s, ENDS_S),
            )
        scene.undo.close()
        is_back = watch.wait(
            lambda: self._is_back(step_to_pass(step, watch.rounds_since(wall)), scene.before),
            plan.bite_s,
        )
        if scene.before:
            is_back = is_back and self._as_before(scene)
        rounds = watch.rounds_since(wall)
        if fault.kind.effect is Effect.ENDS and rounds and rounds[0].step is not None:
            # Another coordinator knows nothing of the steps that were made before.
            lost = max(rounds[0].steps_lost, step - rounds[0].step, 0)
            rounds = (replace(rounds[0], steps_lost=lost), *rounds[1:])
        back_s = round(time.monotonic() - began, 2) if is_back else None
        return replace(outcome, rounds=rounds, back_s=back_s)

    def _limit(self, fault: Fault) -> int | None:
        watch = self._watch
        step, archived = watch.step or 0, watch.archived(int(fault.kind.name == "damage-disk"))
        return most_steps_lost(
            fault.kind, self._settings.snapshot_every, step - (watch.generation_step or 0),
            None if archived is None else step - archived,
        )  # fmt: skip

    def _is_back(self, step: int, before: Mapping[str, tuple[str, ...]]) -> bool:
        """Start ended agents again; return True if all hosts train beyond ``step``."""
        if self._plan.is_restarting:
            self._start_again(before)
        else:
            self._go_on_with_those_left()
        return self._is_whole() and (self._watch.step or 0) > step

    def _go_on_with_those_left(self) -> None:
        """Without restarts: count the job as whole without its lost hosts."""
        there = processes.agents(self._folder)
        left = tuple(host for host in self._cast.hosts if host in there)
        if left and left != self._cast.hosts:
            self._cast.hosts, self._cast.world = left, 0

    def _start_again(self, before: Mapping[str, tuple[str, ...]]) -> None:
        cast, there = self._cast, processes.agents(self._folder)
        for host in cast.hosts:
            last = cast.started.get(host)
            if host in there or (last is not None and last.poll() is None):
                continue
            if last is None or host not in cast.starts:
                cast.starts[host] = 0
            if cast.starts[host] >= STARTS:
                continue
            cast.starts[host] += 1
            cast.started[host] = cast.commands[host].start(before.get(host, ()))

    def _as_before(self, scene: Scene) -> bool:
        """Drain a host with a changed start, and start it as before."""
        processes.send(scene.agent(), 15)
        host = scene.host
        if not self._watch.wait(lambda: host not in processes.agents(self._folder), 60.0):
            return False
        self._cast.starts.pop(host, None)
        return self._watch.wait(lambda: self._is_back(0, {}), self._plan.bite_s)

    def _note(self, outcome: FaultOutcome) -> None:
        """Add the outcome to ``events.jsonl`` and say it."""
        self._cast.starts.clear()
        found = to_json(outcome)
        with (self._plan.out / "events.jsonl").open("a") as file:
            file.write(json.dumps({"at": time.time(), **found}) + "\n")
        if outcome.skipped:
            self._say(f"  skipped: {outcome.skipped}")
            return
        known = outcome.detect_s
        self._say(
            f"  {outcome.sign or 'NOT SEEN'}; known after "
            f"{'-' if known is None else f'{known:.2f} s'}, {outcome.steps_lost} steps lost (limit "
            f"{outcome.limit}), back after {outcome.back_s} s"
            + "".join(f"\n  FAILED: {each}" for each in problems(outcome))
        )


class _Sign:
    """Looks for signs of an injection."""

    def __init__(
        self, fault: Fault, injected: Injected, watch: Watch, from_here: int, wall: float
    ) -> None:
        self._fault, self._injected, self._watch = fault, injected, watch
        self._from, self._wall = from_here, wall
        self.words = ""

    def is_there(self) -> bool:
        pattern = self._fault.kind.sign
        shown = self._injected.seen() if self._injected.seen is not None else ""
        if self._injected.seen is not None and not shown:
            return False
        found = re.search(rf".*(?:{pattern}).*", self._text()) if pattern else None
        if pattern and found is None:
            return False
        said = "" if found is None else _short(found[0])
        self.words = "; ".join(each for each in (shown, said) if each)
        return True

    def _text(self) -> str:
        """The job's words since the injection."""
        watch = self._watch
        reports = [each for each in watch.reports if each["at"] > self._wall]
        failure = (watch.status or {}).get("last_failure")
        said = [watch.log.text[self._from :], *(json.dumps(each) for each in reports)]
        if failure is not None and reports:
            said.append(f"{failure['kind']} {failure['reason']}")
        return "\n".join(said)


def _short(line: str) -> str:
    """Return the words of a log's line from its event on, or of a report its reason."""
    found = re.search(r"event=.*", line) or re.search(r'"reason": "([^"]*)"', line)
    text = line if found is None else found[found.lastindex or 0]
    return text.strip()[:160]
