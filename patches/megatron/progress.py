"""How far a Megatron-LM job is."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from scalai.core.errors import LayoutError
from scalai.core.jsonable import Json


@dataclass(frozen=True, slots=True)
class Progress:
    """What Megatron-LM's scripts count in their arguments while they train.

    ``iteration`` is the number of steps done, the samples are global counts,
    ``num_floating_point_operations_so_far`` is Megatron's own estimate. ``padded_vocab_size``, in
    rows, has to stay what it is: another size is another model.
    """

    iteration: int
    consumed_train_samples: int
    consumed_valid_samples: int
    skipped_train_samples: int
    num_floating_point_operations_so_far: float
    padded_vocab_size: int | None

    def to_json(self) -> Json:
        return asdict(self)


def take_progress(args: Any, iteration: int, flops: float) -> Progress:
    """Read the counters that Megatron-LM keeps in its arguments; the others are in its loop."""
    return Progress(
        iteration=iteration,
        consumed_train_samples=args.consumed_train_samples,
        consumed_valid_samples=args.consumed_valid_samples,
        skipped_train_samples=args.skipped_train_samples,
        num_floating_point_operations_so_far=float(flops),
        padded_vocab_size=getattr(args, "padded_vocab_size", None),
    )


def put_progress(args: Any, saved: Mapping[str, Json]) -> None:
    """Set Megatron-LM's counters to what ``Progress.to_json`` saved.

    Raises:
        LayoutError: The vocabulary is padded to another size than before.
    """
    progress = Progress(**saved)
    here = getattr(args, "padded_vocab_size", None)
    before = progress.padded_vocab_size
    if here != before:
        raise LayoutError(
            f"the vocabulary was padded to {before} rows and is padded to {here} here; padded rows "
            f"are trained, so this would be another model. Use --make-vocab-size-divisible-by N "
            f"with N times the tensor-parallel size dividing {before}."
        )
    args.iteration = progress.iteration
    args.consumed_train_samples = progress.consumed_train_samples
    args.consumed_valid_samples = progress.consumed_valid_samples
    args.skipped_train_samples = progress.skipped_train_samples
    args.num_floating_point_operations_so_far = progress.num_floating_point_operations_so_far


def checkpoint_step(tracker: str | None, ckpt_step: int | None, is_finetune: bool) -> int | None:
    """Return the iteration that ``--load`` would bring, or None if there is no checkpoint.

    Args:
        tracker: Content of ``latest_checkpointed_iteration.txt``; None where there is no such file.
        ckpt_step: ``--ckpt-step``, which overrides the tracker.
        is_finetune: ``--finetune`` takes the weights and counts from 0.
    """
    if tracker is None:
        return None
    if is_finetune:
        return 0
    if ckpt_step is not None:
        return ckpt_step
    text = tracker.strip()
    return int(text) if text.isdigit() else 0  # "release" has no iteration
