"""A host's copy of a generation to the durable directory: what is damaged in memory is examined."""

import queue
from collections.abc import Callable
from pathlib import Path

import pytest

from scalai.core.messages import commands, reports
from scalai.core.messages.reports import Archived
from scalai.launch.agent.holdings import Holdings
from scalai.launch.agent.loop import THREADS
from scalai.launch.config.flags import parse_options
from scalai.launch.config.job_spec import JobSpec
from scalai.runtime.lanes import Lanes
from scalai.store.host import HostStore
from support.store_states import Opener, generation

WAIT_S = 60.0


class Loop:
    """The agent's loop: what is put is done when the test asks for it."""

    def __init__(self) -> None:
        self.told: list[reports.Report] = []
        self._due = queue.Queue[Callable[[], None]]()

    def put(self, work: Callable[[], None]) -> None:
        self._due.put(work)

    def until_told(self, count: int) -> None:
        while len(self.told) < count:
            self._due.get(timeout=WAIT_S)()


def damaged(open_store: Opener) -> HostStore:
    """Return the store of a host of which a byte of generation 3 has changed in memory."""
    store = open_store(host="a")
    generation(store, 3, step=30)
    path = store.generation_directory(3) / "rank-1.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 0xFF
    path.write_bytes(data)
    return store


@pytest.mark.fault
def test_what_is_damaged_in_memory_is_examined_when_it_is_archived(
    open_store: Opener, tmp_path: Path
) -> None:
    config = tmp_path / "elastic.toml"
    config.write_text("[model]\nnum_attention_heads = 8\n")
    flags = ["--elastic", str(config), "--durable-dir", str(tmp_path / "disk"), "--job", "job"]
    spec, loop = JobSpec.read(parse_options([*flags, "script.py"])), Loop()
    lanes = Lanes(THREADS, loop.put)
    lanes.start()
    holdings = Holdings(spec, damaged(open_store), loop.told.append, lanes, loop.put)
    try:
        holdings.archiver.obey(commands.Archive(7, 3, own_only=True))
        loop.until_told(2)
    finally:
        holdings.archiver.close()
    (archived,) = (one for one in loop.told if isinstance(one, Archived))
    (examined,) = (one for one in loop.told if isinstance(one, reports.Examined))
    assert (archived.order, archived.size_bytes) == (7, 0) and "rank-1" in archived.reason
    assert examined.generation == 3 and any("rank-1" in each for each in examined.damage)
