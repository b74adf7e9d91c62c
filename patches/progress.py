"""Which of two states a job continues from: a generation of ours, or the framework's checkpoint."""

from typing import Literal

Source = Literal["generation", "checkpoint", "nothing"]


def choose_source(generation_step: int | None, checkpoint_step: int | None) -> Source:
    """Say which state is newer. At the same step the generation is: it is exact in any layout.

    Args:
        generation_step: Step of the generation that could be restored; None if there is none.
        checkpoint_step: Iteration of the checkpoint under ``--load``; None if there is none.
    """
    if generation_step is None:
        return "nothing" if checkpoint_step is None else "checkpoint"
    if checkpoint_step is not None and checkpoint_step > generation_step:
        return "checkpoint"
    return "generation"


def describe_source(
    source: Source, generation_step: int | None, checkpoint_step: int | None, load: str | None
) -> str:
    """One line for the log that names both states."""
    generation = "none" if generation_step is None else f"step {generation_step}"
    checkpoint = "none" if checkpoint_step is None else f"iteration {checkpoint_step}"
    return (
        f"event=continue source={source} generation={generation!r} checkpoint={checkpoint!r} "
        f"load={load}"
    )
