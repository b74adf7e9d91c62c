"""A failed collective of NCCL's is told of, though nobody raises it. What torch says of its groups
is stood in for: NCCL needs devices (tests/cuda/test_cuda_partners.py)."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from scalai.core.job.endings import PEER_GONE, kind_of
from scalai.runtime import emergency

pytestmark = pytest.mark.fault

DEADLINE_S = 20.0


class Backend:
    def __init__(self, error: str) -> None:
        self.error = error

    def get_error(self) -> Any:
        if not self.error:
            raise RuntimeError("it is being taken down")
        return SimpleNamespace(name=self.error)


class Group:
    """A process group with this backend for devices; None: it has none."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend

    def _get_backend(self, device: torch.device) -> Any:
        if self.backend is None:
            raise RuntimeError("No backend type associated with device type cuda")
        return self.backend


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> dict[Group, object]:
    """Give the groups that torch has: of gloo, of NCCL and one that is taken down."""
    made = dict.fromkeys(
        [Group(None), Group(object()), Group(Backend("")), Group(Backend("SUCCESS"))]
    )
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist.distributed_c10d, "_world", SimpleNamespace(pg_map=made))
    monkeypatch.setattr(emergency, "POLL_S", 0.01)
    return made


def test_without_groups_or_errors_nothing_has_failed(groups: dict[Group, object]) -> None:
    assert emergency.collective_failure() == ""


def test_without_a_job_nothing_has_failed() -> None:
    assert emergency.collective_failure() == ""


@pytest.mark.parametrize("error", ["COMM_ERROR", "TIMEOUT", "REMOTE_ERROR"])
def test_a_collective_that_fails_is_told_of_once(groups: dict[Group, object], error: str) -> None:
    told, has_told, is_over = list[str](), threading.Event(), threading.Event()

    def tell(reason: str) -> None:
        told.append(reason)
        has_told.set()

    emergency.watch_collectives(lambda: not is_over.is_set(), tell)
    assert not has_told.wait(0.1)
    groups[Group(Backend(error))] = None
    assert has_told.wait(DEADLINE_S)
    is_over.set()
    assert told == [f"a collective of NCCL's has failed ({error})"]
    assert kind_of(f"rank 1: {told[0]}") == PEER_GONE


def test_who_leaves_its_round_tells_of_nothing(groups: dict[Group, object]) -> None:
    groups[Group(Backend("COMM_ERROR"))] = None
    told = list[str]()
    emergency.watch_collectives(lambda: False, told.append)
    for thread in [each for each in threading.enumerate() if each.name == "collectives"]:
        thread.join(DEADLINE_S)
    assert told == []


def test_without_room_for_a_thread_the_training_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", full)
    emergency.watch_collectives(lambda: True, print)


def test_torch_tells_of_errors_by_this_name() -> None:
    """It is looked for by name."""
    if not dist.is_nccl_available():
        pytest.skip("this torch has no NCCL")
    assert hasattr(torch._C._distributed_c10d.ProcessGroupNCCL, "get_error")
    assert "SUCCESS" in torch._C._distributed_c10d.ErrorType.__members__
