"""The demonstration in one picture: that of ``scalai plot``, beside an uninterrupted run."""

from pathlib import Path

from demo_story import LOSS_LIMIT, Run

from scalai.launch.commands.history_picture import ReferenceLosses, picture
from scalai.launch.commands.job_history import History, Losses, Point


def draw(history: History, elastic: Run, reference: Run, path: Path) -> Path:
    """Write the picture as a PNG; return its path."""
    points = (Point(line.at, line.step, line.loss) for line in elastic.steps)
    drawing = picture(
        history,
        Losses("its resources change", tuple(points)),
        "png",
        title=f"One training, {_layouts(history)} layouts",
        reference=ReferenceLosses({line.step: line.loss for line in reference.steps}, LOSS_LIMIT),
    )
    path.write_bytes(drawing)
    return path


def _layouts(history: History) -> int:
    return len({resize.layout for resize in history.resizes})
