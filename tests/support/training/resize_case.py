"""Train in one layout, take the state out, put it into a fresh job of another layout, train on."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

from scalai.core.job.function_proof import FP32, Numbers, merged
from scalai.core.job.function_proof import compare as prove
from scalai.core.tensors.collection import Collection, concatenate
from scalai.core.tensors.coverage import check_coverage
from scalai.core.tensors.fingerprint import compare, tensor_fingerprints
from scalai.core.tensors.holders import Holder
from scalai.core.tensors.plan import plan
from scalai.store.host import HostStore
from scalai.store.moves import holders_of, read_orders
from support.training.jobs import AFTER, OTHER_SEED, SEED, mean_losses
from support.training.worker_pool import WorkerPool

FP32_LOSS = FP32[0]
Proof = tuple[Collection, list[int]]
AnyJob = Any
"""What the pool's trainer takes: it has a ``world``."""


@dataclass(frozen=True, slots=True)
class Run:
    """What one job reports of the steps after the resize."""

    losses: list[float]
    learning_rate: float
    skipped: list[int]
    """Steps that fp16 skipped because a gradient was not finite."""
    norms: list[float | None]
    """Of the gradients, in float64."""
    bare: Numbers | None
    """Of the first step, without random numbers; None: it was made with them alone."""
    ends: list[list[int]]
    """Fingerprints of what each rank holds at the end."""

    @property
    def first(self) -> Numbers:
        """What the first step behind the resize computes."""
        norm = self.norms[0] if self.norms else None
        return Numbers(self.losses[0], norm, is_skipped=norm is None)


@dataclass(frozen=True, slots=True)
class Result:
    """The run that was not interrupted, and the one in the other layout."""

    uninterrupted: Run
    resized: Run
    randomness: str

    @property
    def largest_difference(self) -> float:
        """Largest difference of a step's loss, relative to the uninterrupted run."""
        pairs = zip(self.uninterrupted.losses, self.resized.losses, strict=True)
        return max(abs(a - b) / abs(a) for a, b in pairs)


def resize(
    pool: WorkerPool, before: AnyJob, after: AnyJob, directory: Path, what: str = "wanted"
) -> Result:
    """Run one case through a Tensor Store in ``directory``; ``what``: as ``resize_worker.build``.

    Raises:
        ProofError: A tensor has another fingerprint after the restore than at the snapshot.
    """
    with HostStore("case", "here", directory) as store:
        uninterrupted = train_and_snapshot(pool, before, store)
        return _restore_and_train(pool, after, store, uninterrupted, what)


def train_and_snapshot(pool: WorkerPool, job: AnyJob, store: HostStore) -> Run:
    """Snapshot generation 1 between the steps of a job that goes on."""
    held = pool.run("resize_worker:build", [(pool.trainer, job, SEED, "held")] * job.world)
    snapshot = store.reserve(dict(enumerate(held)))
    orders = [(snapshot.orders[rank],) for rank in range(job.world)]
    answers = pool.run("resize_worker:snapshot_between_steps", orders)
    parts = {rank: part for rank, (part, _) in enumerate(answers)}
    tensors = {tensor.name for collection in held for tensor in collection.tensors}
    about = {
        "consumed_samples": None, "degrees": {}, "world_size": job.world, "tensors": len(tensors),
    }  # fmt: skip
    store.seal(snapshot, step=AFTER.start, about=about, parts=parts)
    store.commit(snapshot, 1)
    return _united([run for _, run in answers])


def check(result: Result, tolerance: float) -> None:
    """Compare losses, learning rate and skipped steps of both runs."""
    print(f"largest relative difference of a loss: {result.largest_difference:.1e}")
    assert len(result.uninterrupted.losses) == len(result.resized.losses) > 0
    assert result.largest_difference <= tolerance
    if tolerance <= FP32_LOSS:
        proof = prove(result.uninterrupted.first, result.resized.first)
        print(proof.text)
        assert proof.is_same
    assert result.resized.learning_rate == result.uninterrupted.learning_rate
    assert result.resized.skipped == result.uninterrupted.skipped


def _restore_and_train(
    pool: WorkerPool, job: AnyJob, store: HostStore, uninterrupted: Run, what: str
) -> Result:
    manifest = store.manifest(1)
    check_coverage(manifest.collection)
    before = tensor_fingerprints(manifest.collection, manifest.fingerprint)
    build = pool.trainer, job, OTHER_SEED, what
    wanted = pool.run("resize_worker:build", [build] * job.world)
    targets = [Holder("here", collection) for collection in wanted]
    moves = plan(holders_of([manifest]), targets)
    orders = read_orders(moves, [manifest], {"here": store.generation_directory(1)})
    answers = pool.run(
        "resize_worker:restore",
        [(orders[rank], manifest.scalars, manifest.rank_state) for rank in range(job.world)],
    )
    _prove(before, [proofs for _, proofs, _ in answers])
    return Result(uninterrupted, _united([run for run, _, _ in answers]), answers[0][2])


def _prove(before: Mapping[str, int], proofs: Iterable[Mapping[str, Proof]]) -> None:
    """Compare what the ranks wanted, and what they vouch for from now on."""
    by_rank = list(proofs)
    for part in ("wanted", "held"):
        rows = concatenate([proof[part][0] for proof in by_rank])
        check_coverage(rows)
        values = [value for proof in by_rank for value in proof[part][1]]
        compare(before, tensor_fingerprints(rows, values))


def _united(runs: Sequence[Any]) -> Run:
    _, learning_rate, skipped, norms, *_ = runs[0]
    after = [step for step in skipped if step in AFTER]
    losses, ends = mean_losses([losses for losses, *_ in runs]), [run[-1] for run in runs]
    bare = reduce(merged, [run[-2] for run in runs])
    return Run(losses, learning_rate, after, norms, bare, ends)
