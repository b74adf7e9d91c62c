"""What a script, or a framework's hooks, say of the samples that steps draw."""

from collections.abc import Mapping

from scalai.core.dataset.drawn import Draw
from scalai.core.dataset.order import GlobalOrder
from scalai.core.errors import RefusedError
from scalai.core.jsonable import Json
from scalai.runtime.consumption import Consumption, Contradiction


class Drawing:
    """A part of ``Session``: what it writes into the job's ledger."""

    _consumption: Consumption

    def note_draws(self, *draws: Draw) -> None:
        """Say what the step under way has drawn from which data set, before ``boundary``: for the
        job's ledger, which else counts how many samples a step has.

        Args:
            draws: None at all: this rank draws no samples in this round, and others say.
        """
        self._consumption.note(draws)

    def note_sources(self, sources: Mapping[str, Mapping[str, Json]]) -> None:
        """Say what the order of each data set follows from, such as size and seed: on every rank
        that draws alike, once a round or more often. What is not said is not compared.

        Raises:
            RefusedError: A data set was another one before.
        """
        self._consumption.know(sources)

    def draw_from(self, order: GlobalOrder, contradiction: Contradiction = lambda *_: None) -> None:
        """Say, on every rank alike, that steps draw in an order of Scalai's own. Its places are the
        samples that were consumed: the ledger has them data set by data set.

        Args:
            contradiction: Returns why a step that begins at one sample cannot have consumed those
                up to another; None: it can.

        Raises:
            RefusedError: By ``note_sources``; or steps draw in another order already.
        """
        if self._consumption.order not in (None, order):
            raise RefusedError(
                f"steps draw from {_names(self._consumption.order)} already, and would now from "
                f"{_names(order)}. Say is_training=False of the OrderedBatches that are not "
                "trained on, as those of an evaluation; put data sets that are into one Blend."
            )
        self._consumption.order, self._consumption.contradiction = order, contradiction
        self.note_sources(order.facts())


def _names(order: GlobalOrder) -> str:
    return ", ".join(map(repr, order.facts()))
