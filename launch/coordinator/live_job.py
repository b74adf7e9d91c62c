"""A running job: feeds events to the law, and performs its actions."""

import secrets
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from scalai.core.errors import ProofError
from scalai.core.job import membership as m
from scalai.core.job import proof_rules
from scalai.core.job.assigning import next_assignment
from scalai.core.job.copies import GenerationCopies
from scalai.core.job.endings import kind_of, rank_of
from scalai.core.job.fitness import Fitness, Links
from scalai.core.job.function_proof import FACT as PROVEN
from scalai.core.job.function_proof import Made
from scalai.core.job.outlook import Course, outlook
from scalai.core.job.recovery import Origin, newest_whole
from scalai.core.job.resize import advance
from scalai.core.job.succession import begin
from scalai.core.jsonable import Json
from scalai.core.messages import actions, commands, events, reports
from scalai.core.messages.shared import Shared
from scalai.core.planner.preference import Preference
from scalai.launch.config.constants import constant
from scalai.launch.config.job_spec import JobSpec
from scalai.launch.coordinator.held_states import HeldStates
from scalai.launch.coordinator.judging import Answers, Judge, doubted, prove
from scalai.launch.coordinator.kept_wishes import KeptWishes
from scalai.launch.coordinator.look_ahead import LookAhead
from scalai.launch.coordinator.members import JobEnd, Members, drained, job_end, keeps_state
from scalai.launch.coordinator.rendezvous_store import RendezvousStores
from scalai.launch.coordinator.sizing import Sizing
from scalai.launch.coordinator.spending import Spending, use_of
from scalai.launch.coordinator.starter import Starter
from scalai.launch.coordinator.timeline import Timeline, summary
from scalai.store.parts import is_fetched

SUCCESSORS_GAP = 8
"""Numbers skipped by a new coordinator: absent hosts may have them from the one before."""


@dataclass(frozen=True, slots=True)
class PresentRun:
    """The job's present run.

    Attributes:
        name: Random name.
        is_fresh: It began without older states of hosts.
        is_successor: An earlier coordinator began it.
    """

    name: str
    is_fresh: bool
    is_successor: bool


class SayLine(Protocol):
    """Takes log lines: the text for a person, ``facts`` beside it for machines."""

    def __call__(self, text: str, /, **facts: Json) -> None: ...


class LiveJob:
    """The job's state and its collaborators in the coordinator. One thread at a time calls it.

    Args:
        interface: Address of the workers' rendezvous.
        lock: Held by callers.
        may_retire: Whether no other run can read the durable directory.
        is_alone: Whether no other machine can have the job's next coordinator.
    """

    def __init__(
        self,
        spec: JobSpec,
        interface: str,
        stores: RendezvousStores,
        say: SayLine,
        lock: "threading.RLock",
        term: int = 1,
        clock: Callable[[], float] = time.monotonic,
        *,
        is_successor: bool = False,
        may_retire: Callable[[], bool] = lambda: True,
        is_alone: Callable[[], bool] = lambda: True,
    ) -> None:
        self._say, self.clock = say, clock
        self.spec = spec
        self._may_retire, self._is_alone = may_retire, is_alone
        # Snapshots of two runs have different names.
        name = secrets.token_hex(4)
        self._run = PresentRun(name, spec.is_fresh and not is_successor, is_successor)
        self.sizing = Sizing(spec, say)
        self.members = Members(lock, term, clock)
        self._ahead = LookAhead(self, lock, self.log, clock)
        self.memory = KeptWishes(self.members, self.sizing, self._ahead.begin)
        self.generations = HeldStates(gap=SUCCESSORS_GAP if is_successor else 0)
        self.answers = Answers()
        """Reports of the present round."""
        self.last_failure: Mapping[str, Json] | None = None
        """Host, rank, kind and reason of the first failure in the newest failed round."""
        self._end: JobEnd | None = None
        self._lost_at: float | None = None
        self._began_at = -1 if is_successor else 0
        """Step at which the present round began; -1: another coordinator began it."""
        self.steps_made = 0
        """Steps seen so far, repeated ones included."""
        self.machine = interface
        """Address of this machine, as of its agents."""
        self._judge = Judge(self.generations, self.members, self.commit, self.log)
        self._starter = Starter(self, interface, stores, lock)
        took_over_at = clock() if is_successor else None
        self.state = first_state(spec, self.sizing, term, took_over_at)
        self.timeline = Timeline(spec.report_dir, self.log, clock)
        self.entered_at = clock()
        """Start of the present phase, in seconds of the clock."""
        self.spending = Spending(clock(), is_successor=is_successor)

    @property
    def has_ended(self) -> bool:
        return self.state.phase is m.Phase.ENDED

    @property
    def has_crashed(self) -> bool:
        """Whether a fault of the coordinator itself has ended the job."""
        return self._end is not None and self._end.is_crash

    @property
    def run(self) -> str:
        """Random name of the job's present run."""
        return self._run.name

    @property
    def is_fresh(self) -> bool:
        """Whether the job begins anew, without older states of hosts."""
        return self._run.is_fresh

    @property
    def is_successor(self) -> bool:
        """Whether an earlier coordinator began this run."""
        return self._run.is_successor

    @property
    def exit_code(self) -> int:
        """Exit code of the job; 0 while it goes on."""
        return 0 if self._end is None else self._end.farewell.code

    @property
    def farewell(self) -> commands.Exit | None:
        """Exit command of every agent, once the job has ended."""
        return None if self._end is None else self._end.farewell

    @property
    def finished_step(self) -> int | None:
        """Step of the script's end; None: no end."""
        return None if self._end is None else self._end.finished_step

    @property
    def lost_at(self) -> float | None:
        """Time of the last loss of a host, in seconds of the monotonic clock."""
        return self._lost_at

    def active(self) -> frozenset[str]:
        """Present hosts with workers in the current round."""
        return m.active(self.state)

    def command(self, hosts: Iterable[str], command: commands.Command) -> None:
        """Queue a command for these hosts, as far as they are in the job."""
        self.members.command(hosts, command)

    def command_commit(self, hosts: Iterable[str], generation: int) -> None:
        """Command hosts to rename their sealed part to a generation."""
        name = self.generations.catalogue.numbered[generation].snapshot
        parts = self.generations.parts(generation)
        stated = self.generations.stated(generation)
        everyone = None if stated is None else Shared(stated.hosts)
        for host in hosts:
            mine = parts[host].committed if host in parts else None
            prints = {} if mine is None else mine.fingerprints
            self.command([host], commands.Commit(generation, name, everyone, prints))

    def log(self, text: str, /, **facts: Json) -> None:
        newest = self.state.newest_generation
        number = newest.number if newest else 0
        self._say(f"generation={number} round={self.state.round} {text}", **facts)

    # ------------------------------------------------------------------ what changes beside events

    def note_start(self, step: int) -> None:
        """Record the workers' first step."""
        # Until then they seemed to be made.
        self.steps_made -= max(0, min(self.state.newest, step) - max(self._began_at, 0))
        self._began_at = max(self._began_at, step)
        if (lost := self.timeline.correct(step)) is not None:
            self.log(
                f"event=went_back steps_lost={lost}: the script has loaded its own checkpoint, of "
                f"step {step}"
            )

    def note_loss(self) -> None:
        """Record the time of a loss, or of a host's absence from the adopted round."""
        self._lost_at = self.clock()

    def take_over(self, run: str) -> None:
        """Go on with an earlier coordinator's run."""
        self._run = PresentRun(run, is_fresh=False, is_successor=True)

    def forget(self, host: str) -> None:
        """Remove a lost agent and its states."""
        self.note_loss()
        self.members.remove(host)
        if not self.members.hosts():
            self.state = m.lost_all(self.state)
        self.generations.forget(host)
        self.timeline.begin(f"host {host} is lost", "lost")

    def note_failure(self, host: str, reason: str) -> None:
        """Record a failure of a host's workers; later ones in a round follow from the first."""
        last, round = self.last_failure, self.state.round
        if last is None or last["round"] != round:
            self.last_failure = {
                "host": host, "rank": rank_of(reason), "kind": kind_of(reason), "reason": reason,
                "round": round,
            }  # fmt: skip
            self.timeline.note(failure=self.last_failure)
            self.log(
                f"event=workers_failed host={host} kind={kind_of(reason)!r} {reason}",
                rank=rank_of(reason),
            )

    def note_made(self, made: Sequence[Made]) -> None:
        """Record steps of the present round."""
        self.state, text = proof_rules.made(self.state, made)
        if text:
            self.log(f"event=function_differs level=WARNING {text}")

    def note_pace(self, host: str, window: int, seconds: float) -> None:
        """Record a window of passes on a host; shares follow at the next change."""
        job = self.state
        if job.phase is m.Phase.RUNNING and job.current is not None:
            if text := self.sizing.note_pace(job.round, job.current, host, window, seconds):
                self.log(text)

    def note_examined(
        self, host: str, number: int, damage: Iterable[str], directory: str = ""
    ) -> None:
        """Record damage found by a host in its part of a generation."""
        lines = tuple(damage)
        for line in lines:
            self.log(f"event=damage generation={number} host={host} {line}")
        self.generations.note_examined(host, number, directory, lines)

    def lose(self, host: str) -> None:
        """Go on without a lost agent."""
        self.forget(host)
        self.feed(events.HostLost(host, self.recount(), self.clock()))

    def excuse(self, seconds: float) -> None:
        """Exclude a stall of the coordinator from silences of agents and delays of phases."""
        self.members.excuse(seconds)
        self.state = m.excuse(self.state, seconds)

    def commit(self, name: str, origin: Origin) -> int:
        """Make the parts of a snapshot a generation. Returns its number."""
        number = self.generations.next_number()
        self.generations.commit(number, name, origin)
        parts = self.generations.parts(number).values()
        self.timeline.note(bytes_written=sum(part.size_bytes for part in parts))
        self.sizing.learn({"facts": self.generations.facts(number)}, number)
        self.limit()
        return number

    def recover(self) -> int | None:
        """Commit sealed, uncommitted parts that make a whole state. Returns its number, for hosts
        to rename their parts. A round with another function yields none."""
        if self.state.function.is_refuted:
            return None
        while (found := self.generations.whole_snapshot()) is not None:
            self.state = m.forget_sealed(self.state, found)
            try:
                number = self.commit(found, Origin.SEALED)
            except ProofError as error:
                self.log(f"event=recovered snapshot={found} refused: {error}")
                self.recount()
                continue
            self.log(f"event=recovered committed={number}")
            self.recount()
            return number
        return None

    def limit(self) -> None:
        """Give the law the limits learned by ``sizing``."""
        self.state = m.replace_assign(self.state, self.sizing.assign())

    def learned(self, preference: Preference, assign: m.Assign) -> None:
        """Adopt measured step times: other degrees may be better now."""
        if self.has_ended:
            return
        self.sizing.adopt(preference, assign)
        self.limit()
        self.memory.look(self.state, self.run)
        self._look_again("the planner")

    def _look_again(self, reason: str, *, for_more: bool = False) -> None:
        """Begin a change if the job's limits lead to another assignment now; ``for_more``: if it
        has more ranks."""
        target, current = next_assignment(self.state), self.state.current
        if target is None or current is None or target.is_same_as(current):
            return
        if for_more and target.degrees.world_size <= current.degrees.world_size:
            return
        if self.state.phase is m.Phase.RUNNING and self.state.change.at is None:
            self.timeline.begin(reason, "planner")
            self.feed(events.Rescaled(self.sizing.assign(), self.clock()))

    def recount(self) -> tuple[m.Generation, ...]:
        """Give the law the whole generations, oldest first, and the obstacle to a newer one, after
        a change of hosts' contents. Returns the whole ones."""
        found = outlook(
            self.generations.catalogue,
            self.generations.survey(),
            self.members.hosts(),
            Course(
                self.spec.job, self.state.round > 0, self.state.states.has_lost_all,
                self.is_successor, self.state.copies.archived,
            ),
        )  # fmt: skip
        state = m.replace_generations(self.state, found.generations)
        self.state = m.replace_obstacle(
            state, found.obstacle, is_held_back=found.is_held_back, loss=found.loss
        )
        return found.generations

    def can_go_on_without(self, host: str) -> bool:
        """Whether the other hosts would have an assignment and a state."""
        others = {name: kept for name, kept in self.state.hosts.items() if name != host}
        settings = replace(self.state.settings, place=m.keep_order)
        if next_assignment(replace(self.state, hosts=others, settings=settings)) is None:
            return False
        whole = self.generations.covered(without=host)
        is_held = any(not self.generations.catalogue.is_offered(each.number) for each in whole)
        return is_held or not self.state.states.has_state

    # ------------------------------------------------------------------ events in, actions out

    def feed(self, event: events.Event) -> None:
        """Give the law an event, and perform its actions."""
        was, was_taking_over = self.state.phase, self.state.takeover.pending is not None
        before = self.state
        self.state, due = advance(before, event)
        self._count_steps(before)
        self._ahead.look(self.state)
        if self.sizing.note_ran(self.state.change.ran):
            self.limit()
        self.memory.look(self.state, self.run)
        if self.state.phase is not was:
            self._entered(was, self.state.phase)
        for action in due:
            try:
                self.perform(action)
            except Exception as error:  # our own slip: the law has gone on without its action
                self.crash(error)
            if self.has_crashed:
                return  # the law has gone on without its actions
        if self.state.phase is m.Phase.RUNNING and self.state.change.at is None:
            self.timeline.forget()
            if self.sizing.take_news():
                self._look_again("uneven shares", for_more=True)
        self.spending.note(use_of(self.state, self.timeline.kind), self.clock())
        if was_taking_over and self.state.takeover.pending is None:
            self._count_sealed()
            for number, host in self.generations.catalogue.found_damage():
                if host in self.members:
                    self.count_damaged(host, (number,))

    def _count_steps(self, before: m.Job) -> None:
        """Count the steps since the law's state ``before``."""
        newest = self.state.newest
        if self._began_at < 0:
            self._began_at = newest or -1
        elif self.state.round == before.round:
            self.steps_made += max(0, newest - max(before.newest, self._began_at))

    def hear(self, host: str, report: reports.Report) -> None:
        """Give the law a report."""
        self.feed(events.Reported(host, report))

    def count_damaged(self, host: str, numbers: Iterable[int]) -> None:
        """Report a joining host's earlier damage in these generations, once the job's round is
        known."""
        for number in numbers if self.state.takeover.pending is None else ():
            self.hear(host, reports.Examined(number, ("damage that its host has brought",), ""))

    def _count_sealed(self) -> None:
        """Report sealed parts known only to the coordinator before."""
        round = self.state.round
        for name in self.generations.catalogue.on_the_way(self.run, round):
            for host in self.generations.sealed_parts(name, self.members.hosts()):
                if self.state.phase in (*m.TRAINING, m.Phase.STARTING):
                    self.hear(host, reports.Sealed(round, "snapshot", name, b""))

    def crash(self, error: Exception) -> None:
        """End the job for a fault of the coordinator. The state stays in the stores."""
        if self.has_crashed:
            return
        reason = (
            f"the coordinator failed ({error!r}); its log says where. The state stays in the "
            "stores: start the same job again"
        )
        self._say(f"event=crashed reason={reason!r}\n{traceback.format_exc()}")
        self.end(1, reason, is_crash=True)

    def end(self, code: int, reason: str, *, is_crash: bool = False) -> None:
        """End the job for a reason outside of the law. The state stays in the stores."""
        self.state = replace(self.state, phase=m.Phase.ENDED, awaited=frozenset())
        self._say_farewell(
            self.members.hosts(), JobEnd(commands.Exit(code, reason), is_crash=is_crash)
        )

    def _say_farewell(self, hosts: Iterable[str], end: JobEnd) -> None:
        """Command hosts to exit; a disconnected one gets it later."""
        self.log(f"event=exit code={end.farewell.code} reason={end.farewell.reason!r}")
        self._end = end
        self.command(hosts, end.farewell)

    def _entered(self, was: m.Phase, now: m.Phase) -> None:
        self.entered_at = self.clock()
        emergency = self.state.emergency
        failure = "" if emergency is None else emergency.reason
        if now is m.Phase.STOPPING and self.state.function.is_refuted:
            self.timeline.begin("a change computes another function", "function")
        self.timeline.enter(was, now, failure, self.answers.slowest_snapshot)
        if now is m.Phase.RUNNING:
            self._ahead.begin()
        elif now is m.Phase.SNAPSHOTTING:
            self.answers.snapshots.clear()
        elif now is m.Phase.STOPPING:
            if (number := self.recover()) is not None:
                self.command_commit(self.generations.parts(number), number)
        elif now is m.Phase.STARTING:
            self.timeline.note(recovery=self._explain())

    def _explain(self) -> Json:
        """Log the state to go on from, and the others. Returns them for the report."""
        states = self.generations.catalogue.states(self.members.hosts(), self.generations.survey())
        found = newest_whole(states)
        self.generations.explained()
        if found.state is not None or found.others:
            self.log(f"event=recovery {found}")
        return found.to_json()

    def perform(self, action: actions.Action) -> None:
        """Carry out an action of the law."""
        match action:
            case actions.Send(hosts, command):
                self._order(hosts, command)
            case actions.BuildRound():
                self._build(action)
            case actions.JudgeStop(hosts):
                self.feed(self._judge.stop(self._snapshot_of(self.state.stop.step), hosts))
            case actions.JudgeSnapshot(reason, snapshot):
                self._judge_snapshot(reason, snapshot)
            case actions.CommitParts(hosts, generation):
                self.command_commit(hosts, generation)
            case actions.JudgeRescue(step):
                judged = self._judge.rescue(self._snapshot_of(step))
                if not judged.is_covered:
                    self.timeline.note(steps_lost_why=f"step {step}: {judged.reason}")
                self.feed(judged)
            case actions.Lose(hosts, reason):
                for host in hosts:
                    self._give_up(host, reason)
            case actions.GoBack(hosts, generation):
                for number in self.generations.go_back_to(generation):
                    self.command(hosts, commands.Drop(number))
            case actions.StartRound():
                self._start(action)
            case actions.MakeReplicas():
                self._starter.replicate(action)
            case actions.TryLinks(hosts, order):
                self._knock(hosts, order)
            case actions.CountTensors(hosts):
                self._expect(hosts)
            case actions.Prove(generation):
                self._prove(generation)
            case actions.Release():
                self._release(action)
            case actions.EndJob():
                self._end_job(action)
            case actions.AmendReport(function, prove_s):
                self.timeline.amend(function, prove_s)
            case actions.Say(text):
                facts = {"change": self.timeline.kind} if self.timeline.is_open else {}
                self.log(text if text.startswith("event=") else f"event=note {text}", **facts)

    def _order(self, hosts: Sequence[str], command: commands.Command) -> None:
        """Send a command, after the coordinator's own part of it."""
        match command:
            case commands.GiveUp():
                self._starter.give_up()
            case commands.Discard():
                self._forget_sealed()
            case commands.Archive(_, generation):
                own_only = _is_held_by_writers(self.generations, generation, hosts)
                command = replace(command, own_only=own_only)
            case commands.Retire() if not self._may_retire():
                self.log(
                    "event=not_retired the durable directory does not answer: whether another run "
                    "reads there is unknown. Older generations go with the next one"
                )
                return
        self.command(hosts, command)

    def _snapshot_of(self, step: int) -> str:
        """Name of the snapshot of a step of the present round."""
        return f"{self.run}-{self.state.round}-{step}"

    def _judge_snapshot(self, reason: str, snapshot: str) -> None:
        judged = self._judge.snapshot(reason, snapshot, self.answers.on_the_way.pop(snapshot, {}))
        if judged is None:
            return
        if reason == "start":
            self.note_start(judged.step)
        self.feed(judged)

    def _end_job(self, action: actions.EndJob) -> None:
        step = max(self.state.newest, self.members.newest())
        has_finished = action.code == 0 and bool(self.state.attempt.finished)
        end = job_end(
            action.code, action.reason, round=self.state.round,
            finished_step=step if has_finished else None, newest=self.state.newest_generation,
        )  # fmt: skip
        self._say_farewell(action.hosts, end)

    def _let_go(self, leaving: Iterable[str]) -> None:
        """Release draining hosts; the job goes on without them."""
        hosts, is_alone = frozenset(leaving), self._is_alone()
        code = self.spec.options.drained_exit_code
        reasons = {
            host: drained(self.members, host, hosts, self.machine, stays=is_alone)
            for host in leaving
        }
        for host, reason in reasons.items():
            keeps = keeps_state(0, self.state.round)
            self.command([host], commands.Exit(code, reason, keeps))
            self.members.release(host)
            self.generations.forget(host, is_released=True)

    def _give_up(self, host: str, reason: str) -> None:
        """Lose a silent host, if the others can go on."""
        if host not in self.members:
            return  # another loss has ended it
        can_go_on = self.can_go_on_without(host)
        what = "it counts as lost" if can_go_on else "no other can go on without it; waiting for it"
        self.log(f"event=no_answer host={host} {reason}: {what}")
        if can_go_on:
            self.lose(host)

    def _build(self, action: actions.BuildRound) -> None:
        standby = action.standby
        self.log(f"event=build {standby.assignment.reason!r} standby_round={standby.round}")
        self.timeline.aim(standby.assignment)
        newest = self.state.newest_generation
        self._starter.build(action, newest.number if newest else None)

    def _start(self, action: actions.StartRound) -> None:
        number = action.generation
        step = 0 if number is None else self.generations.step(number)
        if number is not None and not self.state.function.known:
            kept = self.generations.facts(number).get(PROVEN, [])
            self.state = m.replace_known(self.state, tuple(map(str, kept)))
        self._began_at = step
        self.timeline.start(action.round, number, step, action.assignment)
        if action.steps_lost:
            self.timeline.note(steps_lost=action.steps_lost)
        self.answers = Answers()
        for host in self.members.hosts():
            self.members[host].newest, self.members[host].stalled = 0, None
        self._starter.start(action)

    def _forget_sealed(self) -> None:
        for part in self.generations.forget_sealed():
            self.log(
                f"event=note host {part.host} gives up what it had sealed at step {part.step}: it "
                "is no whole state with what the others brought"
            )

    def _knock(self, hosts: Iterable[str], order: int) -> None:
        there = [(host, self.members[host].address) for host in hosts if host in self.members]
        for host, _ in there:
            others = tuple(entry for entry in there if entry[0] != host)
            self.command([host], commands.Knock(order, others))

    def _expect(self, hosts: Iterable[str]) -> None:
        count = len(self.answers.names())
        self.timeline.phase("relaunch", self.timeline.since("committed"), tensors=count)
        self.command(hosts, commands.Expect(self.state.round, count))

    def _prove(self, number: int) -> None:
        round = self.state.round
        reason = prove(number, self.answers, self.generations, self.timeline)
        if reason is None:
            self.feed(events.Proven(round))
        else:
            self.feed(doubted(round, number, reason, self.generations))

    def _release(self, action: actions.Release) -> None:
        if self.state.phase is m.Phase.RUNNING and self.timeline.has_round:
            self.timeline.phase("first_step", self.timeline.since("proven"))
            if (function := self.state.function).found:
                self.timeline.note(function=function.found, prove_s=round(function.seconds, 6))
            report = self.timeline.close()
            self._ahead.changed(report)
            self.log(summary(report), **report)
        if action.keep is not None:
            for number in self.generations.keep(action.keep):
                self.command(self.members.hosts(), commands.Drop(number))
        if action.leaving:
            self._let_go(action.leaving)
            self.recount()


def _is_held_by_writers(generations: HeldStates, number: int, hosts: Sequence[str]) -> bool:
    """Whether all writers of a generation are among these hosts and hold written files."""
    stated, parts = generations.stated(number), generations.parts(number)
    return stated is not None and all(
        host in hosts and host in parts and not all(map(is_fetched, parts[host].files))
        for host in stated.hosts
    )


# ---------------------------------------------------------------------- a job's first state


ORDERS_A_TERM = 1 << 20
"""Orders of two coordinators have different numbers: answers to those of one that is gone may be on
their way to the other."""


def first_state(spec: JobSpec, sizing: Sizing, term: int, took_over_at: float | None) -> m.Job:
    """The law's first state in this term; ``took_over_at``: time of this coordinator's succession;
    None: it succeeds nobody."""
    orders = (term - 1) * ORDERS_A_TERM
    job = m.Job(
        _settings(spec, sizing),
        budget=m.Budget(left=spec.failures),
        copies=GenerationCopies(last_replication=orders, last_archive=orders),
        health=Fitness(last_check=orders, links=Links(last_order=orders)),
        spacing=spec.spacing,
    )
    return job if took_over_at is None else begin(job, took_over_at)


def _settings(spec: JobSpec, sizing: Sizing) -> m.JobSettings:
    resize, store = spec.config.resize, spec.config.store
    return m.JobSettings(
        assign=sizing.assign(),
        why_not=sizing.why_not,
        # A plain job begins anew from its script's own state, which no host holds.
        place=sizing.place if spec.is_elastic else m.keep_order,
        share=sizing.paced,
        settle_s=spec.settle_s,
        max_hosts=spec.max_hosts,
        most_failures=spec.failures,
        is_loss_free=spec.is_loss_free,
        is_elastic=spec.is_elastic,
        has_durable_dir=spec.durable_dir is not None,
        archive_every_s=store.durable_every_s,
        archive_keep=int(constant("store.durable_keep")),
        has_emergency=spec.is_elastic and store.emergency,
        replicas=spec.replicas,
        build_timeout_s=0.0 if resize.standby == "never" else constant("resize.build_timeout_s"),
        drain_timeout_s=resize.drain_timeout_s,
        quarantine_s=constant("resize.quarantine_s"),
        start_timeout_s=resize.start_timeout_s,
        hang_s=resize.hang_s if spec.is_elastic else 0.0,
        proves=resize.prove_function,
    )
