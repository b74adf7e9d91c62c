"""A rank of a framework whose snapshots are copied as late as they may be: behind all of the next
forward and backward passes."""

import importlib
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from scalai.core.messages.shared import JsonText
from scalai.runtime.async_snapshots import AsyncSnapshots
from scalai.runtime.emergency import Between
from scalai.runtime.live import held_rows
from scalai.runtime.live_fingerprints import live_fingerprints
from support.answering_agent import AnsweringAgent
from support.training.jobs import SEED

STEPS = 4
WAIT_S = 120.0


def differing(rank: int, store: dist.Store, trainer: str, job: Any) -> list[str]:
    """Train, with a snapshot of every step. Return the tensors of which something else was written
    than was there at the end of the step, with the step."""
    training = importlib.import_module(f"{__package__}.{trainer}").Training(job, rank, store, SEED)
    state = training.state()
    rows = held_rows(state.slots())
    found, turn = list[str](), threading.Lock()
    with tempfile.TemporaryDirectory() as folder:
        agent = AnsweringAgent(Path(folder), rows)
        directory = str(agent.directory)
        snapshots = AsyncSnapshots(agent.channel, rank, 1, directory, rows, {}, turn)
        snapshots.watch()
        training.train(range(1))
        assert not snapshots.obstacle(), "its updates are not noticed"
        for step in range(1, STEPS):
            there = [int(value) for value in live_fingerprints(rows)]
            between = Between(step, None, state.coordinate, JsonText.of({}), JsonText.of({}))
            turn.acquire()
            assert snapshots.begin(between, None, time.monotonic())
            releases = threading.Thread(target=_release_late, args=(snapshots, turn))
            releases.start()
            training.train(range(step, step + 1))
            releases.join(WAIT_S)
            snapshots.settle()
            written = list(agent.told()[-1].fingerprints)
            found += [
                f"{step}: {slot.tensor.name}"
                for (slot, _), before, after in zip(rows, there, written, strict=True)
                if before != after
            ]
            assert there != [int(value) for value in live_fingerprints(rows)], "it has trained on"
        agent.close()
    training.close()
    return found


def _release_late(snapshots: AsyncSnapshots, turn: threading.Lock) -> None:
    """Let the copy begin once the update waits for it."""
    end, under_way = time.monotonic() + WAIT_S, snapshots._present
    while under_way is not None and under_way.waits_since is None and time.monotonic() < end:
        time.sleep(0.001)
    turn.release()
