"""What the hooks of every framework need of ``scalai.runtime.session.Session``: they get it when
they are called, and import none of it."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from scalai.core.dataset.drawn import Draw
from scalai.core.jsonable import Json
from scalai.patches.function_proof import NumberedSession
from scalai.runtime.live import LiveState


class ElasticSession(NumberedSession, Protocol):
    """This worker's part in the job."""

    run: str
    tp: int
    pp: int
    dp: int
    micro_batch_size: int | None
    step: int
    consumed_samples: int
    is_measured: bool
    facts: Mapping[str, Json]
    settings: Mapping[str, Json]
    replaying: Callable[[], bool]

    @property
    def restorable_step(self) -> int | None:
        """Step of the generation that ``attach`` would restore; None on a fresh start."""

    @property
    def is_standby(self) -> bool:
        """Whether the training goes on elsewhere until ``attach`` restores a newer generation."""

    @property
    def registered(self) -> tuple[str, ...]:
        """The names of what is carried."""

    @property
    def is_compared(self) -> bool:
        """Whether this step is compared with another layout's."""

    @property
    def stop_urgency(self) -> int:
        """How much a change waits until no save is in flight."""

    def report_facts(self, **facts: Json) -> None:
        """Tell what the launcher and later rounds have to know."""

    def register_state(
        self, name: str, get: Callable[[], Json], set: Callable[[Any], None]
    ) -> None:
        """Carry a value beside the state. Before ``attach``."""

    def attach(
        self, state: LiveState, *, step: int = 0, samples: int = 0, restore: bool = True
    ) -> bool:
        """Restore the generation into ``state``, or make a start generation of ``state``."""

    def renew(self, state: LiveState, *, step: int, samples: int) -> None:
        """Say that the framework has loaded a checkpoint of its own."""

    def note_save(self, iteration: int | None) -> None:
        """Say which save of the framework's own is in flight."""

    def note_draws(self, *draws: Draw) -> None:
        """Say what the step has drawn; nothing: other ranks do."""

    def note_sources(self, sources: Mapping[str, Mapping[str, Json]]) -> None:
        """Say what the order of data sets follows from."""

    def note_made(self, loss: Any, norm: Any) -> None:
        """Say what each step has computed, on one rank."""

    def begin_update(self) -> None:
        """Say that memory of the state is about to change."""

    def begin_step(self) -> None:
        """Say that a step begins."""

    def end_step(self) -> None:
        """Say that it has ended; an evaluation or a save may follow."""

    def boundary(
        self, step: int | None = None, consumed_samples: int | None = None, *, samples: int = 0
    ) -> bool:
        """Say after each step whether the state was written and this process has to end."""
