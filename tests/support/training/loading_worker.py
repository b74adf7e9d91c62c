"""The ranks' side of a load: train, save, train on; build, load, train on."""

import hashlib
from typing import Any

import torch
import torch.distributed as dist

from scalai.core.errors import ScalaiError
from scalai.patches.deepspeed.deepspeed_state import DeepSpeedState
from scalai.patches.deepspeed.loading import install
from support.training.deepspeed_jobs import Job
from support.training.jobs import AFTER, BEFORE, OTHER_SEED, SEED
from support.training.tiny_deepspeed import Training

CLIENT: dict[str, Any] = {
    "note": {"text": "kept", "n": 7},
    "streams": torch.arange(5, dtype=torch.uint8),
}
COUNTERS = "global_steps", "global_samples", "skipped_steps"


def save(rank: int, store: dist.Store, job: Job, directory: str, state: Any) -> Any:
    """Train, save, train on without interruption."""
    training = Training(job, rank, store, SEED)
    training.train(BEFORE)
    training.engine.save_checkpoint(directory, client_state={**CLIENT, **state})
    return _to_the_end(training)


def load(rank: int, store: dist.Store, job: Job, directory: str, cuts: str | None = None) -> Any:
    """Load into a fresh job, train on; also return what was told of the checkpoint."""
    training = Training(job, rank, store, OTHER_SEED)
    install(training.engine, cuts)
    path, client = training.engine.load_checkpoint(directory)
    streams = client.pop("streams")
    assert streams.dtype == torch.uint8 and streams.tolist() == CLIENT["streams"].tolist()
    reported = path, client["note"], _counters(training.engine)
    return _to_the_end(training), reported


def load_weights(
    rank: int, store: dist.Store, job: Job, directory: str, arguments: dict[str, Any]
) -> Any:
    """Load into a fresh job without the optimizer's state; return the first loss, the counters, the
    schedule's and the sum of the first moments."""
    training = Training(job, rank, store, OTHER_SEED)
    engine = training.engine
    install(engine)
    engine.load_checkpoint(directory, **arguments)
    moments = [s for s in DeepSpeedState(engine).slots() if s.tensor.name.startswith("exp_avg/")]
    total = sum(float(slot.buffer.abs().sum()) for slot in moments)
    counters, scheduled = _counters(engine), engine.lr_scheduler.last_epoch
    losses = training.train(range(AFTER.start, AFTER.start + 1))
    training.close()
    return losses, counters, scheduled, total


def refuse(
    rank: int, store: dist.Store, job: Job, directory: str, arguments: dict[str, Any]
) -> tuple[str, bool]:
    """Try to load; return the refusal, and whether the engine is as it was. It trains on."""
    training = Training(job, rank, store, OTHER_SEED)
    engine = training.engine
    install(engine)
    if arguments.pop("custom_load_fn", False):
        arguments["custom_load_fn"] = print
    before = _digest(engine)
    refusal = ""
    try:
        engine.load_checkpoint(directory, **arguments)
    except ScalaiError as error:
        refusal = f"{type(error).__name__}: {error}"
    is_untouched = _digest(engine) == before
    training.train(range(1))
    training.close()
    return refusal, is_untouched


def _counters(engine: Any) -> list[int]:
    return [getattr(engine, name) for name in COUNTERS]


def _to_the_end(training: Training) -> Any:
    losses = training.train(AFTER)
    answer = losses, training.learning_rate(), training.skipped
    training.close()
    return answer


def _digest(engine: Any) -> str:
    """Return a digest of all memory and all scalars of this rank."""
    state = DeepSpeedState(engine)
    slots = state.slots()
    content = hashlib.sha256(repr(state.scalars()).encode())
    for slot in slots:
        content.update(slot.buffer.view(torch.uint8).numpy().tobytes())
    return content.hexdigest()
