"""The demonstration in one picture: losses, their differences, and what each change cost."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from demo_story import LOSS_LIMIT, NO_PAUSE, Change, Resize, Run, difference, pause_s

# It says on standard error that it builds its cache of fonts, the first time.
logging.getLogger("matplotlib").setLevel(logging.ERROR)

import matplotlib  # noqa: E402

matplotlib.use("Agg")

import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.patches import Rectangle  # noqa: E402
from matplotlib.ticker import MaxNLocator, NullLocator  # noqa: E402

INK, SOFT, PALE = "#22303c", "#51606d", "#8a97a3"
REFERENCE, ELASTIC, LIMIT = "#b9c6d2", "#0b6e8f", "#c8443a"
LEFT = 0.085
BANDS = ("#f4f7f9", "#e6edf2")
STATE_PHASES = {
    "snapshot": "#0b6e8f",
    "commit": "#6fb1c7",
    "plan": "#e3b23c",
    "move": "#d9822b",
    "restore": "#a44a3f",
    "proof": "#5d4a7e",
}
OTHER_PHASES = {"relaunch": "#aebac5", "first_step": "#5c6b78"}
STYLE: Any = {
    "font.size": 10, "text.color": INK, "xtick.color": INK, "ytick.color": INK,
    "axes.edgecolor": PALE, "axes.labelcolor": INK, "axes.spines.top": False,
    "axes.spines.right": False, "axes.titlesize": 10.5, "axes.titleweight": "bold",
    "axes.titlelocation": "left",
}  # fmt: skip
BIT_EQUAL = 1e-18
"""Where differences of exactly zero are drawn on a logarithmic axis."""


def draw(
    elastic: Run, reference: Run, resizes: Sequence[Resize], story: Sequence[Change], path: Path
) -> Path:
    """Write the picture as a PNG; return its path."""
    with plt.rc_context(STYLE):
        figure = plt.figure(figsize=(12, 10), dpi=150)
        curves = figure.add_gridspec(
            2, 1, height_ratios=(2.5, 1), hspace=0.2, left=LEFT, right=0.975, top=0.855, bottom=0.38
        )
        costs = figure.add_gridspec(
            1, 2, width_ratios=(1.1, 1), wspace=0.05, left=LEFT, right=0.975, top=0.245, bottom=0.06
        )
        upper = figure.add_subplot(curves[0])
        middle = figure.add_subplot(curves[1], sharex=upper)
        _headline(figure)
        for axes in (upper, middle):
            _bands(axes, elastic, resizes)
        _losses(upper, elastic, reference, resizes, story)
        _differences(middle, elastic, reference)
        changes = list(zip(story, resizes, strict=False))[1:]
        _pauses(figure.add_subplot(costs[0]), elastic, changes)
        _state(figure.add_subplot(costs[1]), changes)
        figure.savefig(path)
        plt.close(figure)
    return path


def _headline(figure: Figure) -> None:
    figure.text(LEFT, 0.955, "One training, five layouts", fontsize=17, weight="bold")
    figure.text(
        LEFT, 0.93, "The state goes from layout to layout in memory. The losses stay those of a "
        "run that nobody interrupts.", color=SOFT,
    )  # fmt: skip


def _bands(axes: Axes, run: Run, resizes: Sequence[Resize]) -> None:
    """Shade the steps of each round."""
    ends = [*(resize.step + 0.5 for resize in resizes[1:]), run.last_step + 0.5]
    begin = 0.5
    for number, end in enumerate(ends):
        axes.axvspan(begin, end, color=BANDS[number % 2], linewidth=0, zorder=0)
        if number:
            axes.axvline(begin, color=PALE, linewidth=0.9, linestyle=(0, (2, 2)), zorder=1)
        begin = end
    axes.set_xlim(0.5, run.last_step + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _losses(
    axes: Axes, elastic: Run, reference: Run, resizes: Sequence[Resize], story: Sequence[Change]
) -> None:
    axes.plot(
        [line.step for line in reference.steps], [line.loss for line in reference.steps],
        color=REFERENCE, linewidth=6, solid_capstyle="round", label="uninterrupted",
    )  # fmt: skip
    axes.plot(
        [line.step for line in elastic.steps], [line.loss for line in elastic.steps],
        color=ELASTIC, linewidth=1.5, label="its resources change",
    )  # fmt: skip
    above = axes.get_xaxis_transform()
    ends = [*(resize.step for resize in resizes[1:]), elastic.last_step]
    narrowest = min(end - resize.step for resize, end in zip(resizes, ends, strict=True))
    size = 8.5 if narrowest > 0.09 * elastic.last_step else 6.5
    for change, resize, end in zip(story, resizes, ends, strict=False):
        middle = (resize.step + end) / 2 + 0.5
        axes.text(
            middle, 1.035, f"{resize.degrees}\n{resize.world}", transform=above, ha="center",
            va="bottom", fontsize=size, linespacing=1.35, color=INK,
        )  # fmt: skip
        if resize.step:
            axes.annotate(
                change.label, (resize.step + 0.5, 0.965), xycoords=above, xytext=(4, 0),
                textcoords="offset points", fontsize=8.5, style="italic", color=SOFT, va="top",
            )  # fmt: skip
    axes.set_ylabel("loss")
    axes.tick_params(labelbottom=False)
    axes.legend(frameon=False, loc="lower left")


def _differences(axes: Axes, elastic: Run, reference: Run) -> None:
    known = {line.step: line.loss for line in reference.steps}
    points = [
        (line.step, difference(line.loss, known[line.step]))
        for line in elastic.steps
        if line.step in known
    ]
    unequal = [(step, value) for step, value in points if value > 0]
    equal = [step for step, value in points if value == 0]
    axes.axhline(LOSS_LIMIT, color=LIMIT, linewidth=1.2)
    axes.annotate(
        "limit $10^{-6}$", (0, LOSS_LIMIT), xycoords=("axes fraction", "data"), xytext=(6, 3),
        textcoords="offset points", color=LIMIT, fontsize=8.5, va="bottom",
    )  # fmt: skip
    axes.scatter([step for step, _ in unequal], [v for _, v in unequal], s=9, color=ELASTIC)
    axes.scatter(
        equal, [BIT_EQUAL] * len(equal), s=12, facecolor="white", edgecolor=ELASTIC, linewidth=0.8
    )
    axes.set_yscale("log")
    largest = max((value for _, value in points), default=0.0)
    axes.set_ylim(BIT_EQUAL / 10, max(2e-3, largest * 3))
    powers = (-15, -12, -9, -6)
    axes.set_yticks(
        [BIT_EQUAL, *(10.0**power for power in powers)],
        ["equal", *(f"$10^{{{power}}}$" for power in powers)],
    )
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_title("Relative difference of the losses", pad=5)
    axes.set_xlabel("step")


def _pauses(axes: Axes, run: Run, changes: Sequence[tuple[Change, Resize]]) -> None:
    """Draw the phases of each change as one bar; left of zero the old workers still train."""
    colours = {**STATE_PHASES, **OTHER_PHASES}
    for row, (_, resize) in enumerate(changes):
        before = sum(resize.seconds[phase] for phase in NO_PAUSE)
        axes.barh(row, -before, height=0.55, color="white", edgecolor=PALE, hatch="////")
        begin = 0.0
        for phase, seconds in resize.seconds.items():
            if phase not in NO_PAUSE:
                axes.barh(row, seconds, left=begin, color=colours[phase], height=0.55)
                begin += seconds
        axes.text(begin, row, f"  {pause_s(run, resize):.1f} s", va="center", fontsize=9, color=INK)
    axes.axvline(0, color=INK, linewidth=0.9)
    left, right = axes.get_xlim()
    axes.set_xlim(right=right + 0.12 * (right - left))  # room for the figures
    _rows(axes, [change.label for change, _ in changes])
    axes.set_xlabel("seconds since the last step of the old layout (figures: less one step)")
    training = Rectangle((0, 0), 1, 1, facecolor="white", edgecolor=PALE, hatch="////")
    _head(axes, "Pause of each change", OTHER_PHASES, {"still training": training})


def _state(axes: Axes, changes: Sequence[tuple[Change, Resize]]) -> None:
    """Draw what of it the state took, on a scale of its own."""
    totals = []
    for row, (_, resize) in enumerate(changes):
        begin = 0.0
        for phase, colour in STATE_PHASES.items():
            milliseconds = resize.seconds[phase] * 1e3
            axes.barh(row, milliseconds, left=begin, color=colour, height=0.55)
            begin += milliseconds
        totals.append(begin)
        axes.text(begin, row, f"  {begin:.0f} ms", va="center", fontsize=9, color=INK)
    axes.set_xlim(right=max(totals) * 1.18)
    _rows(axes, [""] * len(changes))
    axes.set_xlabel("milliseconds")
    _head(axes, "Of it for the state", STATE_PHASES, {})


def _head(axes: Axes, title: str, phases: Mapping[str, str], more: Mapping[str, Rectangle]) -> None:
    """Write the title, and under it what the colours mean."""
    axes.set_title(title, pad=24)
    entries = {
        **more,
        **{p.replace("_", " "): Rectangle((0, 0), 1, 1, color=c) for p, c in phases.items()},
    }
    axes.legend(
        list(entries.values()), list(entries), ncols=len(entries), frameon=False, fontsize=8.5,
        loc="lower left", bbox_to_anchor=(0.0, 1.0), handlelength=1.2, handletextpad=0.5,
        columnspacing=1.1, borderaxespad=0.2, borderpad=0.0,
    )  # fmt: skip


def _rows(axes: Axes, labels: Sequence[str]) -> None:
    axes.set_yticks(range(len(labels)), labels)
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
