"""The samples consumed by a job, as known to one worker: the ledger during training."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

from scalai.core.dataset.drawn import Draw
from scalai.core.dataset.ledger import Ledger, Lost, difference, known_of
from scalai.core.dataset.order import GlobalOrder
from scalai.core.errors import RefusedError
from scalai.core.jsonable import Json
from scalai.core.messages.worker_messages import Samples

_ANOTHER_JOB = (
    "begin another job from this state as a checkpoint (`scalai reshard`): its ledger begins there"
)
LEDGER = "scalai_ledger"
"""Key of the ledger in ``scalars`` of a generation."""

Contradiction = Callable[[int, int], str | None]
"""Reason why a step cannot have consumed the samples between two numbers; None: it can."""

log = logging.getLogger(__name__)


class Consumption:
    """The ledger of one worker. All ranks that draw samples have the same one; others have none.

    Args:
        round: Round as ``<run>-<round>``.
        degrees: Degrees of the round.
        is_telling: This worker logs for the job.
    """

    def __init__(self, round: str, degrees: Mapping[str, int], *, is_telling: bool = True) -> None:
        self._round, self._degrees = round, dict(degrees)
        self._is_telling = is_telling
        self._draws: list[Draw] = []
        self._is_silent = False
        self._sources: dict[str, Mapping[str, Json]] = {}
        self.order: GlobalOrder | None = None
        """Order of steps without reported draws; None: they are counted."""
        self.contradiction: Contradiction = lambda *_: None
        self.ledger: Ledger | None = None

    def begin(self, step: int, samples: Samples, reason: str = "") -> None:
        """Begin a ledger at this step: its past is unknown, for this reason."""
        if step and reason and self._is_telling:
            log.warning("event=ledger begins_at_step=%d %s: unproven before", step, reason)
        self.ledger = Ledger.begun(step, _whole(step, samples)).with_round(
            self._round, self._degrees
        )
        self._draws = []
        self._compare()

    def restore(self, saved: Json, step: int, samples: Samples, lost: Iterable[Lost] = ()) -> None:
        """Go on with the ledger of a generation.

        Args:
            saved: Ledger from ``scalars``; None: it has none.
            step, samples: Progress of the state.
            lost: Earlier steps that are in no generation.

        Raises:
            RefusedError: It is damaged, or of another step or another number of samples; or a data
                set differs from its record.
        """
        if saved is None:
            self.begin(step, samples, "the state has no ledger")
            return
        try:
            ledger = _fitting(saved, step, _whole(step, samples))
        except ValueError as error:
            raise RefusedError(
                f"{error}. Go on from another generation (`scalai resume`), or {_ANOTHER_JOB}."
            ) from error
        self.ledger = ledger.with_round(self._round, self._degrees, lost)
        self._compare()

    def know(self, sources: Mapping[str, Mapping[str, Json]]) -> None:
        """Note the facts behind the order of each data set, in this round.

        Raises:
            RefusedError: A data set was another one before.
        """
        self._sources.update(sources)
        self._compare()

    def draw_from(self, order: GlobalOrder, contradiction: Contradiction) -> None:
        """Let steps draw in an order of Scalai's own.

        Args:
            contradiction: Returns the reason why a step cannot have consumed the samples between
                two numbers; None: it can.

        Raises:
            RefusedError: Steps draw in another order already; or as of ``know``.
        """
        if self.order not in (None, order):
            raise RefusedError(
                f"steps draw from {_names(self.order)} already, and would now from "
                f"{_names(order)}. Say is_training=False of the OrderedBatches that are not "
                "trained on, as those of an evaluation; put data sets that are into one Blend."
            )
        self.order, self.contradiction = order, contradiction
        self.know(order.facts())

    def _compare(self) -> None:
        if self.ledger is None:
            return
        for name, facts in sorted(self._sources.items()):
            if other := difference(known_of(self.ledger.sources, name), facts):
                raise RefusedError(
                    f"data set {name!r} is another one than the job has drawn from: {other}. Its "
                    "samples would come in another order, some skipped and some twice. Give the "
                    "job the data set, seed and weights that it had, go on from another "
                    f"generation (`scalai resume`), or {_ANOTHER_JOB}."
                )

    def note(self, draws: Sequence[Draw]) -> None:
        """Keep the draws of the step under way; none: this rank draws no samples in this round,
        others report.
        """
        self._draws += draws
        self._is_silent = self._is_silent or not draws

    def check(self, step: int, before: Samples, after: Samples) -> None:
        """Check a step's consumed samples against the order of its draws.

        Raises:
            RefusedError: They differ: the ledger would prove undrawn samples.
        """
        if type(before) is not int or type(after) is not int or self._draws:
            return
        if found := self.contradiction(before, after):
            raise RefusedError(
                f"boundary() says that step {step} has consumed samples {before} to {after}, and "
                f"by its OrderedBatches {found}. Say "
                "boundary(samples=batches.now.global_batch_size), once a step, behind its batches."
            )

    def step_ended(self, step: int, samples: Samples) -> None:
        """Write the step's draws into the ledger.

        Raises:
            RefusedError: It would skip samples, or see some twice.
        """
        draws, self._draws = self._draws, []
        if self.ledger is None or self._is_silent:
            return
        counted = _whole(step, samples)
        draws = draws or self._of_order(counted)
        if objections := list(self.ledger.objections(draws, counted)):
            raise RefusedError(
                f"step {step} would break the order of samples: {'; '.join(objections)}. What was "
                "consumed is in the ledger of the newest generation (`scalai ledger show`). Give "
                "the loader the data set, seed and batch that the job began with, or "
                f"{_ANOTHER_JOB}."
            )
        # Not before: in a rescued step only some ranks may have begun a pass.
        for name, facts in sorted(self._sources.items()):
            self.ledger = self.ledger.with_source(name, facts)
        self.ledger = self.ledger.stepped(step, counted, draws)

    def _of_order(self, counted: int | None) -> list[Draw]:
        before = self.ledger.at[1] if self.ledger is not None else None
        if self.order is None or counted is None or before is None or counted <= before:
            return []
        return list(self.order.draws(before, counted))

    def keep(self) -> Callable[[], Mapping[str, Json]]:
        """Return a function that writes down the present ledger for a generation."""
        ledger = None if self._is_silent else self.ledger
        return lambda: {} if ledger is None else {LEDGER: ledger.to_json()}

    def scalars(self) -> Mapping[str, Json]:
        """Return the ledger for a generation."""
        return self.keep()()


def _names(order: GlobalOrder) -> str:
    return ", ".join(map(repr, order.facts()))


def _fitting(saved: Json, step: int, samples: int | None) -> Ledger:
    """Read the ledger of a state at this step. ``ValueError`` if it is damaged, or does not
    match.
    """
    try:
        ledger = Ledger.from_json(saved)
    except ValueError as error:
        raise ValueError(f"the state's ledger of samples is damaged: {error}") from error
    if ledger.at != (step, samples):
        raise ValueError(
            f"the state is at {_at(step, samples)}, its ledger of samples at {_at(*ledger.at)}: "
            "samples between them would be skipped, or seen twice"
        )
    return ledger


def _whole(step: int, samples: Samples) -> int | None:
    """Return a count of samples; None for a script's fraction, and a checkpoint's 0 without a
    count.
    """
    is_count = type(samples) is int and samples >= bool(step)
    return int(samples) if is_count and samples is not None else None


def _at(step: int, samples: int | None) -> str:
    return f"step {step}" if samples is None else f"step {step} with {samples} samples"
