"""The ranks' side of a load: train, save, train on; build, load, train on."""

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from deepspeed_jobs import Job
from jobs import AFTER, BEFORE, OTHER_SEED, SEED
from tiny_deepspeed import Training

from scalai.core.errors import ScalaiError
from scalai.patches.deepspeed.loading import install
from scalai.patches.deepspeed.state import DeepSpeedState

CLIENT = {"note": {"text": "kept", "n": 7}, "streams": torch.arange(5, dtype=torch.uint8)}


def save(rank: int, store: dist.Store, job: Job, directory: str) -> Any:
    """Train, save, train on without interruption."""
    training = Training(job, rank, store, SEED)
    training.train(BEFORE)
    training.engine.save_checkpoint(directory, client_state=CLIENT)
    return _to_the_end(training)


def load(rank: int, store: dist.Store, job: Job, directory: str, arguments: dict[str, Any]) -> Any:
    """Load into a fresh job, train on."""
    training = Training(job, rank, store, OTHER_SEED)
    engine = training.engine
    install(engine)
    path, client = engine.load_checkpoint(directory, **arguments)
    streams = client["streams"]
    assert path.endswith("model_states.pt") and client["note"] == CLIENT["note"]
    assert streams.dtype == torch.uint8 and torch.equal(streams, CLIENT["streams"])
    assert engine.global_steps == AFTER.start
    assert engine.global_samples == AFTER.start * engine.train_batch_size()
    return _to_the_end(training)


def refuse(rank: int, store: dist.Store, job: Job, directory: str) -> tuple[str, bool]:
    """Try to load; return the kind of the refusal, and whether the engine is as it was."""
    training = Training(job, rank, store, OTHER_SEED)
    install(training.engine)
    before = _digest(training.engine)
    refusal = ""
    try:
        training.engine.load_checkpoint(directory)
    except ScalaiError as error:
        refusal = f"{type(error).__name__}: {error}"
    is_untouched = _digest(training.engine) == before
    training.train(range(1))
    training.close()
    return refusal, is_untouched


def _to_the_end(training: Training) -> Any:
    losses = training.train(AFTER)
    answer = losses, training.learning_rate(), training.skipped
    training.close()
    return answer


def _digest(engine: Any) -> str:
    """Return a digest of all memory and all scalars of this rank."""
    state = DeepSpeedState(engine)
    content = hashlib.sha256(repr(state.scalars()).encode())
    for slot in state.slots():
        content.update(slot.buffer.view(torch.uint8).numpy().tobytes())
    return content.hexdigest()
