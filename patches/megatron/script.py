"""What of Megatron-LM's training scripts does not go with changing resources."""

from collections.abc import Iterator, Mapping
from typing import Any

from scalai.core.errors import RefusedError
from scalai.patches.faults import refuse_all

_FLAGS: Mapping[str, str] = {
    "decrease_batch_size_if_needed": (
        "the global batch, and with it the order of samples, would depend on the data-parallel size"
    ),
    "use_mp_args_from_checkpoint_args": (
        "the parallel degrees would come from the checkpoint instead of from this launcher"
    ),
    "inprocess_restart": "it restarts the workers itself",
    "perform_rl_step": "the model makes its own data, no sampler does",
    "hybrid_context_parallel": "its batches depend on the parallel degrees",
    "moe_use_upcycling": "it would be repeated at every change. Upcycle in a run of its own",
    "skip_train": "nothing is trained",
}
"""Switches of the scripts, as names of arguments, that must be off, and why."""


def refuse_script_arguments(args: Any) -> None:
    """Check the arguments of the training loop, the data and the checkpoints.

    Args:
        args: Megatron-LM's parsed arguments. Switches that a version does not know count as off.

    Raises:
        RefusedError: Names every switch that is in the way, with the reason.
    """
    refuse_all(_faults(vars(args)))


def _faults(args: Mapping[str, Any]) -> Iterator[str]:
    for name, reason in _FLAGS.items():
        if args.get(name):
            yield f"--{name.replace('_', '-')}: {reason}"
    if args.get("dataloader_type") == "cyclic" and args.get("data_sharding", True):
        yield (
            "--dataloader-type cyclic with data sharding: every data-parallel rank draws from its "
            "own part of the data, so other samples would make a batch after a change. Add "
            "--no-data-sharding, or use --dataloader-type single"
        )
    if args.get("non_persistent_ckpt_type") == "local":
        yield (
            "--non-persistent-ckpt-type local: such a checkpoint fits one layout only, and would "
            "be loaded in another. Use global"
        )


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
