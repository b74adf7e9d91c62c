"""Simulated hosts around the rules of membership: they answer every action, in whatever order a
test chooses, and keep what a real host would keep on disk."""

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from scalai.core.job import membership as m
from scalai.core.job.fitness import Links
from scalai.core.job.membership import TRAINING, active
from scalai.core.job.resize import advance
from scalai.core.messages import actions, commands, events, reports
from scalai.core.messages.reports import SILENT
from support.law_jobs import but, made
from support.law_words import restored
from support.membership_choice import assign_all
from support.membership_host import PIECES, Known, SimulatedHost


def _at_rest(job: m.Job) -> m.Job:
    """Return what of a job does not change by time alone."""
    spacing = replace(job.spacing, worker_s=0.0, counted_at=None)
    return but(
        job,
        newest=0,
        now=0.0,
        wait=m.Wait(),
        stepped_at=None,
        trained_s=0.0,
        barred={},
        spacing=spacing,
        links=Links(),
    )


class Simulation(Known):
    """A coordinator and its hosts. ``inbox`` has the answers under way: a test picks which comes
    next; answers of one host keep their order, as on one connection."""

    # ------------------------------------------------------------------ events

    def feed(self, event: events.Event) -> None:
        self.job, due = advance(self.job, event)
        for action in due:
            self.logged.append(action.command if isinstance(action, actions.Send) else action)
            if isinstance(action, actions.Send):
                self.send(action.hosts, action.command)
            else:
                self.perform(action)

    def report(self, host: str, told: reports.Report) -> None:
        self.feed(events.Reported(host, told))

    def join(self, name: str, slots: int, parts: dict[int, frozenset[int]] | None = None) -> None:
        kept = {n: p for n, p in (parts or {}).items() if n not in self.abandoned}
        self.hosts[name] = SimulatedHost(name, slots, parts=kept)
        self.commands[name] = []
        for key in [key for key in self.damaged if key[0] == name and key[1] not in kept]:
            del self.damaged[key]
        self.job = m.replace_obstacle(self.job, "", is_held_back=False)
        for number, pieces in kept.items():
            self.known.setdefault(number, {})[name] = pieces
        has_check = name in self.has_check
        self.feed(
            events.HostJoined(
                name, slots, self.covered(), bool(parts), self.now, has_check=has_check
            )
        )

    def lose(self, name: str) -> SimulatedHost:
        """The agent dies. Return it with what lies in its store."""
        host = self.hosts.pop(name)
        del self.commands[name]
        self.snapshots.pop(name, None)
        self.forget(name)
        self.feed(events.HostLost(name, self.covered(), self.now))
        return host

    def replace(self, name: str, *, is_kept: bool) -> None:
        """Another agent of a host comes, with what lies in its store or with nothing, and its
        workers are gone."""
        host = self.hosts[name]
        self.forget(name)
        self.snapshots.pop(name, None)
        self.join(name, host.slots, host.parts if is_kept else None)

    def tick(self, seconds: float = 10.0) -> None:
        for name, host in sorted(self.hosts.items()):
            if host.held is not None and not host.is_silent and host.round is not None:
                self.feed(
                    events.Reported(
                        name, reports.Held(host.round, host.held, f"a save at {self.now}")
                    )
                )
        self.now += seconds
        newest = max((host.step for host in self.hosts.values()), default=0)
        self.feed(events.Ticked(self.now, newest, self.stalled()))

    def stalled(self) -> dict[str, reports.Stalled]:
        """Return who makes no step in training: all, where some hang. Each host has one rank."""
        names = sorted(active(self.job))
        if self.job.phase not in TRAINING or not (
            self.are_cut(names) or any(self.hosts[name].is_hung for name in names)
        ):
            self.still_since = None
            return {}
        self.still_since = self.now if self.still_since is None else self.still_since
        for_s, step = self.now - self.still_since, max(self.hosts[name].step for name in names)
        return {
            name: reports.Stalled(
                (rank,), step, for_s, 0.0, 1.0, not self.hosts[name].is_silent,
                ((rank, SILENT if self.hosts[name].is_hung else "torch/distributed/"),),
            )
            for rank, name in enumerate(names)
        }  # fmt: skip

    def train(self, steps: int) -> None:
        """Make steps, where the workers run freely."""
        if self.job.phase in TRAINING:
            if not self.are_cut(active(self.job)) and not any(
                self.hosts[name].is_hung or self.hosts[name].is_done for name in active(self.job)
            ):
                for name in active(self.job):
                    self.hosts[name].step += steps

    def answer(self, name: str) -> None:
        """One host carries out its oldest command and tells of it."""
        event = self.commands[name].pop(0)()
        if event is not None and name in self.hosts:
            self.feed(event)

    def deliver(self) -> None:
        """Carry out everything that is under way."""
        answers = 0
        while self.waiting():
            answers += 1
            assert answers < 1000, f"hosts wait for each other for ever: {self.job}"
            self.answer(self.waiting()[answers % len(self.waiting())])

    def settle(self) -> None:
        """Carry out everything that is under way, and let time pass until nothing changes."""
        for _ in range(200):
            before = self.job
            self.deliver()
            self.tick()
            is_at_rest = _at_rest(self.job) == _at_rest(before) and not self.waiting()
            if is_at_rest and not self.job.function.is_waiting:
                return
        raise AssertionError(f"the job does not come to rest: {self.job}")

    def pass_time(self, seconds: float, tick_s: float = 90.0) -> None:
        """Let the hosts do what they can for so long."""
        end = self.now + seconds
        while self.now < end and self.job.phase is not m.Phase.ENDED:
            self.deliver()
            self.tick(tick_s)

    def begin_save(self) -> None:
        """The training begins a save that goes on beside it."""
        self.is_saving = self.job.phase in (*TRAINING, m.Phase.PREPARING, m.Phase.DRAINING)

    def end_save(self) -> None:
        """It has ended: the stop that waits for it is proposed."""
        self.is_saving = False
        for host in self.hosts.values():
            if host.held is not None and host.round is not None:
                round, stop, host.held = host.round, host.held, None
                self.tell((host.name,), lambda h, r=round, s=stop: self.prepare(h, r, s))  # type: ignore[misc]

    def heal(self) -> None:
        """Faults stop: what hung goes on."""
        self.end_save()
        self.join_links()
        self.cannot_run.clear()
        self.sick.clear()
        self.spoilt.clear()
        for name in sorted(self.hosts):
            host = self.hosts.get(name)
            if host is not None:
                host.is_silent = False
                self.wake(host)

    def join_links(self, *names: str) -> None:
        """Hosts hear each other again; of none: all do."""
        self.cut = {pair for pair in self.cut if names and pair != frozenset(names)}
        for host in self.hosts.values():
            if host.todo is not None and not host.is_hung:
                self.commands[host.name].append(host.todo)
                host.todo = None
            elif host.stop is not None and not host.stands and not host.is_hung:
                self.commands[host.name].append(lambda h=host: self.arrive(h, h.round))  # type: ignore[misc]

    def wake(self, host: SimulatedHost) -> None:
        """Workers that hung go on with what they had to do."""
        if not host.is_hung:
            return
        host.is_hung = False
        if host.todo is not None:
            self.commands[host.name].append(host.todo)
            host.todo = None
        elif host.stop is not None and not host.stands:
            self.commands[host.name].append(lambda: self.arrive(host, host.round))

    # ------------------------------------------------------------------ actions

    def tell(
        self, hosts: tuple[str, ...], work: Callable[[SimulatedHost], events.Event | None]
    ) -> None:
        for name in hosts:
            host = self.hosts.get(name)
            if host is not None:
                self.commands[name].append(lambda host=host: work(host))  # type: ignore[misc]

    def perform(self, action: actions.Action) -> None:
        round = self.job.round
        match action:
            case actions.BuildRound(standby):
                self.tell(standby.assignment.active, lambda host: self.build(host, standby.round))
            case actions.Lose(hosts):
                for name in hosts:
                    if name in self.hosts:  # else the loss of another one has ended it
                        self.lose(name)
            case actions.JudgeStop(hosts):
                self.judge(hosts)
            case actions.JudgeSnapshot(_, snapshot):
                self.judge_snapshot(snapshot)
            case actions.CommitParts(hosts, generation):
                self.tell(hosts, lambda host: self.commit(host, generation))
            case actions.MakeReplicas(hosts, order, generation, _, giving):
                self.tell(hosts, lambda host: self.replicate(host, order, generation, giving))
            case actions.GoBack(_, source):
                self.go_back(source)
            case actions.StartRound():
                self.start(action)
            case actions.CountTensors(hosts):
                assert self.job.attempt.published >= set(hosts), "not all have published"
                self.tell(hosts, lambda host: self.in_start(host, round, self.restore))
            case actions.Prove(generation):
                self.prove(generation)
            case actions.Release(_, keep, leaving):
                self.release(keep, leaving)
            case actions.TryLinks(hosts, order):
                self.tell(hosts, lambda host: self.knock(host, order, hosts))
            case actions.EndJob():
                self.exits.append(action)

    def send(self, hosts: tuple[str, ...], command: commands.Command) -> None:
        match command:
            case commands.GiveUp():
                self.tell(hosts, self.give_up)
            case commands.Prepare(round, stop):
                self.tell(hosts, lambda host: self.prepare(host, round, stop))
            case commands.Agree(round, stop):
                self.tell(hosts, lambda host: self.agree(host, round, stop))
            case commands.Withdraw():
                self.tell(hosts, self.withdraw)
            case commands.TakeSnapshot(round):
                stop = self.job.stop.step
                self.tell(hosts, lambda host: self.write_snapshot(host, round, stop))
            case commands.Stop(round):
                self.tell(hosts, lambda host: self.stop(host, round))
            case commands.Discard():
                self.snapshots.clear()
            case commands.Proceed(round):
                assert self.job.attempt.restored >= set(hosts), "not all have restored"
                self.tell(hosts, lambda host: self.in_start(host, round, self.step))
            case commands.Examine(generation):
                self.tell(hosts, lambda host: self.examine(host, generation))
            case commands.Doubt(generation):
                self.doubted.add(generation)
            case commands.Drop(number):
                self.tell(hosts, lambda host: self.drop(host, number))
            case commands.Save():
                self.tell(hosts, lambda host: events.Reported(host.name, reports.Saved()))
            case commands.CheckHealth(order):
                self.tell(hosts, lambda host: self.check_health(host, order))

    def examine(self, host: SimulatedHost, generation: int) -> events.Event:
        """Read a host's part again: what is damaged of it counts no more."""
        found = self.damaged.pop((host.name, generation), None) is not None
        if found:
            self.doubted.discard(generation)
            host.parts.pop(generation, None)
            self.known.get(generation, {}).pop(host.name, None)
            self.job = m.replace_generations(self.job, self.covered())
            loss = "" if self.job.states.generations else "damaged"
            self.job = m.replace_obstacle(self.job, loss, is_held_back=False, loss=loss)
        return events.Reported(
            host.name, reports.Examined(generation, ("w",) if found else (), "/d")
        )

    def check_health(self, host: SimulatedHost, order: int) -> events.Event:
        is_sick = host.name in self.sick
        return events.Reported(
            host.name, reports.HealthChecked(order, not is_sick, "no device" if is_sick else "")
        )

    def knock(self, host: SimulatedHost, order: int, hosts: tuple[str, ...]) -> events.Event:
        unheard = tuple(name for name in hosts if frozenset((name, host.name)) in self.cut)
        return events.Reported(host.name, reports.Knocked(order, unheard))

    def build(self, host: SimulatedHost, round: int) -> events.Event | None:
        assert host.built is None, "two rounds are on standby"
        if host.name in self.cannot_build:
            return events.Reported(host.name, reports.NotBuilt(round, "no room"))
        host.built = round
        standby = self.job.change.standby
        if standby is not None and self.are_cut(standby.assignment.active):
            return None
        return events.Reported(host.name, reports.Built(round))

    @staticmethod
    def give_up(host: SimulatedHost) -> None:
        host.built = None

    def prepare(self, host: SimulatedHost, round: int, stop: int) -> events.Event:
        host.held = stop if self.is_saving and host.round == round else None
        if host.held is not None:
            return events.Reported(host.name, reports.Held(round, stop, "a save"))
        return events.Reported(host.name, reports.Prepared(round, stop, host.step))

    def agree(self, host: SimulatedHost, round: int, stop: int) -> events.Event | None:
        assert host.stop is None, "two stops at once"
        host.stop = stop if host.round == round else None
        return self.arrive(host, round)

    def arrive(self, host: SimulatedHost, round: int | None) -> events.Event | None:
        """The workers come to the stop, where there is one and they can."""
        if host.is_hung or host.is_done or host.stop is None or round is None:
            return None
        if self.are_cut(active(self.job)):
            return None
        host.step, host.stands = host.stop, True
        if self.is_saving:
            return events.Reported(
                host.name, reports.Held(round, host.stop, "a save that began on the way")
            )
        return events.Reported(host.name, reports.Arrived(round, host.stop, host.differing))

    def withdraw(self, host: SimulatedHost) -> None:
        is_written = host.stop is not None and host.written == (host.round, host.stop)
        assert not is_written, "a stop is taken back at which a host has written"
        host.stop, host.stands, host.held = None, False, None

    def write_snapshot(self, host: SimulatedHost, round: int, stop: int) -> events.Event | None:
        if host.round != round:
            return None
        assert host.stands and host.stop == stop, "a snapshot before the workers stand at the stop"
        others = [self.hosts[name] for name in active(self.job)]
        assert all(h.stands or h.round != round for h in others), "not all have arrived"
        # Without room it waits: what was sealed and judged becomes a generation first.
        is_judged = host.name in self.snapshots and host.name in self.job.states.uncommitted
        if is_judged or len(host.parts) > 1:
            self.commands[host.name].append(lambda: self.write_snapshot(host, round, stop))
            return None
        # Its agent ends workers that hang from here on: the host has nothing then.
        pieces = frozenset[int]() if host.is_hung else self.pieces(host.name)
        self.snapshots[host.name] = (round, stop, pieces)
        host.written = round, stop
        return events.Reported(host.name, reports.Sealed(round, "stop", ""))

    def judge(self, hosts: tuple[str, ...]) -> None:
        mine = {h: self.snapshots[h] for h in hosts if h in self.snapshots}
        mine = {
            h: d for h, d in mine.items() if d[:2] == (self.job.round, self.job.stop.step) and d[2]
        }
        is_covered = {p for _, _, pieces in mine.values() for p in pieces} == set(PIECES)
        if is_covered:
            self.numbers += 1
            self.steps[self.numbers] = self.job.stop.step
            self.known[self.numbers] = {h: pieces for h, (_, _, pieces) in mine.items()}
        self.feed(events.Judged(is_covered, self.job.stop.step, self.numbers, frozenset(mine)))

    def replicate(
        self, host: SimulatedHost, order: int, generation: int, giving: tuple[str, ...]
    ) -> events.Event:
        """Keep what the host before this one has, or what those have that will be taken away."""
        names = sorted(self.hosts)
        before = names[names.index(host.name) - 1]
        for ward in [self.hosts[name] for name in giving or (before,) if name in self.hosts]:
            if generation in ward.parts and generation in self.known and not ward.is_silent:
                host.parts[generation] = (
                    host.parts.get(generation, frozenset()) | ward.parts[generation]
                )
                self.known[generation][host.name] = host.parts[generation]
                self.job = m.replace_generations(self.job, self.covered())
        return events.Reported(host.name, reports.Replicated(order, 16))

    def commit(self, host: SimulatedHost, generation: int) -> events.Event:
        snapshot = self.snapshots.get(host.name)
        if snapshot is None or not snapshot[2] or snapshot[1] != self.steps[generation]:
            return events.Reported(
                host.name, reports.WorkersFailed(host.round or 0, "nothing to commit")
            )
        del self.snapshots[host.name]
        assert len(host.parts) < 2, "more than two generations on a host"
        host.parts[generation] = snapshot[2]
        return events.Reported(host.name, reports.Committed(generation))

    def stop(self, host: SimulatedHost, round: int) -> events.Event:
        host.round = host.todo = host.stop = host.held = None
        host.stands = host.is_hung = host.is_done = False  # whatever hangs is ended
        return events.Reported(host.name, reports.Stopped(round, host.step))

    def start(self, action: actions.StartRound) -> None:
        assert all(host.round is None for host in self.hosts.values()), "workers of two rounds"
        assert not self.job.health.checks.keys() & set(action.assignment.active), (
            "a host is not healthy"
        )
        if action.generation is None:
            assert not self.covered(), "a state is there and is not used"
        else:
            assert action.generation == self.covered()[-1].number, "not the newest whole state"
        assert not self.snapshots, "what was sealed is not given up"
        self.is_saving = False  # it has ended with the workers
        self.begun = action
        active, round = action.assignment.active, action.round
        self.tell(active, lambda host: self.in_start(host, round, self.publish))

    def go_back(self, generation: int | None) -> None:
        self.abandoned |= {n for n in self.known if n > (generation or 0)}
        for number in self.abandoned & set(self.known):
            del self.known[number]
        self.tell(tuple(self.hosts), self.drop_abandoned)

    @staticmethod
    def drop(host: SimulatedHost, number: int) -> None:
        host.parts.pop(number, None)

    def drop_abandoned(self, host: SimulatedHost) -> None:
        """The job has gone back behind these."""
        for number in self.abandoned & set(host.parts):
            del host.parts[number]

    def in_start(
        self,
        host: SimulatedHost,
        round: int,
        work: Callable[[SimulatedHost, actions.StartRound], events.Event | None],
    ) -> events.Event | None:
        """The workers of a host do something of a start, where they can."""
        start = self.begun
        if start is None or round not in (self.job.round, start.round):
            return None  # woken too late
        if work == self.publish:
            assert host.built in (None, round), "workers of a round that was given up"
            is_gone, host.built = start.is_built and host.built is None, None
            host.round = round
            if is_gone:
                return events.Reported(
                    host.name, reports.WorkersFailed(round, "what was built is gone")
                )
        if host.round != round:
            return None
        is_met = start.assignment.degrees.world_size not in self.cannot_meet
        if host.is_hung or not is_met or self.are_cut(start.assignment.active):
            host.todo = lambda: self.in_start(host, round, work)
            return None
        return work(host, start)

    def publish(self, host: SimulatedHost, start: actions.StartRound) -> events.Event:
        if start.assignment.degrees.world_size in self.cannot_run:
            return events.Reported(
                host.name, reports.WorkersFailed(start.round, "RuntimeError: not supported")
            )
        return events.Reported(host.name, reports.Published(start.round, ()))

    def restore(self, host: SimulatedHost, start: actions.StartRound) -> events.Event:
        """Plan, move and restore, of one host; with nothing to restore the first step."""
        round, source = start.round, start.generation
        if source is None:
            return self.step(host, start)
        if source not in {generation.number for generation in self.covered()}:
            return events.Reported(host.name, reports.WorkersFailed(round, "nobody holds a piece"))
        if self.damaged.get((host.name, source)) is False:
            return events.Reported(
                host.name, reports.WorkersFailed(round, "StoreError: the file is too short")
            )
        host.parts[source] = host.parts.get(source, frozenset()) | self.pieces(host.name)
        self.known[source][host.name] = host.parts[source]
        self.job = m.replace_generations(self.job, self.covered())
        return events.Reported(host.name, restored(round))

    def prove(self, generation: int) -> None:
        damaged = {name for name, number in self.damaged if number == generation}
        if (self.spoilt | damaged) & active(self.job):
            self.spoilt.clear()
            is_second = generation in self.doubted
            self.feed(events.ProofFailed(self.job.round, "it differs", is_second, not is_second))
            return
        self.doubted.discard(generation)
        self.feed(events.Proven(self.job.round))

    def step(self, host: SimulatedHost, start: actions.StartRound) -> events.Event:
        """The first step."""
        host.step = 1 if start.generation is None else self.steps[start.generation] + 1
        host.is_hung = host.name in self.hangers
        numbers = self.computed.get(start.assignment.degrees.world_size)
        return events.Reported(host.name, reports.Stepped(start.round, numbers))

    def release(self, keep: int | None, leaving: tuple[str, ...]) -> None:
        for name in leaving:
            assert name not in active(self.job), "a host with workers is let go"
            self.hosts.pop(name)
            self.commands.pop(name)
            self.forget(name)
        if keep is None:
            return
        assert self.is_on_disk(keep), "older generations are dropped before the newest is whole"
        for number in [n for n in self.known if n < keep]:
            del self.known[number]
        for host in self.hosts.values():
            for number in [n for n in host.parts if n < keep]:
                del host.parts[number]

    def snapshot(self, late: Collection[str] = (), without: Collection[str] = ()) -> None:
        """Every active host seals a snapshot, the late ones after what they do already, but for
        those ``without``, which say so; the coordinator commits it, if it is whole."""
        hosts = tuple(sorted(active(self.job)))
        round, step = self.job.round, max(self.hosts[name].step for name in hosts)
        if (round, step) == self.marked:
            return  # no worker comes to the same boundary twice
        self.marked = round, step
        self.skipped |= {(name, round, step) for name in without}
        self.tell(tuple(late), lambda host: self.seal(host, round, step))
        for name in hosts:
            reported = None if name in late else self.seal(self.hosts[name], round, step)
            if reported is not None:
                self.feed(reported)

    def seal(self, host: SimulatedHost, round: int, step: int) -> events.Event | None:
        sealed = self.snapshots.get(host.name, (0, 0))
        if host.round != round or len(host.parts) > 1 or sealed[:2] > (round, step):
            return None
        if (host.name, round, step) in self.skipped:
            return events.Reported(host.name, reports.Skipped(round, f"run-{round}-{step}"))
        self.snapshots[host.name] = (round, step, self.pieces(host.name))
        return events.Reported(
            host.name, reports.Sealed(round, "snapshot", f"run-{round}-{step}", b"")
        )

    def judge_snapshot(self, snapshot: str) -> None:
        step = int(snapshot.rpartition("-")[2])
        mine = {h: d[2] for h, d in self.snapshots.items() if d[:2] == (self.job.round, step)}
        # Who has sealed a later one by now has given this one up for it.
        later = {h for h, d in self.snapshots.items() if d[:2] > (self.job.round, step)}
        skipped = {h for h, *at in self.skipped if at == [self.job.round, step]}
        assert active(self.job) <= mine.keys() | later | skipped, "not all have sealed"
        if {p for pieces in mine.values() for p in pieces} == set(PIECES):
            self.numbers += 1
            self.steps[self.numbers] = step
            self.known[self.numbers] = mine
            self.feed(events.SnapshotJudged(tuple(sorted(mine)), step, self.numbers))


def job(**settings: Any) -> m.Job:
    """Return a job as a coordinator makes it."""
    return made(**{"assign": assign_all(), "max_hosts": 3, "settle_s": 1.0, **settings})
