"""The brink: what a worker has taken there, and whether all of a round's workers wait."""

import os
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial

import pytest
import torch.distributed as dist

from scalai.runtime import brink
from scalai.runtime.brink import has_any_to_stop, memory_here

MEGABYTES = 200


@pytest.fixture(autouse=True)
def rendezvous(monkeypatch: pytest.MonkeyPatch) -> dist.TCPStore:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    return server


@pytest.mark.parametrize("stopping", [(), (1,), (0, 1, 2)])
def test_all_workers_of_a_round_wait_once_one_has_to(
    stopping: tuple[int, ...],
) -> None:
    """Hosts differ in their room, and a build has collectives."""
    with ThreadPoolExecutor(3) as ranks:
        asked = [
            ranks.submit(partial(has_any_to_stop, 3, has_this=rank in stopping))
            for rank in range(3)
        ]
        assert [each.result(60) for each in asked] == [bool(stopping)] * 3


def test_the_wait_for_a_rank_that_never_asks_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(brink, "WAIT", timedelta(milliseconds=300))
    with pytest.raises(RuntimeError, match=r"(?i)timeout"):
        has_any_to_stop(2, has_this=True)


def test_what_a_script_builds_in_host_memory_before_counts() -> None:
    before = memory_here()
    built = bytearray(os.urandom(1)) * (MEGABYTES << 20)
    grown = memory_here().host - before.host
    assert abs(grown - len(built)) < 50 << 20 and before.device == 0
