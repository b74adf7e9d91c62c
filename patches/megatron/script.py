"""What of Megatron-LM's training scripts may surprise."""

from collections.abc import Iterator
from typing import Any


def warnings_of(args: Any) -> Iterator[str]:
    """Yield what goes, but may surprise: one line each, for the log."""
    if getattr(args, "exit_signal_handler", False):
        yield (
            "--exit-signal-handler: a signal that reaches the workers themselves ends the job by "
            "Megatron's own save, not by a resize. Signal the agent instead"
        )
    if getattr(args, "dataloader_type", None) == "external":
        yield (
            "--dataloader-type external: the loader has to begin at args.consumed_train_samples "
            "itself, and its order must not depend on the data-parallel size"
        )
    if getattr(args, "exit_duration_in_mins", None):
        yield "--exit-duration-in-mins counts from the newest start of the workers"
