"""A schedule of faults in one picture: what each cost, in seconds by phase and in steps. Without
matplotlib there is none."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

INK, PALE, GOOD, BAD = "#22303c", "#b9c6d2", "#0b6e8f", "#c8443a"
PHASES = {
    "known": "#b9c6d2", "drain": "#6fb1c7", "snapshot": "#0b6e8f", "relaunch": "#5c6b78",
    "move": "#d9822b", "restore": "#a44a3f", "proof": "#5d4a7e", "first_step": "#e3b23c",
}  # fmt: skip


def draw(verdict: Mapping[str, Any], path: Path) -> Path | None:
    """Write the picture of a verdict as a PNG; return its path, None: matplotlib is not there.

    Args:
        verdict: As ``verdict.json`` has it.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
        from matplotlib.patches import Rectangle
    except ImportError:
        return None
    outcomes = [each for each in verdict["outcomes"] if not each["skipped"]]
    height = 1.6 + 0.32 * max(1, len(outcomes))
    figure, (times, steps) = plt.subplots(
        1, 2, figsize=(12, height), sharey=True, width_ratios=(2.2, 1), layout="constrained"
    )
    names = [f"{each['kind']} ({','.join(each['hosts'])})" for each in outcomes]
    places = list(range(len(outcomes)))
    for place, each in zip(places, outcomes, strict=True):
        left = 0.0
        for phase, color in PHASES.items():
            width = _seconds(each, phase)
            times.barh(place, width, left=left, color=color, height=0.62)
            left += width
        if each["back_s"] is not None:
            times.plot(each["back_s"], place, "|", color=INK, markersize=9)
        color = BAD if each["problems"] else GOOD
        steps.barh(place, each["steps_lost"], color=color, height=0.5)
        if each["limit"] is not None:
            steps.plot(each["limit"], place, "|", color=INK, markersize=11)
    times.set_yticks(places, names, fontsize=8)
    for label, each in zip(times.get_yticklabels(), outcomes, strict=True):
        label.set_color(BAD if each["problems"] else INK)
    times.invert_yaxis()
    times.set_xlabel("seconds until the next round trains, by phase; |: all hosts train again")
    steps.set_xlabel("steps lost; |: as many as may be")
    for axes in (times, steps):
        axes.spines[["top", "right"]].set_visible(False)
    handles = [Rectangle((0, 0), 1, 1, color=color) for color in PHASES.values()]
    times.legend(handles, list(PHASES), fontsize=7, loc="lower right", ncols=2, frameon=False)
    word = "as stated" if verdict["holds"] else "NOT as stated"
    figure.suptitle(f"{verdict['passed']} of {verdict['faults']} kinds of faults: {word}", x=0.5)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def _seconds(outcome: Mapping[str, Any], phase: str) -> float:
    if phase == "known":
        return float(outcome["detect_s"] or 0.0)
    return float(sum(each["seconds"].get(phase, 0.0) for each in outcome["rounds"]))
