"""How well predictions agree with measurements, of steps and of which layout is best."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np

from scalai.core.planner.columns import columns_of
from scalai.core.planner.fit import Calibration, calibrate, uncalibrated
from scalai.core.planner.rows import Row

REFUSED_ERROR = 1.0
"""Relative error that a row counts with which cannot be taken, or is held infeasible."""
CHOICE = 5
"""Rows from which on a group is a choice between layouts."""
Figures = dict[str, float | int | None]


@dataclass(frozen=True, slots=True)
class Scored:
    """A row with what was predicted. ``is_known``: by a calibration of its cluster, else by the
    table of devices alone. Seconds are 0 where the row is refused."""

    row: Row
    is_known: bool
    seconds: float = 0.0
    low: float = 0.0
    high: float = 0.0
    never_seen: tuple[str, ...] = ()

    @property
    def error(self) -> float:
        """Relative to the measured seconds."""
        if self.row.refused:
            return REFUSED_ERROR
        return abs(self.seconds / self.row.seconds - 1)

    @property
    def is_inside(self) -> bool:
        """Whether the measurement is inside the stated interval."""
        return not self.row.refused and self.low <= self.row.seconds <= self.high

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / (2 * self.seconds)


def predict_rows(rows: Sequence[Row], measured: Sequence[Row] = ()) -> list[Scored]:
    """Predict each row from what ``measured`` says of its cluster, else from the table alone."""
    scored: dict[int, Scored] = {}
    for cluster in dict.fromkeys(row.cluster for row in rows):
        known = [row for row in measured if row.cluster == cluster and not row.refused]
        calibration = calibrate_rows(known) if known else uncalibrated()
        mine = [number for number, row in enumerate(rows) if row.cluster == cluster]
        taken = [number for number in mine if not rows[number].refused]
        scored |= {number: Scored(rows[number], bool(known)) for number in mine}
        if not taken:
            continue
        x = columns_of([rows[number].case for number in taken])
        said = calibration.predict(x)
        for place, number in enumerate(taken):
            scored[number] = Scored(
                rows[number], bool(known), float(said.seconds[place]), float(said.low[place]),
                float(said.high[place]), calibration.never_seen(x, place) if known else (),
            )  # fmt: skip
    return [scored[number] for number in range(len(rows))]


def calibrate_rows(rows: Sequence[Row]) -> Calibration:
    """Return the calibration of rows of one cluster."""
    x = columns_of([row.case for row in rows])
    return calibrate(x, np.array([row.seconds for row in rows]), has_neighbours=True)


def figures(scored: Sequence[Scored]) -> Figures:
    """Return the figures over all rows; None where there is no row that they are about."""
    known = [one.error for one in scored if one.is_known]
    foreign = [one.error for one in scored if not one.is_known]
    widths = [one.half_width for one in scored if not one.row.refused]
    choices = [group for group in _groups(scored) if len(group) >= CHOICE]
    regrets = [regret(group) for group in choices]
    return {
        "rows": len(scored),
        "rows_refused": sum(bool(one.row.refused) for one in scored),
        "rows_known": len(known),
        "error_mean": _or_none(fmean, known),
        "error_max": _or_none(max, known),
        "transfer_error_mean": _or_none(fmean, foreign),
        "interval_coverage": _or_none(fmean, [float(one.is_inside) for one in scored]),
        "interval_half_width": _or_none(median, widths),
        "regret_mean": _or_none(fmean, regrets),
        "regret_max": _or_none(max, regrets),
        "rank_correlation_min": _or_none(min, [rank_correlation(group) for group in choices]),
    }


def group_figures(scored: Sequence[Scored]) -> list[dict[str, object]]:
    """Return the figures of each group: rows of one cluster, model, sequence, batch and number of
    devices; ``refused`` says why rows count as errors."""
    found: list[dict[str, object]] = []
    for group in _groups(scored):
        row = group[0].row
        layers, hidden, heads, *_ = row.model
        never = {name for one in group for name in one.never_seen}
        found.append(
            {
                "source": row.source,
                "device": row.cluster[1],
                "model": f"{layers} layers, hidden {hidden}, {heads} heads",
                "gpus": row.gpus,
                "global_batch": row.work.global_batch if row.work else None,
                **figures(group),
                "never_seen": sorted(never),
                "refused": sorted({one.row.refused for one in group if one.row.refused}),
            }
        )
    return found


def regret(group: Sequence[Scored]) -> float:
    """Return how much longer the layout that is predicted best takes than the one that is best; a
    refused row is never predicted best, and where all are, the slowest counts."""
    measured = [one.row.seconds for one in group if one.row.seconds > 0]
    taken = [one for one in group if not one.row.refused]
    if not measured:
        return REFUSED_ERROR
    chosen = min(taken, key=lambda one: one.seconds).row.seconds if taken else max(measured)
    return chosen / min(measured) - 1


def rank_correlation(group: Sequence[Scored]) -> float:
    """Return Spearman's coefficient, ties averaged; refused rows are predicted slowest."""
    predicted = [one.seconds if not one.row.refused else np.inf for one in group]
    one, two = _ranks(predicted), _ranks([one.row.seconds for one in group])
    if np.ptp(one) == 0 or np.ptp(two) == 0:
        return 0.0
    return float(np.corrcoef(one, two)[0, 1])


def _ranks(values: Sequence[float]) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    array = np.array(values)
    below = (array[None, :] < array[:, None]).sum(axis=1)
    equal = (array[None, :] == array[:, None]).sum(axis=1)
    ranks: np.ndarray[tuple[int, ...], np.dtype[np.float64]] = below + (equal + 1) / 2
    return ranks


def _groups(scored: Iterable[Scored]) -> list[list[Scored]]:
    groups: dict[tuple[object, ...], list[Scored]] = {}
    for one in scored:
        groups.setdefault(one.row.group, []).append(one)
    return list(groups.values())


def _or_none(reduce: Callable[[list[float]], float], values: list[float]) -> float | None:
    return float(reduce(values)) if values else None
