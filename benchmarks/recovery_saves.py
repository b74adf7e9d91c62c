"""Where the jobs of ``recovery.py`` save under torchrun: ``step-<n>`` is whole."""

from pathlib import Path


def save_path(saves: Path, step: int) -> Path:
    return saves / f"step-{step}"


def step_of(save: Path) -> int:
    return int(save.name.removeprefix("step-"))


def newest_save(saves: Path) -> Path | None:
    """Return the newest whole save, None where there is none."""
    return max(saves.glob("step-*"), key=step_of, default=None)
