"""The history of a job in one picture: losses and layouts over time, and the cost of each change.

Colours stay apart for the colour-blind, and phases also differ in lightness.
"""

import html
import io
import logging
import math
import warnings
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, Literal

from scalai.launch.commands.job_history import (
    BYTES,
    NO_PAUSE,
    History,
    Losses,
    Point,
    Resize,
    bytes_text,
    difference,
    pace_of,
    reason_of,
    seconds_text,
    summary,
    table,
    when,
    zone_at,
)
from scalai.launch.program import escaped

# It says on standard error that it builds its cache of fonts, the first time.
logging.getLogger("matplotlib").setLevel(logging.ERROR)

import matplotlib  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.collections import PolyCollection  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.patches import Patch  # noqa: E402
from matplotlib.ticker import MaxNLocator, NullLocator  # noqa: E402

INK, SOFT, PALE = "#22303c", "#51606d", "#8a97a3"
LOSS, LOST, REFERENCE, LIMIT = "#0072b2", "#b8400e", "#b9c6d2", "#b8400e"
BANDS = ("#f4f7f9", "#e6edf2")
STATE_PHASES = {
    "snapshot": "#0072b2",
    "commit": "#7cc4ee",
    "plan": "#f5e663",
    "move": "#e69f00",
    "restore": "#b8400e",
    "proof": "#7a3b73",
}
OTHER_PHASES = {"relaunch": "#c3ccd4", "first_step": "#2b2f36"}
COLOURS = {**STATE_PHASES, **OTHER_PHASES}
STYLE: Any = {
    "font.size": 10, "text.color": INK, "xtick.color": INK, "ytick.color": INK,
    "axes.edgecolor": PALE, "axes.labelcolor": INK, "axes.spines.top": False,
    "axes.spines.right": False, "axes.titlesize": 10.5, "axes.titleweight": "bold",
    "axes.titlelocation": "left", "hatch.linewidth": 0.6, "svg.hashsalt": "scalai",
    # Reasons and names of hosts are no formulas.
    "text.parse_math": False, "axes.formatter.use_mathtext": False,
}  # fmt: skip
MOST_POINTS = 4000
"""Most points of a curve: the least and the largest of each place."""
MOST_ROWS = 20
"""Most changes with a row each; more are columns."""
MOST_LAYOUTS = 12
"""Most layouts with a row each: those with the most time."""
MOST_LINES = 60
"""Most changes whose bands and pauses are drawn behind the losses."""
BIT_EQUAL = 1e-18
"""Where differences of exactly zero are drawn on a logarithmic axis."""
_WIDTH, _LEFT, _RIGHT = 13.5, 2.75, 0.3
"""In inches."""


@dataclass(frozen=True, slots=True)
class ReferenceLosses:
    """Losses of an uninterrupted run by step; ``limit``: largest relative difference."""

    losses: Mapping[int, float]
    limit: float


def picture(
    history: History, losses: Losses | None, form: Literal["png", "svg"],
    *, title: str | None = None, reference: ReferenceLosses | None = None,
) -> bytes:  # fmt: skip
    """Draw a history with at least one change or start, as a file of this form."""
    page = _Page(history, losses, reference)
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        # A name in letters that the font lacks.
        warnings.simplefilter("ignore", UserWarning)
        figure = page.draw(title or plain(history.name, 70))
        output = io.BytesIO()
        figure.savefig(
            output, format=form, dpi=150, metadata={"Date": None} if form == "svg" else {}
        )
    return output.getvalue()


def page(history: History, drawing: bytes) -> bytes:
    """A page of HTML that needs no other file: the drawing, an SVG, and the table."""
    svg = drawing.decode()
    title = html.escape(escaped(history.name))
    lines = html.escape("\n".join(map(escaped, table(history))))
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        "<style>body{margin:1em;font-family:sans-serif}svg{max-width:100%;height:auto}"
        "pre{overflow-x:auto}</style></head>\n<body>\n"
        f"{svg[svg.index('<svg') :]}\n<pre>{lines}</pre>\n</body></html>\n"
    ).encode()


def plain(text: str, most: int) -> str:
    """A line for a picture: of a longer one its begin and its end, of a long one its begin."""
    line = escaped(" ".join(text.split()))
    if len(line) <= most:
        return line
    end = most // 2 if len(line) <= 2 * most else 0
    return f"{line[: most - end - 1]}…{line[len(line) - end :]}"


# ---------------------------------------------------------------------- time


@dataclass(frozen=True, slots=True)
class _Bar:
    """Training in one layout, in seconds since the picture's begin; ``lost``: begin of the lost
    steps, ``end`` where there are none."""

    resize: Resize
    begin: float
    end: float
    lost: float


class _Clock:
    """Places on the time axis, in its unit."""

    def __init__(self, history: History, losses: Losses | None) -> None:
        times = [] if losses is None else [point.at for point in losses.points]
        stretches = history.stretches
        self.zero = min([stretches[0].begin, *times[:1]])
        pace_s, self.bars = pace_of(stretches), list[_Bar]()
        begins = [*(each.begin for each in stretches[1:]), math.inf]
        for stretch, next_begin in zip(stretches, begins, strict=True):
            end = stretch.end
            if end is None:  # as far as a loss, or a step that is known
                seen = times[: bisect_right(times, next_begin)][-1:]
                known = stretch.time_of(stretch.last or stretch.first, pace_s)
                end = min(next_begin, max([stretch.begin, known, *seen]))
            lost = stretch.time_of(stretch.kept or 0, pace_s) if stretch.has_lost else end
            times_of = (each - self.zero for each in (stretch.begin, end, lost))
            self.bars.append(_Bar(stretch.resize, *times_of))
        span = max([*(bar.end for bar in self.bars), *(at - self.zero for at in times[-1:])])
        self.unit, self.unit_s = unit_of(span)
        self.span = max(span, 1e-3) / self.unit_s

    def x(self, seconds: float) -> float:
        return seconds / self.unit_s

    def of(self, at: float) -> float:
        return (at - self.zero) / self.unit_s


def unit_of(span_s: float) -> tuple[str, float]:
    for name, unit_s, most in (("seconds", 1, 300), ("minutes", 60, 300), ("hours", 3600, 96)):
        if span_s <= most * unit_s:
            return name, float(unit_s)
    return "days", 86400.0


# ---------------------------------------------------------------------- page


class _Page:
    def __init__(
        self, history: History, losses: Losses | None, reference: ReferenceLosses | None
    ) -> None:
        self._history, self._reference = history, reference
        self._losses = losses if losses is not None and losses.points else None
        self._clock = _Clock(history, self._losses)
        self._layouts = self._rows_of_layouts()
        self._changes = [
            (n, each) for n, each in enumerate(history.resizes, start=1) if not each.is_start
        ]
        self._height, self._top = 0.0, 0.0
        self._figure = Figure()

    def draw(self, title: str) -> Figure:
        count, with_losses = len(self._changes), self._losses is not None
        rows = min(count, MOST_ROWS + 1)
        head = 1.25 if with_losses else 1.4
        has_reference = with_losses and self._reference is not None
        layouts = 0.25 * max(2, len(set(self._layouts.values())) + self._has_failures) + 0.1
        costs = 0.0 if not count else 0.85 + (4.9 if rows > MOST_ROWS else 0.42 * rows + 0.9)
        self._height = head + 3.3 * with_losses + 1.65 * has_reference + layouts + 1.1 + costs
        self._figure = Figure(figsize=(_WIDTH, self._height))
        self._headline(title)
        self._top = head
        panels = list[Axes]()
        if self._losses is not None:
            panels.append(self._axes(2.85, gap=0.45))
            self._draw_losses(panels[-1], self._losses)
            if self._reference is not None:
                panels.append(self._axes(1.15, gap=0.5))
                self._draw_differences(panels[-1], self._losses, self._reference)
        panels.append(self._axes(layouts, gap=0.0))
        self._draw_layouts(panels[-1])
        self._number(panels[0])
        for axes in panels:
            self._bands(axes)
            axes.set_xlim(-0.004 * self._clock.span, 1.004 * self._clock.span)
            axes.tick_params(labelbottom=axes is panels[-1])
        self._time_axis(panels[-1], layouts)
        self._top += 1.1
        if count:
            self._top += 0.85
            (self._draw_columns if rows > MOST_ROWS else self._draw_rows)()
        return self._figure

    def _axes(
        self, height: float, gap: float, left: float = _LEFT, width: float = _WIDTH - _LEFT - _RIGHT
    ) -> Axes:
        """Axes of this height below the last ones, in inches."""
        bottom = self._height - self._top - height
        self._top += height + gap
        return self._figure.add_axes(
            (left / _WIDTH, bottom / self._height, width / _WIDTH, height / self._height)
        )

    def _headline(self, title: str) -> None:
        last = self._clock.zero + max(bar.end for bar in self._clock.bars)
        left, top = 0.35 / _WIDTH, self._height
        self._figure.text(left, 1 - 0.45 / top, title, fontsize=17, weight="bold")
        text = (
            f"{when(self._clock.zero)} to {when(last)} {zone_at(last)}. {summary(self._history)}."
        )
        self._figure.text(left, 1 - 0.75 / top, text, color=SOFT)

    # ------------------------------------------------------------------ over time

    def _bands(self, axes: Axes) -> None:
        """Shade the time of each layout and mark each change."""
        bars, is_few = self._clock.bars, len(self._clock.bars) <= MOST_LINES
        if is_few:
            for number, bar in enumerate(bars):
                span = self._clock.x(bar.begin), self._clock.x(bar.end)
                axes.axvspan(*span, color=BANDS[number % 2], linewidth=0, zorder=0)
        axes.vlines(
            [self._clock.x(bar.begin) for bar in bars[1:]], 0, 1, color=PALE, zorder=1,
            transform=axes.get_xaxis_transform(), linewidth=0.9 if is_few else 0.2,
            linestyles=(0, (2, 2)) if is_few else "solid",
        )  # fmt: skip

    def _number(self, axes: Axes) -> None:
        """Write the numbers of the changes above the axes, as many as fit."""
        free = -math.inf
        for number, bar in enumerate(self._clock.bars, start=1):
            x = self._clock.x(bar.begin)
            if x >= free:
                axes.text(
                    x, 1.02, str(number), transform=axes.get_xaxis_transform(), ha="center",
                    va="bottom", fontsize=9, weight="bold", color=SOFT,
                )  # fmt: skip
                free = x + (0.012 + 0.007 * len(str(number))) * self._clock.span
        axes.annotate(
            "change", (0, 1.02), xycoords="axes fraction", xytext=(-12, 0), ha="right",
            va="bottom", textcoords="offset points", fontsize=9, color=SOFT,
        )  # fmt: skip

    def _draw_losses(self, axes: Axes, losses: Losses) -> None:
        runs = list(self._runs(losses))
        kept = [point for is_lost, points in runs if not is_lost for point in points]
        # Pale over pauses: no step was made there.
        self._curve(axes, [list(_thinned(kept, MOST_POINTS))], color=REFERENCE, linewidth=0.9)
        if self._reference is not None:
            known = self._reference.losses
            beside = [
                [Point(p.at, p.step, known[p.step]) for p in points if p.step in known]
                for is_lost, points in runs
                if not is_lost
            ]
            self._curve(
                axes, beside, color=REFERENCE, linewidth=6, solid_capstyle="round", zorder=1.5,
                label="uninterrupted",
            )  # fmt: skip
        name = losses.name if losses.is_timed else f"{losses.name}, times between changes estimated"
        drawn = [
            (is_lost, list(_thinned(points, MOST_POINTS * len(points) // len(losses.points))))
            for is_lost, points in runs
        ]
        self._curve(
            axes, [points for is_lost, points in drawn if not is_lost], color=LOSS, linewidth=1.4,
            label=name,
        )  # fmt: skip
        lost = [points for is_lost, points in drawn if is_lost]
        if lost:
            self._curve(
                axes, lost, color=LOST, linewidth=2.4, linestyle=(0, (1.2, 0.8)), zorder=3,
                label="lost, and made again",
            )  # fmt: skip
        odd = [point for point in losses.points if not math.isfinite(point.loss)]
        if odd:
            axes.plot(
                [self._clock.of(point.at) for point in _spread(odd)], [0.03] * len(_spread(odd)),
                "x", color=LOST, markersize=5, transform=axes.get_xaxis_transform(),
                label=f"not finite, at {len(odd):,} steps",
            )  # fmt: skip
        axes.set_ylabel("loss")
        axes.legend(
            frameon=False, loc="lower right", bbox_to_anchor=(1.0, 1.06), ncols=4,
            borderaxespad=0.0, fontsize=9,
        )  # fmt: skip

    def _curve(self, axes: Axes, runs: Sequence[Sequence[Point]], **style: Any) -> None:
        """Draw runs of points as one curve with gaps; a run of one point as a dot."""
        points, gaps = list[tuple[float, float]](), (math.nan, math.nan)
        for run in runs:
            points += [*((self._clock.of(point.at), point.loss) for point in run), gaps]
        axes.plot([x for x, _ in points], [y for _, y in points], **style)
        alone = [(self._clock.of(run[0].at), run[0].loss) for run in runs if len(run) == 1]
        dot = {"color": style["color"], "markersize": 2 + style["linewidth"]}
        axes.plot([x for x, _ in alone], [y for _, y in alone], ".", **dot)

    def _runs(self, losses: Losses) -> Iterator[tuple[bool, list[Point]]]:
        """Yield runs of kept and of lost finite points, without a pause in between."""
        # The report of a change comes a little after its first step.
        stops = [
            self._clock.zero + (before.end + bar.begin) / 2
            for before, bar in pairwise(self._clock.bars)
        ]
        runs = groupby(
            zip(losses.lost, losses.points, strict=True),
            key=lambda pair: (pair[0], bisect_right(stops, pair[1].at)),
        )
        for (is_lost, _), run in runs:
            yield is_lost, [point for _, point in run if math.isfinite(point.loss)]

    def _draw_differences(self, axes: Axes, losses: Losses, reference: ReferenceLosses) -> None:
        points = [
            (self._clock.of(each.at), difference(each.loss, reference.losses[each.step]))
            for each, is_lost in zip(losses.points, losses.lost, strict=True)
            if not is_lost and each.step in reference.losses
        ]
        unequal = [(x, value) for x, value in points if value > 0]
        equal = [x for x, value in points if value == 0]
        axes.axhline(reference.limit, color=LIMIT, linewidth=1.2)
        axes.annotate(
            f"limit {_power(round(math.log10(reference.limit)))}", (0, reference.limit),
            xycoords=("axes fraction", "data"), xytext=(6, 3), textcoords="offset points",
            color=LIMIT, fontsize=8.5, va="bottom",
        )  # fmt: skip
        axes.scatter([x for x, _ in unequal], [v for _, v in unequal], s=9, color=LOSS)
        axes.scatter(
            equal, [BIT_EQUAL] * len(equal), s=12, facecolor="white", edgecolor=LOSS, linewidth=0.8
        )
        axes.set_yscale("log")
        largest = max((value for _, value in points if math.isfinite(value)), default=0.0)
        axes.set_ylim(BIT_EQUAL / 10, max(2e-3, largest * 3))
        powers = (-15, -12, -9, -6)
        axes.set_yticks(
            [BIT_EQUAL, *(10.0**power for power in powers)], ["equal", *map(_power, powers)]
        )
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set_title("Relative difference to the losses of the uninterrupted run", pad=5)

    @property
    def _has_failures(self) -> bool:
        return bool(
            self._history.incidents or any(each.is_recovery for each in self._history.resizes)
        )

    def _rows_of_layouts(self) -> dict[str, str]:
        """Label of each layout's row: of the largest first, and one for the rare ones."""
        spent, ranks = dict[str, float](), dict[str, int]()
        for bar in self._clock.bars:
            name = bar.resize.layout
            spent[name] = spent.get(name, 0.0) + bar.end - bar.begin
            ranks[name] = bar.resize.ranks
        kept = sorted(spent, key=lambda name: -spent[name])
        rare = kept[MOST_LAYOUTS - 1 :] if len(kept) > MOST_LAYOUTS else []
        ordered = sorted(set(kept) - set(rare), key=lambda name: (-ranks[name], name))
        rows = {name: plain(name, 36) for name in ordered}
        return {**rows, **dict.fromkeys(rare, f"{len(rare)} other layouts")}

    def _draw_layouts(self, axes: Axes) -> None:
        labels = list(dict.fromkeys(self._layouts.values()))
        least = 0.0012 * self._clock.span
        spent, lost = list[_Box](), list[_Box]()
        for bar in self._clock.bars:
            row = labels.index(self._layouts[bar.resize.layout]) - 0.31
            begin, end, again = (self._clock.x(each) for each in (bar.begin, bar.end, bar.lost))
            spent.append((begin, row, max(end - begin, least), 0.62))
            if again < end:
                lost.append((again, row, max(end - again, 2 * least), 0.62))
        _boxes(axes, spent, facecolor=LOSS, zorder=2)
        _boxes(
            axes, lost, facecolor="white", edgecolor=LOST, hatch="//////", linewidth=1.0, zorder=3
        )
        if self._has_failures:
            stops = [
                self._clock.x(before.end)
                for before, bar in pairwise(self._clock.bars)
                if bar.resize.is_recovery
            ]
            warned = [self._clock.of(each.at) for each in self._history.incidents]
            within = [x for x in [*stops, *warned] if 0 <= x <= self._clock.span]
            axes.plot(
                within, [len(labels)] * len(within), "x", color=LOST, markersize=6,
                markeredgewidth=1.6, zorder=4,
            )  # fmt: skip
            labels.append("failures")
        axes.set_yticks(range(len(labels)), labels)
        axes.set_ylim(max(2, len(labels)) - 0.5, -0.5)
        axes.tick_params(axis="y", length=0)
        title = "Layout"
        if lost:
            title += " (hatched: lost steps, made again)"
        # Without losses the numbers of the changes stand in between.
        axes.set_title(title, pad=5 if self._losses is not None else 20)

    def _time_axis(self, axes: Axes, height: float) -> None:
        """Label the time, and below it the steps."""
        begin = self._clock.zero
        axes.set_xlabel(f"{self._clock.unit} since {when(begin)} {zone_at(begin)}", labelpad=2)
        ticks = self._steps()
        if ticks:
            steps = axes.secondary_xaxis(-0.55 / height)
            steps.set_xticks([x for x, _ in ticks], [f"{step:,}" for _, step in ticks])
            steps.set_xlabel("step", labelpad=2)
            steps.tick_params(colors=SOFT)

    def _steps(self) -> list[tuple[float, int]]:
        """Places of round numbers of steps, when they were made for the last time."""
        pairs = list[tuple[float, int]]()
        if self._losses is not None and self._losses.has_steps and self._losses.is_timed:
            pairs = [
                (self._clock.of(point.at), point.step)
                for point, is_lost in zip(self._losses.points, self._losses.lost, strict=True)
                if not is_lost
            ]
        else:
            for stretch, bar in zip(self._history.stretches, self._clock.bars, strict=True):
                pairs.append((self._clock.x(bar.begin), stretch.first))
                if stretch.kept is not None and stretch.kept > stretch.first:
                    pairs.append((self._clock.x(bar.lost), stretch.kept))
            if self._losses is not None and self._losses.has_steps and self._losses.points:
                last = self._losses.points[-1]
                pairs.append((self._clock.of(last.at), last.step))
        return list(_round_steps(pairs, self._clock.span))

    # ------------------------------------------------------------------ cost of each change

    def _draw_rows(self) -> None:
        """Each change has a row."""
        height = 0.42 * len(self._changes)
        total, begin, top = _WIDTH - _LEFT - _RIGHT, _LEFT, self._top
        shares = {"pause": 0.38, "state": 0.29, "lost": 0.1, "moved": 0.14}
        gap = (1 - sum(shares.values())) / (len(shares) - 1) * total
        found = {}
        for name, share in shares.items():
            self._top = top
            found[name] = self._axes(height, 0.0, begin, share * total)
            begin += share * total + gap
            found[name].set_ylim(len(self._changes) - 0.5, -0.5)
            found[name].tick_params(axis="y", length=0)
            found[name].set_yticks(range(len(self._changes)), [""] * len(self._changes))
        found["pause"].set_yticks(
            range(len(self._changes)), [_label(*each) for each in self._changes]
        )
        found["pause"].tick_params(axis="y", labelsize=8.5)
        resizes = [resize for _, resize in self._changes]
        _pauses(found["pause"], resizes)
        _state(found["state"], resizes)
        lost = [(each.steps_lost, _or_dash(each.steps_lost)) for each in resizes]
        _values(found["lost"], lost, LOST, "Steps lost", "steps")
        moved = [(each.bytes_moved, bytes_text(each.bytes_moved)) for each in resizes]
        _values(found["moved"], moved, LOSS, "State moved", "")
        self._top = top + height

    def _draw_columns(self) -> None:
        """Each change has a column."""
        numbers = [number for number, _ in self._changes]
        resizes = [resize for _, resize in self._changes]
        pause = self._axes(2.0, gap=0.35)
        floors, parts = [0.0] * len(resizes), [_parts(each) for each in resizes]
        for phase, colour in [*_ordered(resizes), ("other", "white")]:
            tall = [part.get(phase, 0.0) for part in parts]
            edge = PALE if phase == "other" else colour
            _columns(pause, numbers, floors, tall, facecolor=colour, edgecolor=edge)
            floors = [floor + each for floor, each in zip(floors, tall, strict=True)]
        room, named = 0.025 * (numbers[-1] - numbers[0]), list[int]()
        for top, number in sorted(zip(floors, numbers, strict=True), reverse=True)[:5]:
            if any(abs(number - other) < room for other in named):
                continue
            named.append(number)
            pause.annotate(
                f"{number}", (number, top), xytext=(0, 1), textcoords="offset points",
                ha="center", va="bottom", fontsize=8, color=SOFT,
            )  # fmt: skip
        pause.set_ylim(0, 1.12 * max(1e-3, *floors))
        pause.set_ylabel("seconds")
        _head(
            pause,
            "Pause of each change (the longest with their numbers)",
            resizes,
            {**COLOURS, "other": "white"},
            9,
        )
        lost = self._axes(0.75, gap=0.35)
        ground = [0.0] * len(resizes)
        _columns(lost, numbers, ground, [each.steps_lost or 0 for each in resizes], facecolor=LOST)
        lost.set_ylabel("steps lost")
        moved = self._axes(0.75, gap=0.0)
        scale, unit = _bytes_unit([each.bytes_moved or 0 for each in resizes])
        sizes = [(each.bytes_moved or 0) / scale for each in resizes]
        _columns(moved, numbers, ground, sizes, facecolor=LOSS)
        moved.set_ylim(0, 1.1 * max(1e-3, *sizes))
        moved.set_ylabel(f"{unit} moved")
        moved.set_xlabel("number of the change")
        for axes in (pause, lost, moved):
            axes.set_xlim(numbers[0] - 1, numbers[-1] + 1)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.tick_params(labelbottom=axes is moved)
        lost.yaxis.set_major_locator(MaxNLocator(3, integer=True))
        lost.set_ylim(0, max(1, *(each.steps_lost or 0 for each in resizes)) * 1.1)
        moved.yaxis.set_major_locator(MaxNLocator(3))


_Box = tuple[float, float, float, float]
"""Left, bottom, width, height."""


def _boxes(axes: Axes, boxes: Sequence[_Box], **style: Any) -> None:
    """Draw boxes as one object: thousands of bars take minutes."""
    corners = [[(x, y), (x + w, y), (x + w, y + h), (x, y + h)] for x, y, w, h in boxes]
    axes.add_collection(PolyCollection(corners, **style))


def _columns(
    axes: Axes, numbers: Sequence[int], floors: Sequence[float], tall: Sequence[float], **style: Any
) -> None:
    boxes = [
        (number - 0.42, floor, 0.84, height)
        for number, floor, height in zip(numbers, floors, tall, strict=True)
        if height
    ]
    _boxes(axes, boxes, linewidth=0.3, **style)


def _thinned(points: Sequence[Point], most: int) -> Sequence[Point]:
    """At most ``most`` points: of each place the first, the least and the largest."""
    if len(points) <= max(3, most):
        return points
    most = max(3, most)
    size = math.ceil(3 * len(points) / most)
    kept = list[Point]()
    for start in range(0, len(points), size):
        place = points[start : start + size]
        chosen = {place[0].at: place[0]}
        for each in (min(place, key=_loss), max(place, key=_loss)):
            chosen[each.at] = each
        kept += [chosen[at] for at in sorted(chosen)]
    return kept


def _loss(point: Point) -> float:
    return point.loss


def _spread(points: Sequence[Point]) -> Sequence[Point]:
    return points[:: math.ceil(len(points) / 200)]


def _round_steps(pairs: Sequence[tuple[float, int]], span: float) -> Iterator[tuple[float, int]]:
    """Yield places of round steps, between (place, step) in order; not closer than labels are
    wide."""
    rising = [pairs[0]] if pairs else []
    for x, step in pairs:
        if step > rising[-1][1] and x >= rising[-1][0]:
            rising.append((x, step))
    if len(rising) < 2:
        return
    first, last = rising[0][1], rising[-1][1]
    raw = max(1.0, (last - first) / 9)
    power = 10.0 ** math.floor(math.log10(raw))
    every = int(next(n * power for n in (1, 2, 5, 10) if n * power >= raw))
    wanted, free, place = math.ceil(first / every) * every, -math.inf, 0
    steps = [step for _, step in rising]
    while wanted <= last:
        place = max(1, min(bisect_right(steps, wanted), len(rising) - 1))
        (x0, s0), (x1, s1) = rising[place - 1], rising[place]
        x = x0 + (x1 - x0) * (wanted - s0) / (s1 - s0)
        if x >= free:
            yield x, wanted
            free = x + (0.02 + 0.008 * len(f"{wanted:,}")) * span
        wanted += every


_DIGITS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def _power(exponent: int) -> str:
    return f"10{str(exponent).translate(_DIGITS)}"


def _label(number: int, resize: Resize) -> str:
    before = "" if resize.before is None else f"{resize.before} → "
    return f"{number}  {plain(reason_of(resize), 36)}\n{plain(before + resize.after, 44)}"


def _or_dash(count: int | None) -> str:
    return "-" if count is None else f"{count:,}"


def _parts(resize: Resize) -> dict[str, float]:
    """Seconds of the pause by phase; "other": what no phase counts."""
    parts = {phase: s for phase, s in resize.seconds.items() if phase not in NO_PAUSE and s}
    known = {phase: s for phase, s in parts.items() if phase in COLOURS}
    other = max(resize.paused_s or 0.0, sum(parts.values())) - sum(known.values())
    return {**known, "other": other} if other > 0 else known


def _ordered(resizes: Sequence[Resize]) -> list[tuple[str, str]]:
    """Known phases with their colours, in the order of the reports."""
    names = dict.fromkeys(phase for each in resizes for phase in each.seconds if phase in COLOURS)
    return [(phase, COLOURS[phase]) for phase in names]


def _pauses(axes: Axes, resizes: Sequence[Resize]) -> None:
    """Draw the phases of each change as one bar; left of zero the old workers still train."""
    ends = []
    for row, resize in enumerate(resizes):
        before = sum(resize.seconds.get(phase, 0.0) for phase in NO_PAUSE)
        axes.barh(row, -before, height=0.55, color="white", edgecolor=PALE, hatch="////")
        begin, parts = 0.0, _parts(resize)
        for phase, colour in [*_ordered(resizes), ("other", "white")]:
            if phase in parts:
                axes.barh(
                    row, parts[phase], left=begin, color=colour, height=0.55, linewidth=0.8,
                    edgecolor=PALE if phase == "other" else colour,
                )  # fmt: skip
                begin += parts[phase]
        ends.append(begin)
        axes.text(begin, row, f"  {seconds_text(resize.paused_s)}", va="center", fontsize=9)
    axes.axvline(0, color=INK, linewidth=0.9)
    left = axes.get_xlim()[0]
    right = max(0.05, *ends)
    # Of long builds beside the training only the end is drawn.
    left = max(left, -0.6 * right)
    for row, resize in enumerate(resizes):
        before = sum(resize.seconds.get(phase, 0.0) for phase in NO_PAUSE)
        if before > -left:
            axes.text(
                left + 0.03 * (right - left), row, f"← {seconds_text(before)}", va="center",
                fontsize=8, bbox={"facecolor": "white", "linewidth": 0, "pad": 1.5},
            )  # fmt: skip
    axes.set_xlim(left, right + 0.16 * (right - left))
    axes.set_xlabel("seconds since the last step before the change")
    shown = {**OTHER_PHASES, "other": "white"}
    _head(axes, "Pause of each change", resizes, shown, 2, has_training=True)


def _state(axes: Axes, resizes: Sequence[Resize]) -> None:
    """Draw what of it the state took, on a scale of its own."""
    totals = [sum(each.seconds.get(phase, 0.0) for phase in STATE_PHASES) for each in resizes]
    unit_s, unit = (1.0, "s") if max(totals) >= 2 else (1e-3, "ms")
    for row, (resize, total) in enumerate(zip(resizes, totals, strict=True)):
        begin = 0.0
        for phase, colour in STATE_PHASES.items():
            wide = resize.seconds.get(phase, 0.0) / unit_s
            axes.barh(row, wide, left=begin, color=colour, height=0.55)
            begin += wide
        is_known = any(phase in resize.seconds for phase in STATE_PHASES)
        text = f"  {total / unit_s:.{1 if unit == 's' else 0}f} {unit}" if is_known else "  -"
        axes.text(begin, row, text, va="center", fontsize=9)
    axes.set_xlim(0, max(1e-3, *totals) / unit_s * 1.3)
    axes.set_xlabel("seconds" if unit == "s" else "milliseconds")
    _head(axes, "Of it for the state", resizes, STATE_PHASES, 3)


def _values(
    axes: Axes, values: Sequence[tuple[int | None, str]], colour: str, title: str, unit: str
) -> None:
    """Draw a bar a row, with its value."""
    most = max(1, *(value or 0 for value, _ in values))
    for row, (value, text) in enumerate(values):
        axes.barh(row, value or 0, color=colour, height=0.45)
        axes.text(value or 0, row, f" {text}", va="center", fontsize=9)
    axes.set_xlim(0, most * 2.1)
    axes.set_xticks([])
    axes.set_xlabel(unit)
    axes.set_title(title, pad=8)


def _bytes_unit(counts: Sequence[int]) -> tuple[float, str]:
    text = bytes_text(max(counts))
    unit = text.split()[1]
    return 1000.0 ** BYTES.index(unit), unit


def _head(
    axes: Axes, title: str, resizes: Sequence[Resize], phases: Mapping[str, str], columns: int,
    *, has_training: bool = False,
) -> None:  # fmt: skip
    """Write the title, and under it what the colours mean."""
    entries = dict[str, Patch]()
    if has_training:
        entries["still training"] = Patch(facecolor="white", edgecolor=PALE, hatch="////")
    shown = {phase for each in resizes for phase in (*each.seconds, *_parts(each))}
    for phase, colour in phases.items():
        if phase in shown:
            edge = PALE if phase == "other" else colour
            entries[phase.replace("_", " ")] = Patch(facecolor=colour, edgecolor=edge)
    lines = math.ceil(len(entries) / columns)
    axes.set_title(title, pad=8 + 15 * lines)
    axes.legend(
        list(entries.values()), list(entries), ncols=columns, frameon=False, fontsize=8.5,
        loc="lower left", bbox_to_anchor=(0.0, 1.0), handlelength=1.2, handletextpad=0.5,
        columnspacing=1.1, borderaxespad=0.2, borderpad=0.0,
    )  # fmt: skip
