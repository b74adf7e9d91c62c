"""The brink: what a worker has taken there, and whether all of a round's workers wait."""

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch.distributed as dist

from scalai.runtime.brink import has_any_to_stop, memory_here

MEGABYTES = 200


@pytest.mark.parametrize("stopping", [(), (1,), (0, 1, 2)])
def test_all_workers_of_a_round_wait_once_one_has_to(
    stopping: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hosts differ in their room, and a build has collectives."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    with ThreadPoolExecutor(3) as ranks:
        asked = [
            ranks.submit(partial(has_any_to_stop, 3, has_this=rank in stopping))
            for rank in range(3)
        ]
        assert [each.result(60) for each in asked] == [bool(stopping)] * 3


def test_what_a_script_builds_in_host_memory_before_counts() -> None:
    before = memory_here()
    built = bytearray(os.urandom(1)) * (MEGABYTES << 20)
    grown = memory_here().host - before.host
    assert abs(grown - len(built)) < 50 << 20 and before.device == 0
