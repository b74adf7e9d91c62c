"""The ranks' side of a resize: build, train, snapshot; build, restore, train."""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from scalai.core.messages.worker_messages import RankSnapshot, ReadOrder, WriteOrder
from scalai.core.tensors.collection import Collection
from scalai.core.tensors.region import Piece
from scalai.runtime.live import LiveState, Slot, collection_of, held_rows, wanted_rows
from scalai.runtime.live_files import read_rows
from scalai.runtime.live_fingerprints import live_fingerprints
from scalai.runtime.unstored import UnstoredBuild
from support.training.jobs import AFTER, BEFORE
from support.wire import travelled
from support.written_rows import write_rows

Row = tuple[Slot, Piece]
Proof = tuple[Collection, list[int]]


@dataclass(frozen=True, slots=True)
class _Live:
    """A job that is built in this worker, from one call of the pool to the next."""

    training: Any
    state: LiveState
    slots: Sequence[Slot]
    unstored: UnstoredBuild | None = None


_live: list[_Live] = []


def build(rank: int, store: dist.Store, trainer: str, job: Any, seed: int, what: str) -> Collection:
    """Build a job and leave it there; return what this rank holds or wants.

    ``trainer``: the module of this package whose ``Training`` builds and trains it. ``what``:
    ``held``, ``wanted``, or ``unstored``: what it wants, built without storage.
    """
    for forgotten in _live:
        forgotten.training.close()
    _live.clear()
    unstored = UnstoredBuild(least_bytes=1) if what == "unstored" else None
    kind = importlib.import_module(f"{__package__}.{trainer}").Training
    if unstored is not None:
        unstored.begin()
    try:
        training = kind(job, rank, store, seed)
        state = training.state()
        slots = state.slots()
        if unstored is not None:
            unstored.check([slot.buffer for slot, _ in wanted_rows(slots)])
            assert unstored.size > 0
    finally:
        if unstored is not None:
            unstored.end()
    _live.append(_Live(training, state, slots, unstored))
    return collection_of(held_rows(slots) if what == "held" else wanted_rows(slots))


def snapshot_between_steps(
    rank: int, store: dist.Store, order: WriteOrder
) -> tuple[RankSnapshot, Any]:
    """Train, snapshot, train on without interruption."""
    live = _live[0]
    live.training.train(BEFORE)
    fingerprints = write_rows(held_rows(live.slots), order)
    part = RankSnapshot(
        tuple(fingerprints), live.state.coordinate, live.state.scalars(), live.state.rank_state()
    )
    return travelled(part), _train_to_the_end(live)


def restore(
    rank: int,
    store: dist.Store,
    order: ReadOrder,
    scalars: Mapping[str, Any],
    rank_states: Mapping[str, Any],
) -> Any:
    """Fill a fresh job, prove it, train on."""
    live = _live[0]
    if live.unstored is not None:
        live.unstored.take_back([slot.buffer for slot, _ in wanted_rows(live.slots)])
    read_rows(wanted_rows(live.slots), order)
    live.state.load_scalars(scalars)
    randomness = live.state.load_rank_state(rank_states.get(live.state.coordinate), AFTER.start)
    proofs = {
        "wanted": _proof(wanted_rows(live.slots)),
        "held": _proof(held_rows(live.slots)),
    }
    return _train_to_the_end(live), proofs, randomness


def _proof(rows: Sequence[Row]) -> Proof:
    return collection_of(rows), [int(value) for value in live_fingerprints(rows)]


def _train_to_the_end(live: _Live) -> Any:
    losses = live.training.train(AFTER)
    norms = getattr(live.training, "norms", [])[-len(AFTER) :]
    told = getattr(live.training, "bare", None), _proof(held_rows(live.slots))[1]
    answer = losses, live.training.learning_rate(), live.training.skipped, norms, *told
    live.training.close()
    _live.clear()
    return answer
