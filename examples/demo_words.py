"""What the demonstration prints: values in, text out."""

from collections.abc import Sequence
from pathlib import Path

from demo_frameworks import Framework
from demo_story import Change, Check, Run, pause_s

from scalai.launch.commands.job_history import NO_PAUSE, Resize

_WIDTH = 12


def introduction(framework: Framework, data: Path | None) -> str:
    """Return what is about to happen, and the head of the lines that follow."""
    text = "the documentation texts of Python itself" if data is None else str(data)
    return f"""\
Scalai: a GPT changes its layout while it trains

  text      {text}, a token a byte
  model     {framework.model}
  hosts     a and b, later c: three agents on this machine
  state     in memory from the first step to the last

   step  change                       degrees                  training paused"""


def change_line(change: Change, resize: Resize, run: Run) -> str:
    """Return one line of the story, after the change."""
    paused = f"{pause_s(run, resize):5.1f} s" if resize.step else ""
    degrees = f"{resize.after} on {resize.world}"
    return f"{resize.step:>7}  {change!s:27}  {degrees:25}{paused}".rstrip()


def end_line(run: Run) -> str:
    return f"{run.last_step:>7}  all hosts leave              the state is saved to disk"


def phase_table(run: Run, resizes: Sequence[Resize], story: Sequence[Change]) -> str:
    """Return the seconds of each phase, a column a change."""
    columns = list(zip(story, resizes, strict=False))[1:]
    lines = [_row("  seconds", [change.label for change, _ in columns])]
    for phase in dict.fromkeys(phase for _, resize in columns for phase in resize.seconds):
        mark = " *" if phase in NO_PAUSE else ""
        values = [f"{resize.seconds.get(phase, 0.0):.3f}" for _, resize in columns]
        lines.append(_row("    " + phase.replace("_", " ") + mark, values))
    paused = [f"{pause_s(run, resize):.3f}" for _, resize in columns]
    moved = [f"{(resize.bytes_moved or 0) / 1e6:.1f}" for _, resize in columns]
    lines += [_row("  training paused", paused), _row("  state moved, MB", moved)]
    return "\n".join([*lines, "  * the old workers still train\n"])


def _row(name: str, values: Sequence[str]) -> str:
    return f"{name:22}" + "".join(f"{value:>{_WIDTH}}" for value in values)


def check_lines(checks: Sequence[Check]) -> str:
    """Return the verdicts, a line each."""
    width = max(len(one.promise) for one in checks)
    return "\n".join(
        f"  {'✓' if one.is_kept else '✗'} {one.promise:{width}}  {one.found}" for one in checks
    )
