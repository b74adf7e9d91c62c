"""The devices of several jobs over time in one picture, from their histories."""

import io
import warnings
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from scalai.launch.commands.history_picture import PALE, SOFT, STYLE, plain, unit_of
from scalai.launch.commands.job_history import History, when, zone_at

COLOURS = ("#0072b2", "#e69f00", "#7cc4ee", "#b8400e", "#009e73", "#f5e663", "#7a3b73", "#99a3ab")
"""As those of phases: they stay apart for the colour-blind. With more jobs they come again."""
HATCHES = ("", "///", "...", "xxx")


def picture(
    histories: Sequence[History],
    form: Literal["png", "svg"],
    *,
    devices: Sequence[tuple[float, int]] = (),
) -> bytes:
    """Draw the devices by job, one upon the other; a job has none in a pause.

    Args:
        histories: Each with at least one start.
        devices: Devices that there are, from a time on, in seconds since 1970.
    """
    bars = [_bars(history) for history in histories]
    zero = min(begin for each in bars for begin, _, _ in each)
    last = max(end for each in bars for _, end, _ in each)
    unit, unit_s = unit_of(last - zero)
    times = sorted({at for each in bars for begin, end, _ in each for at in (begin, end)})
    figure = Figure(figsize=(13.5, 4.2))
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a name in letters that the font lacks
        axes = figure.add_axes((0.07, 0.16, 0.77, 0.66))
        x = (np.array(times) - zero) / unit_s
        below = np.zeros(len(times) - 1)
        for number, (history, spans) in enumerate(zip(histories, bars, strict=True)):
            counts = np.array(
                [sum(n for begin, end, n in spans if begin <= at < end) for at in times[:-1]], float
            )
            axes.bar(
                x[:-1], counts, np.diff(x), below, align="edge", linewidth=0,
                color=COLOURS[number % len(COLOURS)],
                hatch=HATCHES[number // len(COLOURS) % len(HATCHES)],
                label=plain(history.name, 24),
            )  # fmt: skip
            below = below + counts
        if devices:
            ends = [*(max(at, zero) for at, _ in devices), last]
            known = [count for _, count in devices]
            axes.step(
                [(at - zero) / unit_s for at in ends], [*known, known[-1]], where="post",
                color="#22303c", linewidth=1.6, label="devices",
            )  # fmt: skip
        axes.set_xlim(0, max(last - zero, 1e-3) / unit_s)
        axes.set_ylim(0, 1.05 * max([*below, *(count for _, count in devices)], default=1))
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(axis="y", color=PALE, linewidth=0.4)
        axes.set_ylabel("devices")
        axes.set_xlabel(unit)
        axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.005, 1.0), fontsize=9)
        figure.text(0.03, 0.93, f"Devices of {len(histories)} jobs", fontsize=17, weight="bold")
        changes = sum(len(history.changes) for history in histories)
        text = f"{when(zero)} to {when(last)} {zone_at(last)}. {changes} changes."
        figure.text(0.03, 0.865, text, color=SOFT)
        output = io.BytesIO()
        figure.savefig(
            output, format=form, dpi=150, metadata={"Date": None} if form == "svg" else {}
        )
    return output.getvalue()


def _bars(history: History) -> list[tuple[float, float, int]]:
    """Begin, end and devices of each stretch; one with an unknown end lasts until the next one."""
    stretches = list(history.stretches)
    nexts = [after.begin for _, after in pairwise(stretches)]
    nexts.append(max([stretches[-1].begin, *history.heard]))
    return [
        (each.begin, each.end if each.end is not None else until, each.resize.ranks)
        for each, until in zip(stretches, nexts, strict=True)
    ]
