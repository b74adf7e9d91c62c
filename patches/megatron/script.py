"""What of Megatron-LM's training scripts may surprise, and what is known of their data alone."""

from collections.abc import Iterator
from typing import Any

from scalai.core.errors import RefusedError


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


def refuse_random_order(total_samples: int, global_batch_size: int) -> None:
    """Check the epoch of a random sampler without data sharding.

    Its epoch ends at the last whole ``micro_batch_size * data_parallel_size`` samples. That is the
    same for every data-parallel size only if whole global batches make an epoch. Source:
    MegatronPretrainingRandomSampler, megatron/training/datasets/data_samplers.py (0.16).

    Raises:
        RefusedError: The order of samples would depend on the data-parallel size.
    """
    if total_samples % global_batch_size:
        raise RefusedError(
            f"--dataloader-type cyclic: {total_samples} samples are not a multiple of the global "
            f"batch of {global_batch_size}, so the length of an epoch, and with it the order of "
            "samples, would depend on the data-parallel size. Use --dataloader-type single."
        )
