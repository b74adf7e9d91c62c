"""A restore is proven beside the first passes: nothing is updated before, and passes change nothing
of what is compared."""

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch

from scalai.core.errors import PeerError
from scalai.core.messages.worker_messages import RankRestored, WorkerRequest
from scalai.core.tensors.collection import Tensor
from scalai.core.tensors.region import Piece, row_major, whole
from scalai.launch.agent.worker_group import WorkerCalls
from scalai.runtime.live import Slot
from scalai.runtime.live_files import Filled
from scalai.runtime.live_fingerprints import live_fingerprints
from scalai.runtime.restore_proof import RestoreProof
from support.steps import DEADLINE_S, Beside


class Restored:
    """A rank with restored weights, a buffer that forward passes change, and an optimizer; its
    agent answers when told."""

    def __init__(self, directory: Path) -> None:
        self.weights = torch.nn.Parameter(torch.arange(24.0))
        self.mean = torch.arange(5.0)
        self.rows = [self._row("param/w", self.weights), self._row("buffer/mean", self.mean)]
        self.committed = live_fingerprints(self.rows)
        self.calls = SimpleQueue[tuple[Future[Any], WorkerRequest]]()
        self.agent = WorkerCalls(
            directory, lambda what: what(), lambda *call: self.calls.put(call), lambda *_: None
        )
        self.proof = RestoreProof(0, 1, self.rows, Filled({}, "a note", 0.0, 0.0, 0.5))
        self.optimizer = torch.optim.SGD([self.weights], lr=1.0)
        self.weights.grad = torch.ones(24)

    def _row(self, name: str, value: torch.Tensor) -> tuple[Slot, Piece]:
        shape = tuple(value.shape)
        piece = Piece(whole(shape), 0, row_major(shape))
        tensor = Tensor(name, shape, "F32")
        is_buffer = name.startswith("buffer")
        return Slot(tensor, value.detach(), (piece,), is_volatile=is_buffer), piece

    def reported(self) -> tuple[Future[Any], RankRestored]:
        answer, report = self.calls.get(timeout=DEADLINE_S)
        assert isinstance(report, RankRestored) and (report.rank, report.round) == (0, 1)
        return answer, report


@pytest.fixture
def restored(tmp_path: Path) -> Iterator[Restored]:
    tmp_path.chmod(0o700)
    rank = Restored(tmp_path)
    rank.mean += 1  # by a forward pass
    rank.proof.begin(str(tmp_path))
    yield rank
    rank.agent.close()


def test_the_first_update_waits_for_the_whole_jobs_proof(restored: Restored) -> None:
    answer, report = restored.reported()
    assert np.array_equal(report.fingerprints, restored.committed), "also of what passes change"
    assert report.note == "a note" and report.seconds["move"] == 0.5
    assert report.seconds.keys() == {"move", "restore", "page_fault", "proof"}
    update = Beside(restored.optimizer.step)
    update.join(0.2)
    assert update.is_alive() and restored.weights[0] == 0
    answer.set_result(None)
    update.join(DEADLINE_S)
    assert not update.errors and restored.weights[0] == -1
    restored.optimizer.step()
    assert restored.weights[0] == -2, "later ones wait for nothing"


def test_a_round_whose_proof_fails_ends_before_its_first_update(restored: Restored) -> None:
    answer, _ = restored.reported()
    answer.set_exception(PeerError("this round of workers has ended."))
    with pytest.raises(PeerError, match="has ended"):
        restored.optimizer.step()
    assert restored.weights[0] == 0


def test_a_byte_that_differs_is_seen(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    for change in (_one_bit_of_weights, _one_bit_of_buffer):
        rank = Restored(tmp_path)
        change(rank)
        rank.proof = RestoreProof(0, 1, rank.rows, Filled({}, "", 0.0, 0.0, 0.0))
        rank.proof.begin(str(tmp_path))
        answer, report = rank.reported()
        assert (report.fingerprints != rank.committed).sum() == 1
        answer.set_result(None)
        rank.proof.await_verdict()
        rank.agent.close()


def _one_bit_of_weights(rank: Restored) -> None:
    rank.weights.detach().view(torch.int32)[7] ^= 1


def _one_bit_of_buffer(rank: Restored) -> None:
    rank.mean.view(torch.int32)[3] ^= 1
