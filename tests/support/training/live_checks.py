"""Facts about the live state of a job of either framework, on its ranks.

``trainer``: the module of this package whose ``Training`` builds and trains the job.
"""

import importlib
import json
import random
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from scalai.core.messages.shared import JsonText
from scalai.runtime.emergency_writer import Between
from scalai.runtime.live import held_rows
from scalai.runtime.live_fingerprints import live_fingerprints
from scalai.runtime.rank_snapshots import AsyncSnapshots
from support.answering_agent import AnsweringAgent
from support.training.jobs import BEFORE, SEED

STEPS = 4


@contextmanager
def built(trainer: str, job: Any, rank: int, store: dist.Store, seed: int = SEED) -> Iterator[Any]:
    """Build a rank of a job, and take it down."""
    training = importlib.import_module(f"{__package__}.{trainer}").Training(job, rank, store, seed)
    try:
        yield training
    finally:
        training.close()


def losses(rank: int, store: dist.Store, trainer: str, job: Any, is_listed: bool) -> Any:
    """Train a fresh job, whose state was listed before the first step or not."""
    with built(trainer, job, rank, store) as training:
        if is_listed:
            training.state().slots()
        return training.train(BEFORE)


def held_twice(rank: int, store: dist.Store, trainer: str, job: Any) -> bool:
    """List the state twice: the same tensors, in the same memory, also after training."""
    with built(trainer, job, rank, store) as training:
        places, state = [], training.state()
        for steps in (BEFORE, ()):
            slots = state.slots()
            places.append([(slot.tensor, slot.buffer.data_ptr(), slot.pieces) for slot in slots])
            training.train(steps)
        return places[0] == places[1]


def rng_states(rank: int, store: dist.Store, trainer: str, job: Any) -> dict[str, Any]:
    """Continue the streams from their JSON; then begin new ones, at other degrees."""
    with built(trainer, job, rank, store) as training:
        state = training.state()
        saved = json.loads(json.dumps(state.rank_state()))
        old, notes = _draw(training), [state.load_rank_state(saved, step=3)]
        is_continued = _draw(training) == old
        notes.append(state.load_rank_state({**saved, "degrees": {"dp": 8, "zero": 3}}, step=3))
        new = _draw(training)
        return {"is_continued": is_continued, "old": old, "new": new, "notes": notes}


def _draw(training: Any) -> tuple[tuple[float, ...], float | None]:
    """Draw from Python's, numpy's and torch's streams, and from this tensor-parallel rank's own, if
    it has one."""
    own = training.draw_own() if hasattr(training, "draw_own") else None
    return (random.random(), float(np.random.rand()), torch.rand(1).item()), own


def differing(rank: int, store: dist.Store, trainer: str, job: Any) -> list[str]:
    """Train, with a snapshot of every step that is copied as late as it may be: behind all of the
    next forward and backward passes. Return the tensors of which something else was written than
    was there at the end of the step, with the step."""
    with built(trainer, job, rank, store) as training, tempfile.TemporaryDirectory() as folder:
        state = training.state()
        rows = held_rows(state.slots())
        found, turn = list[str](), threading.Lock()
        agent = AnsweringAgent(Path(folder), rows)
        directory = str(agent.directory)

        @contextmanager
        def let_copy() -> Iterator[None]:
            turn.release()  # the update waits for it
            yield

        snapshots = AsyncSnapshots(agent.channel, rank, 1, directory, rows, {}, turn, let_copy)
        snapshots.watch()
        training.train(range(1))
        assert not snapshots.obstacle(), "its updates are not noticed"
        for step in range(1, STEPS):
            there = [int(value) for value in live_fingerprints(rows)]
            between = Between(
                step, None, state.coordinate, lambda: (JsonText.of({}), JsonText.of({}))
            )
            turn.acquire()
            assert snapshots.begin(between, None, time.monotonic())
            training.train(range(step, step + 1))
            if turn.locked():  # no update has waited
                turn.release()
            snapshots.settle()
            written = list(agent.told()[-1].fingerprints)
            found += [
                f"{step}: {slot.tensor.name}"
                for (slot, _), before, after in zip(rows, there, written, strict=True)
                if before != after
            ]
            assert there != [int(value) for value in live_fingerprints(rows)], "it has trained on"
        agent.close()
        return found
