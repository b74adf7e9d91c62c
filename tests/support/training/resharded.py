"""Train in Megatron and save, reshard the checkpoint, load it with megatron-core, train on."""

from pathlib import Path
from typing import Any

from scalai.converters.checkpoint import ReadOptions, Values, WriteOptions
from scalai.converters.engine import Conversion, Limits
from scalai.converters.layouts import layout_named, open_checkpoint
from support.training.jobs import AFTER, Job, mean_losses
from support.training.worker_pool import WorkerPool

LIMITS = Limits(memory_bytes=256 << 20, workers=1)
WHOLE, FULL, FLAT, LEGACY = "fully_reshardable", "fully_reshardable", "dp_reshardable", "torch"
"""How Megatron saves an optimizer that is whole on every rank, that is split, and by buckets; and
the legacy layout."""


def save(
    pool: WorkerPool,
    job: Job,
    directory: Path,
    sharding: str,
    *,
    has_file: bool = True,
    local: tuple[str, str] | None = None,
) -> Any:
    """Train, save below ``directory`` as Megatron-LM would, train on; return what each rank saw.

    ``has_file``, ``local``: as for ``train_save_train``.
    """
    iteration = directory / f"iter_{AFTER.start:07d}"
    if sharding == LEGACY:
        runs = pool.run("legacy_worker:train_save_train", [(job, str(iteration))] * job.world)
    else:
        arguments = [(job, str(iteration), sharding, has_file, local)] * job.world
        runs = pool.run("checkpoint_worker:train_save_train", arguments)
    (directory / "latest_checkpointed_iteration.txt").write_text(str(AFTER.start))
    return runs


def convert(
    source: Path,
    destination: Path,
    job: Job,
    layout: str = "torch_dist",
    reference: Values | None = None,
) -> None:
    """Reshard a checkpoint to the degrees of a job."""
    degrees = {"tp": job.tp, "pp": job.pp, "vpp": job.vpp or 1, "ep": job.ep}
    degrees["dp"] = job.world // (job.tp * job.pp)
    checkpoint = open_checkpoint(source, ReadOptions())
    target = layout_named(layout).lay_out(
        checkpoint, WriteOptions(degrees, is_split=job.distributed, reference=reference)
    )
    Conversion(checkpoint, target, destination, LIMITS).run()


def load(pool: WorkerPool, job: Job, directory: Path, layout: str = "torch_dist") -> Any:
    """Load a converted checkpoint into a fresh job with megatron-core, train on."""
    iteration = directory / f"iter_{AFTER.start:07d}"
    worker = "legacy_worker" if layout == LEGACY else "checkpoint_worker"
    return pool.run(f"{worker}:load_train", [(job, str(iteration))] * job.world)


def check(before: Any, after: Any, tolerance: float) -> None:
    """Compare losses, learning rate and skipped steps of two runs."""
    losses = [mean_losses([run[0] for run in runs]) for runs in (before, after)]
    pairs = list(zip(*losses, strict=True))
    difference = max(abs(a - b) / abs(a) for a, b in pairs)
    print(f"largest relative difference of a loss: {difference:.1e}")
    assert len(pairs) == len(AFTER)
    assert difference <= tolerance
    assert after[0][1] == before[0][1]
    assert [step for step in before[0][2] if step in AFTER] == after[0][2]
