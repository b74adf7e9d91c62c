"""The worker's side of an elastic job: what a training loop talks to.

A dozen lines in a loop of one's own::

    import scalai

    with scalai.elastic() as job:
        ...build with job.tp and job.pp...
        job.attach(scalai.MegatronState(model, optimizer, scheduler))
        while job.step < steps:
            ...train one step...
            if job.boundary(samples=global_batch_size):
                break

Outside ``scalai-run --elastic`` a session is inert: it hands out the degrees that it was given,
restores nothing and never stops the loop.
"""

import math
import os
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import torch

from scalai.core.errors import LayoutError, PeerError, RefusedError, UsageError
from scalai.core.job.function_proof import MOST_STEPS, Numbers
from scalai.core.job.spacing import Schedule
from scalai.core.jsonable import Json
from scalai.core.messages.shared import JsonText
from scalai.core.messages.worker_messages import (
    Hello,
    Publish,
    RankFailed,
    RankFinished,
    RankStepped,
    Source,
    Stand,
)
from scalai.core.tensors.region import Piece
from scalai.runtime.agent_folder import AGENT_DIRECTORY, call_agent, round_number, tell_agent
from scalai.runtime.calls import Channel
from scalai.runtime.consumption import LEDGER, Consumption
from scalai.runtime.control import ControlPage, control_path
from scalai.runtime.drawing import Drawing
from scalai.runtime.emergency import watch_collectives
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
from scalai.runtime.processes import imported
from scalai.runtime.rank_snapshots import Snapshots
from scalai.runtime.restore import fill_state
from scalai.runtime.staging import StagingRing, rings_for


class MadeSteps:
    """Loss and gradient norm of the newest steps of one rank.

    Args:
        report: Takes a step, its loss and its norm; NaN: not known.
    """

    def __init__(self, report: Callable[[int, float, float], None]) -> None:
        self._report = report
        self._on_the_way: deque[tuple[int, _Copy, _Copy]] = deque(maxlen=MOST_STEPS)

    def note(self, step: int, loss: Any, norm: Any) -> None:
        """A step has ended. What lies on a device is told with a later step, once it has come."""
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
            self._number = number.detach().to("cpu", non_blocking=True)  # pinned by that
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(number.device))

    @property
    def is_there(self) -> bool:
        return self._event is None or bool(self._event.query())

    @property
    def value(self) -> float:
        return math.nan if self._number is None else float(self._number)


Row = tuple[Slot, Piece]

_current: "Session | None" = None


def current() -> "Session | None":
    """Return this process's session, None before ``elastic``."""
    return _current


def elastic(**defaults: int) -> "Session":
    """Return this worker's session: a context that hands out the degrees.

    Args:
        defaults: Degrees (``tp``, ``pp``, ``vpp``) for a run outside ``scalai-run --elastic``.
    """
    global _current
    if _current is None:
        _current = Session(**defaults)
    return _current


class Session(Drawing):
    """One worker's part in one round of an elastic job.

    Attributes:
        tp, pp, dp, vpp, cp, ep: Degrees of this round.
        rank, world_size: This worker among those of the round.
        micro_batch_size: Samples a forward pass and replica; None where nobody has decided on it.
        step, consumed_samples: How far the training is: 0 on a fresh start, those of the generation
            after ``attach``.
        restorable_step: Step of the generation that ``attach`` will restore; None where there is
            none. A worker that ``is_standby`` will find a later one.
        is_standby: Whether this worker was started while those of the round before still train.
            ``attach`` returns once they have stopped.
        facts: What the job's first workers told by ``report_facts``; empty on a fresh start.
        settings: What the elastic configuration says to a framework's hooks.
        is_measured: Whether a framework's hooks call ``note_numbers``. Else the state may, from
            ``attach`` on (``watch_steps``).
        replaying: What a framework's hooks say for ``is_replaying``.
    """

    def __init__(self, **defaults: int) -> None:
        self.step = 0
        self.consumed_samples = 0
        self.micro_batch_size: int | None = None
        self.restorable_step: int | None = None
        self.is_standby = False
        self.facts: Mapping[str, Json] = {}
        self.settings: Mapping[str, Json] = {}
        self.replaying: Callable[[], bool] = lambda: False
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0"))
        self._round, self._process = round_number(), os.getpid()
        self._local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self._registered = Registered()
        self._reported: dict[str, Json] = {}
        self._state: LiveState | None = None
        self._held: list[Row] = []
        self._rings: Mapping[torch.device, StagingRing] = {}
        self._restored_step: int | None = None
        self._is_stopped = False
        self._has_stepped = False
        self._is_compared = False
        self._numbers: Numbers | None = None
        self.is_measured = False
        self._is_own_loop = False
        self._save_in_flight: int | None = None
        self._schedule, self._is_async, self._has_emergency = Schedule(0), False, False
        self._snapshots: Snapshots | None = None
        self._agent: Channel | None = None
        degrees = {"tp": 1, "pp": 1, "vpp": 1, "cp": 1, "ep": 1, **defaults}
        self.run = "-"
        directory = os.environ.get(AGENT_DIRECTORY)
        if directory is not None:
            self._agent = call_agent(directory)
            self._page = ControlPage(control_path(Path(directory), self._round))
            self._made = MadeSteps(self._page.report_made)
            host, agent = Path(directory).parent.name, int(os.environ["SCALAI_AGENT_PID"])
            here({str(self.rank): os.getpid(), host: agent})
            welcome = self._agent.call(Hello(self.rank, self._round))
            degrees.update(welcome.degrees)
            self.micro_batch_size = welcome.micro_batch_size
            self._schedule, self._is_async = Schedule(welcome.snapshot_every), welcome.is_async
            self._has_emergency = welcome.has_emergency
            self.restorable_step = welcome.restorable_step
            self.is_standby = welcome.is_standby
            self.facts, self.settings = welcome.facts.value(), welcome.settings.value()
            self.run = welcome.run
        self.tp, self.pp, self.vpp = degrees["tp"], degrees["pp"], degrees["vpp"]
        self.cp, self.ep = degrees["cp"], degrees["ep"]
        self.dp = self.world_size // (self.tp * self.pp * self.cp)
        shares = {axis: getattr(self, axis) for axis in ("tp", "pp", "dp", "cp", "ep")}
        of = f"{self.run}-{self._round}"
        self._consumption = Consumption(of, shares, is_telling=self.rank == 0)

    @property
    def is_elastic(self) -> bool:
        """Whether an agent stands behind this worker."""
        return self._agent is not None

    @property
    def is_attached(self) -> bool:
        """Whether ``attach`` was called: the job's state is known."""
        return self._state is not None

    @property
    def is_stopped(self) -> bool:
        """Whether ``boundary`` has said to leave."""
        return self._is_stopped

    @property
    def is_proving(self) -> bool:
        """Whether ``note_numbers`` of this step is wanted: it is the round's first one, or one
        behind its stop."""
        return self._agent is not None and (not self._has_stepped or self._is_stopped)

    @property
    def is_compared(self) -> bool:
        """Whether this step is compared with another layout's, in which random numbers differ: the
        round's first one where its workers have to prove the change, or one behind its stop."""
        return self.is_proving and (self._is_compared or self.is_to_prove)

    @property
    def is_to_prove(self) -> bool:
        """Whether this worker, whose state is written, is to make its next step up to the door of
        the update, say ``note_numbers``, and leave. Of that step nothing is kept: where the script
        evaluates, saves or ends before it, the worker leaves there."""
        return self._agent is not None and self._is_stopped and self._page.must_prove(self.step)

    def note_numbers(self, numbers: Numbers) -> None:
        """Say what a step has computed before its update. Call before ``boundary``; behind a stop,
        where there is none, the agent hears of it now."""
        self._numbers = numbers
        if self._agent is not None and self._is_stopped:
            stepped = RankStepped(self.rank, self._round, self.step + 1, None, numbers)
            self._agent.call(stepped)

    def note_made(self, loss: Any, norm: Any) -> None:
        """Say what the step that ends has computed, on one rank of the job: if it is lost and made
        again, that is compared. Numbers, or tensors of one; no device is waited for."""
        if self._agent is not None:
            self._made.note(self.step + 1, loss, norm)

    @property
    def stop_urgency(self) -> int:
        """How much a change waits until no save is in flight, as this host knows it: 0: none does;
        1: one does; 2: one was put off before, because another save began on the way to it."""
        return 0 if self._agent is None else self._page.stop_urgency()

    def note_save(self, iteration: int | None) -> None:
        """Say which save of the framework's own is in flight; it would end with this process.

        The training goes on, and no stop is come to before the save has ended. Call on every rank
        alike, with the same value at the same step.

        Args:
            iteration: Of the oldest one; None: none is.
        """
        self._save_in_flight = iteration
        if self._agent is not None and self._local_rank == 0:
            self._page.report_save(iteration)

    @property
    def is_replaying(self) -> bool:
        """Whether the script, which runs from its beginning, is in epochs or steps of an earlier
        round: what it does behind them (evaluate, save, stop early) was done there."""
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
        """Carry what the job keeps beside model and optimizer. Call before ``attach``, on every
        rank alike.

        Args:
            get: Returns JSON, or a tensor that is equal on all ranks; rank 0's is kept. A tensor
                that is there from the start is carried as the state is; one that comes later goes
                through the coordinator, so keep it small.
            set: Takes it back, on every rank of the next round.

        Raises:
            UsageError: The name is taken, or ``attach`` was called already.
        """
        if self._state is not None or name in self._registered.names:
            raise UsageError(
                f"register_state({name!r}): the name is taken, or attach() was called already. "
                "Register each name once, before attach()."
            )
        self._registered.add(name, get, set)

    def report_facts(self, **facts: Json) -> None:
        """Tell what later rounds must know and only the script knows, such as
        ``padded_vocab_size``."""
        self._reported.update(facts)

    def attach(
        self, state: LiveState, *, step: int = 0, samples: int = 0, restore: bool = True
    ) -> bool:
        """Take part: publish what this rank holds, restore it from the generation, or store the
        initial state.

        Call on every rank, once model, optimizer and scheduler are built. Blocks until every rank
        of the job has proven its part; before that, where this worker ``is_standby``, until the
        training has stopped.

        Args:
            step, samples: How far the built state is, where it comes from the framework's own
                checkpoint.
            restore: False: keep the built state although there is a generation, on all ranks alike.

        Returns:
            True where a generation was restored: ``step`` and ``consumed_samples`` are its.

        Raises:
            UsageError: The job takes part already: a process has one state.
        """
        if self._state is not None:
            raise UsageError(
                "attach() was called already. deepspeed.initialize and Megatron-LM's own training "
                "call it; remove the script's call."
            )
        self._state = state
        self.step, self.consumed_samples = step, samples
        if self._agent is None:
            return False
        slots = [*state.slots(), *self._registered.slots()]
        self._held, wanted = held_rows(slots), wanted_rows(slots)
        if not self.is_measured and (watch := getattr(state, "watch_steps", None)) is not None:
            self._is_own_loop = True
            watch(self)
        # Before the first step, because pinning memory is slow and may wait for the device.
        self._rings = rings_for({slot.buffer.device for slot in slots})
        if self._rings:
            watch_collectives(lambda: not self._is_stopped, self._end_by_collective)
        reached("build" if self.is_standby else "relaunch")
        source = self._agent.call(
            Publish(
                rank=self.rank,
                round=self._round,
                is_restoring=restore,
                held=collection_of(self._held),
                wanted=collection_of(wanted),
                coordinate=self._state.coordinate,
                facts=JsonText.of({**self.facts, **self._reported}),
                uses_devices=any(slot.buffer.device.type != "cpu" for slot in slots),
            )
        )
        self._snapshots = Snapshots(
            self._agent, self.rank, self._round, state, self._held, self._rings, self._registered,
            self._consumption, partial(self._page.between_steps, self._local_rank),
        )  # fmt: skip
        if self._schedule.every and self._is_async:
            self._snapshots.write_beside_training()
        if source is None:
            self._consumption.begin(step, samples, "the state is a checkpoint of the framework's")
            self._snapshot("start")
        else:
            self._restore(wanted, source)
        self._page.report(self._local_rank, self.step)
        return source is not None

    def renew(self, state: LiveState, *, step: int, samples: int) -> None:
        """Say, after ``attach``, that the framework has loaded a checkpoint of its own.

        Args:
            state: The same tensors, which may lie elsewhere now.
            step, samples: How far the loaded state is.

        Raises:
            LayoutError: They are other tensors, or other parts of them.
        """
        self.step, self.consumed_samples = step, samples
        self._state = state
        if self._agent is None:
            return
        self._consumption.begin(step, samples, "the framework has loaded a checkpoint")
        held = held_rows([*state.slots(), *self._registered.slots()])
        if collection_of(held).to_json() != collection_of(self._held).to_json():
            raise LayoutError(
                "the checkpoint has brought other tensors than the model and the optimizer had. "
                "Load it before the job becomes elastic, or run without --elastic."
            )
        self._held = held
        if self._snapshots is not None:
            self._snapshots.renew(state, held)
        self._page.report(self._local_rank, self.step)

    def begin_update(self) -> None:
        """Say that memory of the state is about to change, until ``boundary``.

        Optimizers of torch's say it by themselves. A loop that updates its state by other means
        calls it before each update; else what a worker holds is not believed where others fail,
        and the job goes on from its newest generation.
        """
        if self._snapshots is not None:
            self._snapshots.begin_update()

    def begin_step(self) -> None:
        """Say that a step begins; optional. What is between two steps (evaluations, saves) may
        take as long as ``resize.hang_s`` says; within a step a hang is noticed sooner, once the
        usual step is known."""
        if self._agent is not None:
            self._page.report_within(self._local_rank, is_within=True)

    def end_step(self) -> None:
        """Say that it has ended, where ``boundary`` is called later, behind an evaluation."""
        if self._agent is not None:
            self._page.report_within(self._local_rank, is_within=False)

    def boundary(
        self, step: int | None = None, consumed_samples: int | None = None, *, samples: int = 0
    ) -> bool:
        """Say that an optimizer step has ended. Call on every rank after each step.

        Costs one read of shared memory. Where a stop is agreed for this step, the state is
        written.

        Args:
            step: Optimizer steps done; None: one more than before.
            consumed_samples: Samples trained on; None: ``samples`` more than before.

        Returns:
            True: leave the loop and exit with 0; the next round goes on from here. Where a change
            is proven, a loop of one's own goes on behind its stop (``is_to_prove``) up to its next
            update, in which it leaves.

        Raises:
            RefusedError: The samples are others than those that ``OrderedBatches`` has given.
        """
        if self._is_stopped:
            return True  # a loop of one's own, that has come by no update behind its stop
        self.step = self.step + 1 if step is None else step
        before = self.consumed_samples
        self.consumed_samples = before + samples if consumed_samples is None else consumed_samples
        self._consumption.check(self.step, before, self.consumed_samples)
        self.end_step()
        if self._agent is None or self._snapshots is None:
            return False
        self._consumption.step_ended(self.step, self.consumed_samples)
        if not self._has_stepped:
            self._has_stepped = True
            imports = imported(self._local_rank)
            stepped = RankStepped(self.rank, self._round, self.step, imports, self._numbers)
            self._agent.call(stepped)
            self._snapshots.map_next()
            if self._has_emergency:
                self._snapshots.watch_for_failures()
        self._snapshots.step_ended(self.step, self.consumed_samples)
        self._page.report(self._local_rank, self.step)
        self._schedule = self._schedule.at(self.step, self._page.spaced())
        reached("step")
        if self._page.must_stop(self.step) and self._come_to_stop():
            self._is_stopped = True
            # Behind a stop the loop makes its next step, and leaves at the door of the update.
            return not (self._is_own_loop and self.is_to_prove)
        if self._schedule.is_due(self.step):
            self._snapshots.take_on_the_way(self.step, self.consumed_samples)
        return self._is_stopped

    @property
    def can_be_rescued(self) -> bool:
        """Whether what this process holds is written if the round fails now."""
        is_fork = os.getpid() != self._process
        is_watched = self._snapshots is not None and self._snapshots.are_watched
        return is_watched and not self._is_stopped and not is_fork

    def _end_by_collective(self, reason: str) -> None:
        """A collective between devices has failed, which raises nothing: have the agent end this
        process, once what it holds is written, or end it."""
        if self.can_be_rescued:
            self.wait_to_be_rescued(reason)
        print(f"scalai: {reason}", file=sys.stderr, flush=True)
        os._exit(1)

    def wait_to_be_rescued(self, reason: str) -> None:
        """The script has failed, and this process is about to end. Wait for the agent, which ends
        it once what it holds is written. Returns where the agent is gone."""
        with suppress(PeerError):
            tell_agent(lambda rank, round: RankFailed(rank, round, reason))

    def _come_to_stop(self) -> bool:
        """Snapshot, and return True to leave. Not with a save in flight, which began on the way to
        the stop and is there on all ranks alike: that is told, and the stop comes later."""
        if self._save_in_flight is None:
            return self._snapshot("stop")
        assert self._agent is not None
        self._agent.call(Stand(self.rank, self._round, self.step, self._save_in_flight))
        return False

    def finish(self) -> None:
        """Say that the training has come to its end. The end of the context says it too.

        Raises:
            RefusedError: By ``check_end``.
        """
        self.check_end()
        is_fork = os.getpid() != self._process  # its end is not that of the training
        if self._agent is not None and not self._is_stopped and not is_fork:
            if self._snapshots is not None:
                self._snapshots.settle()
            ledger = self._consumption.scalars().get(LEDGER)
            told = None if ledger is None else JsonText.of(ledger)
            self._agent.call(RankFinished(self.rank, self._round, self.step, told))
            self._is_stopped = True

    def check_end(self) -> None:
        """Check, where the script ends, that it has come to where the training is.

        Raises:
            RefusedError: It has ended in an epoch of an earlier round.
        """
        has_stepped = self.step != self._restored_step or self._is_stopped
        if not has_stepped and self.is_replaying:
            raise RefusedError(
                f"the script has ended in an epoch of an earlier round; the training is at step "
                f"{self.step}. Something of its own has ended it, as early stopping does that "
                "evaluates those epochs again: do that only where scalai.elastic().is_replaying is "
                "False, and carry what it keeps by register_state."
            )

    def _snapshot(self, reason: str) -> bool:
        """Write what the agent orders. Returns False where the stop was taken back instead: at a
        stop the order comes once the workers of every host have come to it, if they do."""
        assert self._snapshots is not None
        return self._snapshots.take(reason, self.step, self.consumed_samples)

    def _restore(self, wanted: Sequence[Row], source: Source) -> None:
        assert self._agent is not None and self._state is not None
        filled = fill_state(self._state, wanted, source, self._rings)
        self.step, self._is_compared = source.step, source.proves
        self.consumed_samples = cast(int, source.consumed_samples)  # or as the script counts them
        self._restored_step = self.step
        ledger = filled.scalars.get(LEDGER)
        self._consumption.restore(ledger, self.step, self.consumed_samples, source.lost)
        self._registered.put(filled.scalars["user"])
        self._agent.call(filled.proven(self.rank, self._round, wanted))
