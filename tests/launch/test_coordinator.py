"""The coordinator with agents that are threads of the test: who may join, and with which state."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_states import report, two_ranks, write

from scalai.core.errors import PeerError
from scalai.launch.coordinator import Coordinator
from scalai.launch.job import JobSpec
from scalai.runtime.messages import Channel
from scalai.store.host import HostStore
from scalai.store.manifest import HostManifest, manifest_message

TOKEN = b"secret"
DEADLINE_S = 60.0


class Line:
    """A coordinator that runs beside the test."""

    def __init__(self, folder: Path, *flags: str, alone_s: float = 60.0) -> None:
        config = folder / "elastic.toml"
        config.write_text("[model]\nglobal_batch_size = 12\n[probe]\nkind = 'none'\n")
        self.flags = ["--elastic", str(config), "--job", "j", "--nproc-per-node", "2", *flags]
        self.spec = JobSpec.read([*self.flags, "script.py"])
        self.log: list[str] = []
        self.coordinator = Coordinator(self.spec, ("127.0.0.1", 0), TOKEN, self.log.append, alone_s)
        self.code: list[int] = []
        self.thread = threading.Thread(target=lambda: self.code.append(self.coordinator.run()))
        self.thread.start()
        self.agents: list[FakeAgent] = []

    def join(self, host: str, **brings: Any) -> "FakeAgent":
        agent = FakeAgent(self, host, **brings)
        self.agents.append(agent)
        return agent

    def end(self) -> None:
        for agent in self.agents:
            agent.is_gone = True
        for agent in self.agents:
            agent.leave()
        self.coordinator._alone_s = 0.0  # the test need not wait for it
        self.thread.join(DEADLINE_S)
        assert self.code


class FakeAgent:
    """An agent without workers: it fetches commands, and answers those that ``answer`` knows."""

    def __init__(
        self,
        line: Line,
        host: str,
        *,
        parts: tuple[HostManifest, ...] = (),
        sealed: tuple[HostManifest, ...] = (),
        spec: JobSpec | None = None,
    ) -> None:
        self.host = host
        self.commands: list[dict[str, Any]] = []
        self.is_gone = False
        self.round = 0
        address = line.coordinator.address
        self._calls, self._polls = Channel(address, TOKEN), Channel(address, TOKEN)
        self._calls.call(
            "join", host=host, slots=2, address=["127.0.0.1", 1],
            parts=[manifest_message(part) for part in parts],
            sealed=[manifest_message(part) for part in sealed],
            spec=(spec or line.spec).to_json(),
        )  # fmt: skip
        self._thread = threading.Thread(target=self._poll, daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """The agent dies."""
        self.is_gone = True
        self._thread.join(DEADLINE_S)
        self._polls.close()
        self._calls.close()

    def tell(self, event: str, **facts: Any) -> None:
        self._calls.call("tell", host=self.host, event=event, **facts)

    def heard(self, name: str) -> list[dict[str, Any]]:
        """Return the commands of a kind so far."""
        return [command for command in self.commands if command["command"] == name]

    def wait_for(self, name: str, count: int = 1) -> dict[str, Any]:
        """Return the ``count``-th command of a kind."""
        wait_until(lambda: len(self.heard(name)) >= count, f"{count} times {name} at {self.host}")
        return self.heard(name)[count - 1]

    def _poll(self) -> None:
        while not self.is_gone:
            try:
                found = self._polls.call("poll", host=self.host, round=self.round, newest=0)
            except PeerError:
                return
            for command in found:
                self.commands.append(command)
                self._answer(command)

    def _answer(self, command: dict[str, Any]) -> None:
        match command["command"]:
            case "start":
                self.round = command["round"]
                self.tell("stepped", round=self.round)
            case "prepare":
                self.tell("prepared", stop=command["stop"], newest=0)
            case "stop":
                self.tell("stopped", round=command["round"], newest=0)
            case "commit":
                self.tell("committed", generation=command["generation"])


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < end, f"never: {what}"
        time.sleep(0.01)


@pytest.fixture
def line(tmp_path: Path) -> Iterator[Line]:
    line = Line(tmp_path, "--nnodes", "1:3", "--settle-s", "1", "--max-restarts", "9")
    yield line
    line.end()


def part(folder: Path, host: str, number: int, step: int, deposit: str) -> HostManifest:
    """Return a host's part of a state, whole by itself; ``number`` -1: sealed."""
    with HostStore("j", host, folder / f"{host}-{number}-{step}-{deposit}") as store:
        held = two_ranks()
        slot = store.reserve(held)
        written = {rank: report(rank, write(slot.orders[rank], held[rank])) for rank in (0, 1)}
        about = {
            "consumed_samples": 1, "degrees": {"tp": 2}, "world_size": 2, "tensors": 5,
            "deposit": deposit,
        }  # fmt: skip
        manifest = store.seal(slot, step=step, about=about, parts=written)
        return manifest if number < 0 else store.commit(slot, number)


def half(whole: HostManifest, host: str, which: int) -> HostManifest:
    """Return every second piece of a part, as another host's."""
    chosen = list(range(which, len(whole.collection), 2))
    return replace(
        whole, host=host, collection=whole.collection.select(np.array(chosen)),
        file=whole.file[chosen] * 0, begin=whole.begin[chosen], files=whole.files[:1],
        fingerprint=whole.fingerprint[chosen],
    )  # fmt: skip


def test_a_second_agent_of_a_host_and_another_job_are_refused(line: Line, tmp_path: Path) -> None:
    line.join("a")
    with pytest.raises(PeerError, match=r"already in job 'j'.*--host-id"):
        line.join("a")
    other = JobSpec.read([*line.flags, "other.py"])
    with pytest.raises(PeerError, match=r"script is 'other.py', the job's is"):
        line.join("b", spec=other)


def test_hosts_that_join_within_the_settling_time_begin_together(line: Line) -> None:
    first = line.join("a")
    second = line.join("b")
    assert first.wait_for("start")["group"] == ["a", "b"] == second.wait_for("start")["group"]
    assert (first.commands, second.commands) != ([], [])
    assert [command["round"] for command in first.heard("start")] == [1]


def test_the_job_begins_from_the_newest_state_that_the_hosts_hold(
    line: Line, tmp_path: Path
) -> None:
    older, newer = part(tmp_path, "a", 3, 20, "r-1-20"), part(tmp_path, "a", 4, 30, "r-1-30")
    agent = line.join("a", parts=(older, half(newer, "a", 0)))
    assert agent.wait_for("start")["generation"] == 3
    # What it holds of the later state is of a history that the job has left.
    assert agent.wait_for("drop")["generation"] == 4


def test_a_part_that_is_whole_with_a_later_host_is_waited_for(line: Line, tmp_path: Path) -> None:
    whole = part(tmp_path, "a", 3, 20, "r-1-20")
    first = line.join("a", parts=(half(whole, "a", 0),))
    wait_until(lambda: any("waiting" in text for text in line.log), "it waits")
    second = line.join("b", parts=(half(whole, "b", 1),))
    assert first.wait_for("start")["generation"] == 3
    assert set(second.wait_for("start")["sources"]) == {"a", "b"}


def test_parts_that_were_sealed_when_everything_died_are_a_state_again(
    line: Line, tmp_path: Path
) -> None:
    old = part(tmp_path, "a", 3, 20, "r-1-20")
    sealed = part(tmp_path, "a", -1, 25, "r-1-25")
    first = line.join("a", parts=(old,), sealed=(half(sealed, "a", 0),))
    second = line.join("b", sealed=(half(sealed, "b", 1),))
    for agent in (first, second):
        commit = agent.wait_for("commit")
        assert (commit["generation"], commit["deposit"]) == (4, "r-1-25")
        assert agent.wait_for("start")["generation"] == 4


def test_a_sealed_part_whose_deposit_was_committed_elsewhere_joins_it(
    line: Line, tmp_path: Path
) -> None:
    whole = part(tmp_path, "a", 3, 20, "r-1-20")
    line.join("a", parts=(half(whole, "a", 0),))
    second = line.join("b", sealed=(half(replace(whole, generation=-1), "b", 1),))
    commit = second.wait_for("commit")
    assert (commit["generation"], commit["deposit"]) == (3, "r-1-20")
    assert second.wait_for("start")["generation"] == 3


def test_sealed_parts_that_make_nothing_whole_are_given_up(line: Line, tmp_path: Path) -> None:
    old = part(tmp_path, "a", 3, 20, "r-1-20")
    sealed = half(part(tmp_path, "a", -1, 25, "r-1-25"), "a", 0)
    agent = line.join("a", parts=(old,), sealed=(sealed,))
    assert agent.wait_for("start")["generation"] == 3
    kinds = [command["command"] for command in agent.commands]
    assert kinds.index("discard") < kinds.index("start") and "commit" not in kinds


def test_a_state_that_the_job_has_passed_is_dropped_and_a_further_one_refused(
    line: Line, tmp_path: Path
) -> None:
    line.join("a", parts=(part(tmp_path, "a", 3, 20, "r-1-20"),)).wait_for("start")
    late = line.join("b", parts=(part(tmp_path, "b", 2, 15, "other-1-15"),))
    assert late.wait_for("drop")["generation"] == 2
    with pytest.raises(PeerError, match=r"step 99 of another run.*start all hosts together"):
        line.join("c", parts=(part(tmp_path, "c", 7, 99, "other-1-99"),))


def test_a_host_of_another_run_with_the_same_numbers_is_refused(line: Line, tmp_path: Path) -> None:
    line.join("a", parts=(part(tmp_path, "a", 3, 20, "r-1-20"),))
    with pytest.raises(PeerError, match="generation 3 of step 50 of another run"):
        line.join("b", parts=(part(tmp_path, "b", 3, 50, "other-1-50"),))


def test_a_coordinator_that_nobody_needs_ends(tmp_path: Path) -> None:
    line = Line(tmp_path, "--nnodes", "1:3", alone_s=0.2)
    line.thread.join(DEADLINE_S)
    assert line.code == [1]
