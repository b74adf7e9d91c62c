"""The worker's side of an elastic job, for a training loop.

A dozen lines in a loop of one's own::

    import scalai

    with scalai.elastic() as job:
        ...build with job.tp and job.pp...
        job.attach(scalai.MegatronState(model, optimizer, scheduler))
        while job.step < steps:
            ...train one step...
            if job.boundary(samples=global_batch_size):
                break

Outside ``scalai-run --elastic`` a session is inert: it returns the given degrees, restores nothing
and never stops the loop.
"""

import logging
import math
import os
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import torch

from scalai.core.dataset.drawn import Draw
from scalai.core.dataset.order import GlobalOrder
from scalai.core.degrees.batches import Batches
from scalai.core.degrees.passes import Offload
from scalai.core.errors import LayoutError, PeerError, RefusedError, UsageError
from scalai.core.host.standby import bytes_ahead
from scalai.core.job.function_proof import MOST_STEPS, Numbers
from scalai.core.job.spacing import Schedule
from scalai.core.jsonable import Json
from scalai.core.messages.shared import JsonText
from scalai.core.messages.worker_messages import (
    AtBrink,
    AwaitPieces,
    AwaitRound,
    Hello,
    Publish,
    RankFailed,
    RankFinished,
    RankStepped,
    Source,
    Stand,
    Welcome,
)
from scalai.core.tensors.region import Piece
from scalai.runtime.agent_folder import AGENT_DIRECTORY, call_agent, round_number, tell_agent
from scalai.runtime.brink import has_any_to_stop, memory_here
from scalai.runtime.calls import Channel
from scalai.runtime.consumption import LEDGER, Consumption, Contradiction
from scalai.runtime.control import ControlPage, control_path
from scalai.runtime.emergency_writer import watch_collectives
from scalai.runtime.failpoints import here, reached
from scalai.runtime.live import (
    Get,
    LiveState,
    Registered,
    Set,
    Slot,
    collection_of,
    held_rows,
    wanted_rows,
)
from scalai.runtime.live_files import fill_state
from scalai.runtime.processes import imported, private_bytes
from scalai.runtime.rank_snapshots import Snapshots
from scalai.runtime.restore_proof import RestoreProof
from scalai.runtime.staging import StagingRing, rings_for
from scalai.runtime.step_passes import PassAtHand, PassClock, StepPasses
from scalai.runtime.trackers import note_round
from scalai.runtime.unstored import UnstoredBuild


class MadeSteps:
    """Loss and gradient norm of the newest steps of one rank.

    Args:
        report: Takes a step, its loss and its norm; NaN: unknown.
    """

    def __init__(self, report: Callable[[int, float, float], None]) -> None:
        self._report = report
        self._on_the_way: deque[tuple[int, _Copy, _Copy]] = deque(maxlen=MOST_STEPS)

    def note(self, step: int, loss: Any, norm: Any) -> None:
        """Note an ended step. Numbers on a device are reported with a later step, once they have
        come.
        """
        self._on_the_way.append((step, _Copy(loss), _Copy(norm)))
        while self._on_the_way and all(copy.is_there for copy in self._on_the_way[0][1:]):
            step, loss, norm = self._on_the_way.popleft()
            self._report(step, loss.value, norm.value)


class _Copy:
    """A number, or a tensor of one on its way from a device into pinned memory."""

    def __init__(self, number: Any) -> None:
        self._number = number
        self._event: Any = None
        if isinstance(number, torch.Tensor) and number.is_cuda:
            self._number = number.detach().to("cpu", non_blocking=True)  # pinned by this copy
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(number.device))

    @property
    def is_there(self) -> bool:
        return self._event is None or bool(self._event.query())

    @property
    def value(self) -> float:
        return math.nan if self._number is None else float(self._number)


Row = tuple[Slot, Piece]

SIZES, WEIGHTED = "batch_sizes", "is_weighted"
"""Facts of a loop of one's own: sizes of its global batches, the usual one last; whether it weighs
its losses."""

log = logging.getLogger(__name__)

_current: "Session | None" = None


def current() -> "Session | None":
    """Return this process's session, None before ``elastic``."""
    return _current


def elastic(**defaults: int) -> "Session":
    """Return this worker's session: a context with the degrees.

    Args:
        defaults: Degrees (``tp``, ``pp``, ``vpp``) for a run outside ``scalai-run --elastic``.
    """
    global _current
    if _current is None:
        _current = Session(**defaults)
    return _current


@dataclass(eq=False, slots=True)
class _Link:
    agent: Channel
    page: ControlPage
    made: MadeSteps
    round: int
    local_rank: int

    def report(self, step: int) -> None:
        self.page.report(self.local_rank, step)

    def report_within(self, *, is_within: bool) -> None:
        self.page.report_within(self.local_rank, is_within=is_within)


@dataclass(eq=False, slots=True)
class _Attached:
    """The live state, this rank's held rows, and their pinned buffers by device."""

    state: LiveState
    held: list[Row] = field(default_factory=list)
    rings: Mapping[torch.device, StagingRing] = field(default_factory=dict)
    snapshots: Snapshots | None = None
    proof: RestoreProof | None = None
    restored_step: int | None = None
    steps_lost: int = 0


@dataclass(eq=False, slots=True)
class _Progress:
    """Progress of this worker in its round.

    Attributes:
        is_compared: The workers have to prove the change at the first step.
        is_own_loop: The state itself notes the numbers of steps: no framework's hooks do.
        numbers: Numbers of the step under way, before its update.
        process: Number of the training process; a fork has another one.
        save_in_flight: Iteration of the framework's oldest save under way.
    """

    is_stopped: bool = False
    has_stepped: bool = False
    is_compared: bool = False
    is_own_loop: bool = False
    numbers: Numbers | None = None
    schedule: Schedule = field(default_factory=lambda: Schedule(0))
    process: int = field(default_factory=os.getpid)
    save_in_flight: int | None = None


class Session:
    """One worker's part in one round of an elastic job.

    Attributes:
        tp, pp, dp, vpp, cp, ep: Degrees of this round.
        micro_batch_size: Samples a forward pass and replica; None: undecided.
        offload: State in host memory; None: by the script's flags.
        paces: Time of a pass on each replica, for its share of the batch; empty: all are alike,
            None: shares are even, and nothing is measured.
        step, consumed_samples: Progress: 0 on a fresh start, the generation's after ``attach``.
        restorable_step: Step of the generation for ``attach``, or None. A standby worker will find
            a later one.
        is_standby: The training of the round before goes on. ``attach``, or ``hold_at_brink``,
            returns once the old workers have stopped.
        is_at_brink: Memory does not hold a second model beside the training: behind ``begin_build``
            the model of this standby worker has no storage until ``attach`` restores it, and
            ``hold_at_brink`` waits.
        facts: Facts of the job's first workers (``report_facts``); empty on a fresh start.
        settings: Elastic configuration of a framework's hooks.
        is_measured: A framework's hooks call ``note_numbers``. Else the state may, from ``attach``
            on (``watch_steps``).
        replaying: Value of ``is_replaying``, set by a framework's hooks.
        why_even: Reason of the attached state against uneven shares of the batch; empty: none.
    """

    def __init__(self, **defaults: int) -> None:
        self.step = 0
        self.consumed_samples = 0
        self.micro_batch_size: int | None = None
        self.offload: Offload | None = None
        self.paces: tuple[int, ...] | None = None
        self.restorable_step: int | None = None
        self.is_standby = False
        self.is_at_brink = False
        self.facts: Mapping[str, Json] = {}
        self.settings: Mapping[str, Json] = {}
        self.replaying: Callable[[], bool] = lambda: False
        self.is_measured = False
        self.why_even = ""
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0"))
        self.run = "-"
        self._registered = Registered()
        self._reported: dict[str, Json] = {}
        self._attached: _Attached | None = None
        self._progress = _Progress()
        self._link: _Link | None = None
        self._welcome: Welcome | None = None
        self._clock: PassClock | None = None
        self._brink: AtBrink | None = None
        self._unstored: UnstoredBuild | None = None
        degrees = {"tp": 1, "pp": 1, "vpp": 1, "cp": 1, "ep": 1, **defaults}
        directory = os.environ.get(AGENT_DIRECTORY)
        if directory is not None:
            degrees.update(self._join(Path(directory)))
        self.tp, self.pp, self.vpp = degrees["tp"], degrees["pp"], degrees["vpp"]
        self.cp, self.ep = degrees["cp"], degrees["ep"]
        self.dp = self.world_size // (self.tp * self.pp * self.cp)
        shares = {axis: getattr(self, axis) for axis in ("tp", "pp", "dp", "cp", "ep")}
        of = f"{self.run}-{round_number()}"
        self._consumption = Consumption(of, shares, is_telling=self.rank == 0)
        self._pass = PassAtHand(self.begin_pass)

    def _join(self, directory: Path) -> Mapping[str, int]:
        agent, round = call_agent(str(directory)), round_number()
        page = ControlPage(control_path(directory, round))
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self._link = _Link(agent, page, MadeSteps(page.report_made), round, local_rank)
        here(
            {
                str(self.rank): os.getpid(),
                directory.parent.name: int(os.environ["SCALAI_AGENT_PID"]),
            }
        )
        welcome = self._welcome = agent.call(Hello(self.rank, round, imported(local_rank)))
        self.micro_batch_size = welcome.micro_batch_size
        self.offload, self.paces = welcome.offload, welcome.paces
        if self.paces is not None:
            self._clock = PassClock(partial(page.report_pace, local_rank))
        self.restorable_step = welcome.restorable_step
        self.is_standby, self.is_at_brink = welcome.is_standby, welcome.is_at_brink
        self.facts, self.settings = welcome.facts.value(), welcome.settings.value()
        self.run = welcome.run
        self._progress.schedule = Schedule(welcome.snapshot_every)
        return welcome.degrees

    @property
    def is_elastic(self) -> bool:
        """True if this worker has an agent."""
        return self._link is not None

    @property
    def is_attached(self) -> bool:
        """True after ``attach``: the job's state is known."""
        return self._attached is not None

    @property
    def is_stopped(self) -> bool:
        """True once ``boundary`` has returned True."""
        return self._progress.is_stopped

    @property
    def is_proving(self) -> bool:
        """True if this step needs ``note_numbers``: the round's first one, or one behind its
        stop.
        """
        return self._link is not None and (
            not self._progress.has_stepped or self._progress.is_stopped
        )

    @property
    def is_compared(self) -> bool:
        """True if this step is compared with another layout's, despite other random numbers.

        It is the round's first one, if its workers have to prove the change, or one behind its
        stop.
        """
        return self.is_proving and (self._progress.is_compared or self.is_to_prove)

    @property
    def is_to_prove(self) -> bool:
        """True if this worker, with its state written, must make its next step up to its update,
        call ``note_numbers``, and leave.

        Nothing of this step is kept: a script that evaluates, saves or ends before it leaves there.
        """
        return (
            self._link is not None
            and self._progress.is_stopped
            and self._link.page.must_prove(self.step)
        )

    def note_numbers(self, numbers: Numbers) -> None:
        """Note a step's numbers before its update. Call before ``boundary``.

        Behind a stop there is no ``boundary``: they go to the agent now.
        """
        self._progress.numbers = numbers
        if self._link is not None and self._progress.is_stopped:
            stepped = RankStepped(self.rank, self._link.round, self.step + 1, None, numbers)
            self._link.agent.call(stepped)

    def note_made(self, loss: Any, norm: Any) -> None:
        """Note the results of the ending step, on one rank of the job; a repetition of a lost step
        is compared with them.

        Numbers, or tensors of one; waits for no device.
        """
        if self._link is not None:
            self._link.made.note(self.step + 1, loss, norm)

    def note_draws(self, *draws: Draw) -> None:
        """Note the samples drawn by the step under way, before ``boundary``; else the job's ledger
        counts each step's samples.

        Without draws: this rank draws no samples in this round, others report.
        """
        self._consumption.note(draws)

    def note_sources(self, sources: Mapping[str, Mapping[str, Json]]) -> None:
        """Note the facts behind the order of each data set, such as size and seed.

        Call on every rank with the same draws, at least once a round. Other facts are not compared.

        Raises:
            RefusedError: A data set was another one before.
        """
        self._consumption.know(sources)

    def begin_pass(self, number: int, passes: int) -> None:
        """Note the begin of a pass of the training, for this replica's next share of the batch.

        Args:
            number: From 0 on, in each step.
            passes: Passes of this replica in the step.
        """
        if self._clock is not None:
            self._clock.begin_pass(number, passes)

    def keep_even(self, why: str, *, tells: bool | None = None) -> None:
        """Measure no passes: all replicas have to make equally many. Call on every rank alike,
        before the first step; later while ``paces`` are empty, on the ranks that know.

        Args:
            tells: Whether this rank logs it; None: the first one does.
        """
        if self.paces is not None and (self.rank == 0 if tells is None else tells):
            log.warning("event=even_shares not by measured speeds: %s", why)
        self.paces = self._clock = None

    def draw_from(self, order: GlobalOrder, contradiction: Contradiction = lambda *_: None) -> None:
        """Let steps draw in an order of Scalai's own; call on every rank alike.

        The ledger then has its samples data set by data set. Arguments and errors as of
        ``Consumption.draw_from``.
        """
        self._consumption.draw_from(order, contradiction)

    def deal_passes(
        self,
        passes: Callable[[], StepPasses],
        sizes: Sequence[int],
        *,
        is_weighted: bool,
        is_drawing: Callable[[], bool],
        why_as_many: str,
    ) -> None:
        """Set the passes of the training's steps; call on every rank alike.

        Args:
            passes: Returns those of the step under way.
            sizes: Samples of the global batches, the usual one last.
            is_weighted: The loop says that it weighs its losses: DP need not divide the batches.
            is_drawing: Whether this rank has drawn batches: then it asks in each pass for its
                weight.
            why_as_many: Reason for equally many passes on all replicas; empty: none.

        Raises:
            UsageError: The loop weighs its losses, and ``attach`` was called already.
        """
        if is_weighted and self.is_elastic and self.is_attached:
            raise UsageError(
                "OrderedBatches with is_weighted=True were made behind attach(), which tells the "
                "job of it. Make them before."
            )
        if why_as_many:
            self.keep_even(why_as_many)
        self._pass.deal(passes, is_drawing if is_weighted else None)
        self.report_facts(**{SIZES: list(sizes), WEIGHTED: is_weighted})

    def passes_of(self, batches: Batches, dp_rank: int, *, is_trained: bool) -> StepPasses:
        """Return the passes of a step; ``is_trained`` False: of an evaluation."""
        return StepPasses(batches, dp_rank, self._pass, is_trained=is_trained)

    @property
    def passes(self) -> StepPasses:
        """Passes of each replica in the step under way, fillers included: a number, and ``for _ in
        job.passes`` goes over them.

        Raises:
            UsageError: No ``OrderedBatches`` were made.
            RefusedError: DP does not divide their batch, and the loop does not weigh its losses.
        """
        return self._pass.of_step()

    @property
    def is_filler(self) -> bool:
        """True if the pass at hand repeats this replica's first micro-batch of the step.

        Raises:
            UsageError: No pass is at hand.
        """
        return self._pass.is_filler

    @property
    def weight(self) -> float:
        """Factor of the loss of the pass at hand, so that a mean over passes and replicas counts
        each micro-batch alike: 0 for a filler, 1 where shares are even.

        Raises:
            UsageError: No pass is at hand.
        """
        return self._pass.weight

    @property
    def stop_urgency(self) -> int:
        """Urgency of a change waiting for saves, as known to this host.

        0: none waits; 1: one waits; 2: one was put off before, because another save began on the
        way to it.
        """
        return 0 if self._link is None else self._link.page.stop_urgency()

    def note_save(self, iteration: int | None) -> None:
        """Note the framework's save in flight: it would end with this process.

        The training goes on, and stops only after the save. Call on every rank alike, with the same
        value at the same step.

        Args:
            iteration: Iteration of the oldest save in flight; None: none.
        """
        self._progress.save_in_flight = iteration
        if self._link is not None and self._link.local_rank == 0:
            self._link.page.report_save(iteration)

    @property
    def is_replaying(self) -> bool:
        """True while the script, run from its beginning, is in epochs or steps of an earlier round.

        That round has already done their evaluations, saves and early stops.
        """
        return self.replaying()

    @property
    def registered(self) -> tuple[str, ...]:
        """The names of ``register_state``."""
        return self._registered.names

    def __enter__(self) -> "Session":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.finish()

    def register_state(self, name: str, get: Get, set: Set) -> None:
        """Carry a value beside model and optimizer. Call before ``attach``, on every rank alike.

        Args:
            get: Returns JSON, or a tensor equal on all ranks; rank 0's is kept. A tensor present
                from the start is carried like the state; a later one goes through the coordinator,
                so keep it small.
            set: Takes it back, on every rank of the next round.

        Raises:
            UsageError: The name is taken, or ``attach`` was called already.
        """
        if self._attached is not None or name in self._registered.names:
            raise UsageError(
                f"register_state({name!r}): the name is taken, or attach() was called already. "
                "Register each name once, before attach()."
            )
        self._registered.add(name, get, set)

    def report_facts(self, **facts: Json) -> None:
        """Report the script's facts for later rounds, such as ``padded_vocab_size``."""
        self._reported.update(facts)

    def begin_build(self) -> None:
        """Announce the build of the model and the optimizer; optional. Call on every rank, once
        groups of processes and data sets are there.

        With it a change may have its next workers built beside the training where memory does not
        hold two models (``is_at_brink``). Such a build makes its parameters, and what is made of
        them, without storage, up to ``attach``: it may not compute values from them.
        """
        if self._come_to_brink() and self.is_at_brink:
            self._unstored = UnstoredBuild()
            self._unstored.begin()

    def hold_at_brink(self) -> None:
        """Announce that model and optimizer take their memory from here on, by code that cannot
        build without storage (``begin_build``). Call on every rank; another call does nothing.

        A standby worker waits here for its round, if memory does not hold two models on some host
        of the job: a build has collectives, so that all ranks wait or none.

        Raises:
            RuntimeError: The round's rendezvous is gone.
            PeerError: So is the agent, or the round is given up.
        """
        welcome, link = self._welcome, self._link
        if not self._come_to_brink() or link is None or welcome is None:
            return
        if not welcome.is_from_standby:
            return
        if has_any_to_stop(self.world_size, has_this=self.is_at_brink):
            reached("build")
            link.agent.call(AwaitRound(self.rank, link.round))
            self.is_standby = False

    def _come_to_brink(self) -> bool:
        """Measure what this worker has taken on its way; False: it is behind the brink."""
        if self._brink is not None:
            return False
        self._brink = memory_here()
        return True

    def attach(
        self, state: LiveState, *, step: int = 0, samples: int = 0, restore: bool = True
    ) -> bool:
        """Take part: publish this rank's state, restore it from the generation, or store the
        initial state.

        Call on every rank, once model, optimizer and scheduler are built. Blocks until this rank's
        part is restored; until all are proven if the state does not announce its updates, which
        else wait for that. A worker that ``is_standby`` first waits for the end of the
        training.

        Args:
            step, samples: Progress of the built state, if it comes from the framework's own
                checkpoint.
            restore: False: keep the built state despite a generation, on all ranks alike.

        Returns:
            True if a generation was restored: ``step`` and ``consumed_samples`` are its.

        Raises:
            UsageError: The job takes part already: a process has one state.
        """
        if self._attached is not None:
            raise UsageError(
                "attach() was called already. deepspeed.initialize and Megatron-LM's own training "
                "call it; remove the script's call."
            )
        attached = self._attached = _Attached(state)
        self.step, self.consumed_samples = step, samples
        self.why_even = getattr(state, "why_even", "")
        if self.why_even and self._reported.get(WEIGHTED) and self.rank == 0:
            log.warning("event=even_shares DP divides the batch: %s", self.why_even)
        if self.why_even:
            self.keep_even(self.why_even)
        if self._link is None or self._welcome is None:
            return False
        slots = [*state.slots(), *self._registered.slots()]
        attached.held, wanted = held_rows(slots), wanted_rows(slots)
        if not self.is_measured and (watch := getattr(state, "watch_steps", None)) is not None:
            self._progress.is_own_loop = True
            watch(self)
            if not self._pass.is_dealt:
                self.keep_even("no OrderedBatches deal the samples of the loop")
        # Before the first step: pinning memory is slow and may wait for the device.
        attached.rings = rings_for({slot.buffer.device for slot in slots})
        if attached.rings:
            watch_collectives(lambda: not self._progress.is_stopped, self.end_by_collective)
        filled = [slot.buffer for slot, _ in wanted]
        if self._unstored is not None:
            self._unstored.check(filled)
            self._unstored.end()
            self._take_ahead(self._unstored)
        reached("build" if self.is_standby else "relaunch")
        source = self._link.agent.call(
            Publish(
                rank=self.rank,
                round=self._link.round,
                is_restoring=restore,
                held=collection_of(attached.held),
                wanted=collection_of(wanted),
                coordinate=state.coordinate,
                facts=JsonText.of(self._facts()),
                uses_devices=any(slot.buffer.device.type != "cpu" for slot in slots),
                brink=self._brink,
            )
        )
        storage_s: float | None = None
        if self._unstored is not None:
            storage_s = self._unstored.take_back(filled if source is not None else ())
        attached.snapshots = Snapshots(
            self._link.agent, self.rank, self._link.round, state, attached.held, attached.rings,
            self._registered, self._consumption,
            partial(self._link.page.between_steps, self._link.local_rank),
        )  # fmt: skip
        if self._progress.schedule.every and self._welcome.is_async:
            attached.snapshots.write_beside_training()
        if source is None:
            self._consumption.begin(step, samples, "the state is a checkpoint of the framework's")
            self._snapshot("start")
        else:
            self._restore(wanted, source, storage_s)
        self._link.report(self.step)
        return source is not None

    def _take_ahead(self, unstored: UnstoredBuild) -> None:
        """Take as much of the model's memory as there is room for beside the training."""
        if self._welcome is not None and self._welcome.beside is not None:
            needed = private_bytes(os.getpid()) + unstored.size
            unstored.take_ahead(bytes_ahead(needed, self._welcome.beside))

    def _facts(self) -> dict[str, Json]:
        """Return the script's facts for later rounds."""
        facts = {**self.facts, **self._reported}
        if WEIGHTED in facts:  # each round's script says so anew
            facts[WEIGHTED] = bool(self._reported.get(WEIGHTED)) and not self.why_even
        return facts

    def await_proof(self) -> None:
        """Wait until the restored state of the whole job is proven: its first update does so.

        What leaves the job before, such as a save, calls this first.
        """
        if self._attached is not None and self._attached.proof is not None:
            self._attached.proof.await_verdict()

    def renew(self, state: LiveState, *, step: int, samples: int) -> None:
        """Report, after ``attach``, that the framework has loaded a checkpoint of its own.

        Args:
            state: The same tensors, possibly at other places.
            step, samples: Progress of the loaded state.

        Raises:
            LayoutError: They are other tensors, or other parts of them.
        """
        self.await_proof()
        self.step, self.consumed_samples = step, samples
        attached = self._attached
        if attached is None:
            return
        attached.state = state
        if self._link is None:
            return
        self._consumption.begin(step, samples, "the framework has loaded a checkpoint")
        held = held_rows([*state.slots(), *self._registered.slots()])
        if collection_of(held).to_json() != collection_of(attached.held).to_json():
            raise LayoutError(
                "the checkpoint has brought other tensors than the model and the optimizer had. "
                "Load it before the job becomes elastic, or run without --elastic."
            )
        attached.held = held
        if attached.snapshots is not None:
            attached.snapshots.renew(state, held)
        self._link.report(self.step)

    def begin_update(self) -> None:
        """Announce a change of the state's memory, until ``boundary``.

        Optimizers of torch do so by themselves. A loop with other updates calls it before each one.
        Otherwise this worker's memory is not used after others' failures: the job goes on from its
        newest generation.
        """
        self.await_proof()
        if self._attached is not None and self._attached.snapshots is not None:
            self._attached.snapshots.begin_update()

    def begin_step(self) -> None:
        """Note the begin of a step; optional.

        Work between two steps (evaluations, saves) may take ``resize.hang_s``; within a step a hang
        is noticed sooner, once the usual step is known.
        """
        if self._link is not None:
            self._link.report_within(is_within=True)

    def end_step(self) -> None:
        """Note its end, if ``boundary`` is called later, behind an evaluation."""
        if self._link is not None:
            self._link.report_within(is_within=False)

    def boundary(
        self, step: int | None = None, consumed_samples: int | None = None, *, samples: int = 0
    ) -> bool:
        """Report the end of an optimizer step. Call on every rank after each step.

        Costs one read of shared memory. Writes the state if a stop is agreed for this step.

        Args:
            step: Optimizer steps done; None: one more than before.
            consumed_samples: Samples trained on; None: ``samples`` more than before.

        Returns:
            True: leave the loop and exit with 0; the next round goes on from here. If a change is
                proven, a loop of one's own goes on behind its stop (``is_to_prove``) up to its next
                update, and leaves there.

        Raises:
            RefusedError: The samples differ from those of ``OrderedBatches``, or the loop has not
                weighed its losses although it says so.
        """
        if self._progress.is_stopped:
            return True  # a loop of one's own without an update behind its stop
        self.await_proof()
        self.step = self.step + 1 if step is None else step
        before = self.consumed_samples
        self.consumed_samples = before + samples if consumed_samples is None else consumed_samples
        self._consumption.check(self.step, before, self.consumed_samples)
        self._pass.step_ended(self.step)
        if self._clock is not None:
            self._clock.step_ended()
        self.end_step()
        link, snapshots = self._link, self._attached.snapshots if self._attached else None
        if link is None or snapshots is None:
            return False
        self._consumption.step_ended(self.step, self.consumed_samples)
        if not self._progress.has_stepped:
            self._progress.has_stepped = True
            imports = imported(link.local_rank)
            stepped = RankStepped(self.rank, link.round, self.step, imports, self._progress.numbers)
            link.agent.call(stepped)
            degrees = {axis: getattr(self, axis) for axis in ("tp", "pp", "dp")}
            lost = self._attached.steps_lost if self._attached else 0
            note_round(
                {"round": link.round, **degrees, "ranks": self.world_size, "steps_lost": lost},
                self.step,
            )
            snapshots.map_next()
            if self._welcome is not None and self._welcome.has_emergency:
                snapshots.watch_for_failures()
        snapshots.step_ended(self.step, self.consumed_samples)
        link.report(self.step)
        self._progress.schedule = self._progress.schedule.at(self.step, link.page.spaced())
        reached("step")
        if link.page.must_stop(self.step) and self._come_to_stop():
            self._progress.is_stopped = True
            # Behind a stop the loop makes its next step, and leaves at the door of the update.
            return not (self._progress.is_own_loop and self.is_to_prove)
        if self._progress.schedule.is_due(self.step):
            snapshots.take_on_the_way(self.step, self.consumed_samples)
        return self._progress.is_stopped

    @property
    def can_be_rescued(self) -> bool:
        """True if this process's state is written should the round fail now."""
        is_fork = os.getpid() != self._progress.process
        snapshots = self._attached.snapshots if self._attached is not None else None
        is_watched = snapshots is not None and snapshots.are_watched
        return is_watched and not self._progress.is_stopped and not is_fork

    def end_by_collective(self, reason: str) -> None:
        """End this process after a failed collective between devices, which raises nothing.

        If possible, the agent ends it once its state is written.
        """
        if self.can_be_rescued:
            self.wait_to_be_rescued(reason)
        print(f"scalai: {reason}", file=sys.stderr, flush=True)
        os._exit(1)

    def wait_to_be_rescued(self, reason: str) -> None:
        """Wait, after the script's failure, for the agent to write the state and end this process.

        Returns if the agent is gone.
        """
        with suppress(PeerError):
            tell_agent(lambda rank, round: RankFailed(rank, round, reason))

    def _come_to_stop(self) -> bool:
        """Snapshot, and return True to leave.

        A save in flight, there on all ranks alike, is reported; the stop then comes later.
        """
        if self._progress.save_in_flight is None:
            return self._snapshot("stop")
        assert self._link is not None
        self._link.agent.call(
            Stand(self.rank, self._link.round, self.step, self._progress.save_in_flight)
        )
        return False

    def finish(self) -> None:
        """Report the end of the training; the end of the context does so too.

        Raises:
            RefusedError: By ``check_end``.
        """
        self.check_end()
        is_fork = os.getpid() != self._progress.process  # its end is not the training's
        if self._link is not None and not self._progress.is_stopped and not is_fork:
            self.await_proof()
            if self._attached is not None and self._attached.snapshots is not None:
                self._attached.snapshots.settle()
            ledger = self._consumption.scalars().get(LEDGER)
            told = None if ledger is None else JsonText.of(ledger)
            self._link.agent.call(RankFinished(self.rank, self._link.round, self.step, told))
            self._progress.is_stopped = True

    def check_end(self) -> None:
        """Check, at the script's end, that it has reached the training's progress.

        Raises:
            RefusedError: It has ended in an epoch of an earlier round.
        """
        restored_step = self._attached.restored_step if self._attached is not None else None
        has_stepped = self.step != restored_step or self._progress.is_stopped
        if not has_stepped and self.is_replaying:
            raise RefusedError(
                f"the script has ended in an epoch of an earlier round; the training is at step "
                f"{self.step}. Something of its own has ended it, as early stopping does that "
                "evaluates those epochs again: do that only where scalai.elastic().is_replaying is "
                "False, and carry what it keeps by register_state."
            )

    def _snapshot(self, reason: str) -> bool:
        """Write the agent's order. Returns False if the stop was withdrawn.

        At a stop the order comes once the workers of every host have reached it.
        """
        assert self._attached is not None and self._attached.snapshots is not None
        return self._attached.snapshots.take(reason, self.step, self.consumed_samples)

    def _restore(self, wanted: Sequence[Row], source: Source, storage_s: float | None) -> None:
        assert self._link is not None and self._attached is not None
        agent, asked = self._link.agent, AwaitPieces(self.rank, self._link.round)
        filled = fill_state(
            self._attached.state, wanted, source, self._attached.rings, lambda: agent.call(asked)
        )
        if storage_s is not None:  # a part of the restore
            note = f"{filled.note} storage_s={storage_s:.3f}"
            filled = replace(filled, note=note, began=filled.began - storage_s)
        self.step, self._progress.is_compared = source.step, source.proves
        self.consumed_samples = cast(int, source.consumed_samples)  # or as the script counts them
        self._attached.restored_step = self.step
        self._attached.steps_lost = sum(lost.until - lost.after for lost in source.lost)
        ledger = filled.scalars.get(LEDGER)
        self._consumption.restore(ledger, self.step, self.consumed_samples, source.lost)
        self._registered.put(filled.scalars["user"])
        proof = RestoreProof(self.rank, self._link.round, wanted, filled)
        if getattr(self._attached.state, "announces_updates", False):
            self._attached.proof = proof
            proof.begin(os.environ[AGENT_DIRECTORY])
        else:
            self._link.agent.call(proof.report())
