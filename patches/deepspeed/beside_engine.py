"""State and actions of a script beside the engine: carried if possible, else warned of.

A script of a later round runs from its beginning, through finished epochs. It makes its own state
anew there, and repeats its actions behind an epoch with today's weights. Each kind is warned of
once, with the line to change.
"""

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import wrapt

from scalai.core.errors import RefusedError
from scalai.patches.data.clock import Clock, Clocks
from scalai.patches.data.loaders import PassObserver
from scalai.patches.deepspeed.own_schedules import OwnSchedules
from scalai.patches.deepspeed.record import ScriptRecord
from scalai.patches.deepspeed.replay import Replay
from scalai.patches.hooking import Call
from scalai.patches.user_script import OwnState, is_of_framework, script_place
from scalai.runtime.session import Session

log = logging.getLogger(__name__)


ASK = "`if not scalai.elastic().is_replaying:`"
_RESIZED = {
    "set_train_batch_size": "train_batch_size",
    "set_train_micro_batch_size": "train_micro_batch_size_per_gpu",
}
"""An engine's setters of a size, and the methods with its value."""
REMEMBERED = 100
"""How many names of checkpoints are known again."""
OURS = frozenset(("data", "loaded", "beside", "record", "steps", "accelerate", "trainer"))
"""Names registered by the hooks; a script's variables may have them too."""
_NO_SEEDERS = frozenset(("deepspeed", "scalai", "torch"))
"""Packages with seeds of their own, not the script's: other packages' ``set_seed`` is the script's.
"""
_SAVES = ("save_16bit_model", "save_fp16_model")
_PLANNED = ("total_num_steps", "total_steps")
"""Names of the planned number of steps in DeepSpeed's and torch's schedules."""


class Auxiliary(PassObserver):
    """State and actions of a script beside the engine of one process.

    Args:
        clocks: Position in the data.
        replay: Position of a pipeline's script.

    Attributes:
        schedules: The script's own learning-rate schedules.
        record: The script's events over the rounds.
        has_stepped: True once this round has made a step. The rules of a round's beginning
            (resuming, going through finished epochs) end there.
    """

    def __init__(self, clocks: Clocks, replay: Replay) -> None:
        self._clocks, self._replay = clocks, replay
        self.has_stepped = False
        self.record = ScriptRecord(
            lambda detail, place: self.say("replays_otherwise", detail, place),
            self.forgets,
            script_place,
        )
        self.schedules = OwnSchedules(self.is_behind, self.differs, self.say)
        self._engine: Any = None
        self._session: Session | None = None
        self._restored_step: int | None = None
        self._own = OwnState()
        self._logged: set[str] = set()
        self._saved: dict[str, int] = {}
        """How often a round before has saved under a name."""
        self._saved_now: dict[str, int] = {}

    def is_behind(self) -> bool:
        """True while the script repeats an earlier round."""
        is_behind = self._clocks.is_replaying or self._replay.is_behind
        return self._engine is not None and not self.has_stepped and is_behind

    @property
    def is_resuming(self) -> bool:
        """True while the engine has an earlier round's state, as restored."""
        return self._restored_step is not None and not self.has_stepped

    def install_seeds(self) -> None:
        wrapt.wrap_function_wrapper(torch, "manual_seed", self._seed)

    def install(self) -> None:
        self.schedules.install()
        wrapt.wrap_function_wrapper(torch, "save", self._save_object)

    def start(self, engine: Any, session: Session) -> None:
        """Know the engine; before the state is restored into it."""
        self._engine, self._session = engine, session
        self.schedules.start(engine)
        session.replaying = self.is_behind
        for name, size in _RESIZED.items():
            if hasattr(engine, name):
                setattr(engine, name, _refusing(name, getattr(engine, size)))
        base = getattr(engine.optimizer, "optimizer", engine.optimizer)
        if hasattr(base, "add_param_group"):
            base.add_param_group = _refuse_group
        for name in _SAVES:
            if hasattr(engine, name):
                setattr(engine, name, self._skipping(getattr(engine, name)))

    def restored(self, step: int) -> None:
        """The state of an earlier round is in the engine."""
        self._restored_step = step
        self.schedules.restored()

    def loaded(self) -> None:
        self._restored_step = None
        self.schedules.forget()

    def take(self) -> Mapping[str, Any]:
        saved = {**self._saved, **self._saved_now}
        newest = dict(list(saved.items())[-REMEMBERED:])
        return {"schedules": self.schedules.take(), "saved": newest}

    def put(self, saved: Mapping[str, Any]) -> None:
        self.schedules.put(saved["schedules"])
        self._saved = dict(saved["saved"])

    def stepped(self) -> None:
        self.has_stepped = True
        self.record.stepped()

    def begins(self, clock: Clock) -> None:
        """Note the begin of a trained pass over data. A pipeline's script begins steps instead."""
        if not self._replay.counts_steps:
            self.record.begin(f"a pass over {clock.name}", is_over=clock.is_replaying)

    def look(self, keepers: Sequence[Any] = ()) -> None:
        """Look at the script's variables behind an optimizer step.

        Args:
            keepers: The script's objects called by a framework around the engine.
        """
        step = self._engine.global_steps
        if not self._own.is_done and _rank() == 0:
            self._look(step, keepers)
        if self._restored_step is None:
            return
        planned = self._planned_steps()
        if planned is not None and step > planned:
            self.say(
                "beyond_plan",
                f"step {step}: the schedule was made for {planned} steps, and the script goes on "
                "behind them: a loop that counts its own steps makes as many in every round. End "
                "it by engine.global_steps",
            )

    def saves(self, name: str) -> None:
        """Note a checkpoint under a name of the script's own."""
        self._saved_now[name] = self._saved_now.get(name, 0) + 1
        if self._saved.get(name) == 1 and self._restored_step is not None:
            self.say(
                "saved_again",
                f"{name} was saved in an earlier round, and is written over at step "
                f"{self._engine.global_steps}. If a counter of the script's own names it, that "
                "began anew: name it by engine.global_steps",
            )

    def evaluates(self) -> None:
        """Note a pass outside training."""
        self.record.note("an evaluation")
        if self.is_behind():
            self.say(
                "evaluated_again",
                "behind an epoch of an earlier round the script evaluates again, with the weights "
                f"of now: what it prints or decides there is wrong. Put it under {ASK}",
            )

    def ends_otherwise(self, clock: Clock) -> None:
        """Note a pass, taken up within or behind such a one, with another end; or one to end at the
        place of a single broken-off pass."""
        if clock.ends_as_one:
            self.say(
                "ends_as_one",
                f"this pass over {clock.name} ends behind {clock.until} samples, where the only "
                "one before it was broken off. If that was for once, begin again from a state "
                "behind it, or limit passes by engine.global_steps",
            )
            return
        (before, _), (now, _) = clock.ends[-2:]
        words = [f"{end} samples" if end else "its end" for end in (now, before)]
        self.say(
            "ends_otherwise",
            f"a pass over {clock.name} went to {words[0]}, the one before to {words[1]}: a count "
            "of the script's own (enumerate) that ends it began anew where the pass was taken up",
        )

    def told(self, answer: str) -> None:
        self.record.note_told(answer)

    def forgets(self, detail: str) -> None:
        self.say("record_full", detail)

    def differs(self, detail: str, way_out: str) -> None:
        """Refuse a training other than the state's.

        Raises:
            RefusedError: No person has changed the script's arguments.
        """
        if self.record.other_arguments:
            others = ", ".join(self.record.other_arguments)
            self.say("differs", f"{detail}. The script's arguments have changed: {others}")
            return
        place = script_place()
        raise RefusedError(f"{f'{place}: ' if place else ''}{detail}. {way_out}.")

    def say(self, event: str, detail: str, place: str = "") -> None:
        """Warn once, on rank 0, with the script's line; by default the current one."""
        if event not in self._logged and _rank() == 0:
            self._logged.add(event)
            place = place or script_place() or "unknown"
            log.warning("event=%s at=%s detail=%r", event, place, detail)

    def _look(self, step: int, keepers: Sequence[Any]) -> None:
        kept = self._own.look(sys._getframe(1), self._engine, keepers)
        assert self._session is not None
        carried = set(self._session.registered) - OURS
        kept = [one for one in kept if one.name.removeprefix("self.") not in carried]
        if self._replay.counts_steps:
            kept = [one for one in kept if not one.is_count]
        if self._restored_step is not None:
            kept = [one for one in kept if one.is_fresh and self._restored_step > 0]
            if not self._clocks.are_taken_up_within:
                kept = [one for one in kept if not one.is_enumerated]
        if not kept:
            return
        named = ", ".join(f"{one.name} ({one.place})" for one in kept)
        way_out = (
            "take counts from state.global_step, and have a callback export the others "
            "(transformers.trainer_callback.ExportableState)"
            if keepers
            else "take counts from engine.global_steps, and carry the others by "
            "scalai.elastic().register_state"
        )
        if self._restored_step is None:
            self.say(
                "own_state",
                f"the script changes with every step: {named}. A change makes them anew: {way_out}",
            )
        else:
            self.say(
                "began_anew",
                f"at step {step} the script counts from 0 since the change: {named}. What they "
                f"name, print or end comes out another one: {way_out}",
            )

    def _planned_steps(self) -> int | None:
        for schedule in (self._engine.lr_scheduler, *self.schedules.own()):
            for name in _PLANNED:
                if isinstance(planned := getattr(schedule, name, None), int):
                    return planned
        return None

    def _seed(self, wrapped: Call, instance: Any, args: Any, kwargs: Any) -> Any:
        if not is_of_framework(sys._getframe(1), _NO_SEEDERS):
            self.record.note(f"a seed of {(*args, *kwargs.values())[0]}")
        return wrapped(*args, **kwargs)

    def _save_object(self, wrapped: Call, instance: Any, args: Any, kwargs: Any) -> Any:
        if not is_of_framework(sys._getframe(1)):
            self.record.note("a torch.save")
        if self.is_behind():
            self.say(
                "saved_behind",
                "behind an epoch of an earlier round the script saves again: under that epoch's "
                f"name it writes what is there now. Put it under {ASK}",
            )
        return wrapped(*args, **kwargs)

    def _skipping(self, method: Call) -> Call:
        def save(*args: Any, **kwargs: Any) -> Any:
            self.record.note("a save of the model")
            if self.is_behind():
                log.info("event=save skipped='this was trained on in an earlier round'")
                return True
            return method(*args, **kwargs)

        return save


def _refusing(name: str, present: Callable[[], int]) -> Call:
    def refuse(size: int) -> None:
        if size != present():
            raise RefusedError(
                f"engine.{name}({size}) changes the batch from {present()} while the job trains, "
                "and how many samples a step has is what an elastic job keeps. State the batch in "
                "DeepSpeed's configuration, or run without --elastic."
            )

    return refuse


def _refuse_group(param_group: Any) -> None:
    raise RefusedError(
        "optimizer.add_param_group adds parameters while the job trains, and what the optimizer "
        "keeps for them would be lost at a change. Give it all groups before "
        "deepspeed.initialize, with a learning rate of 0 until they are trained, or run without "
        "--elastic."
    )


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
