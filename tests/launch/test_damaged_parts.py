"""A start fails before its proof: by damage of a host's part, or by the script."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scalai.store.manifest import HostManifest
from scalai.store.parts import without_rows
from support.committed_parts import part
from support.coordinator_line import DEADLINE_S, FakeAgent, Line

pytestmark = pytest.mark.fault

LINE = "'param/w' in /d/x differs"
FLAGS = ("--nnodes", "1:3", "--settle-s", "0.2", "--max-restarts", "9")


@pytest.fixture
def line(tmp_path: Path) -> Iterator[Line]:
    line = Line(tmp_path, *FLAGS)
    yield line
    line.end()


def restored(agent: FakeAgent, number: int, whole: HostManifest) -> dict[str, Any]:
    """Answer a start as workers would that have restored something else than this state."""
    start, rows = agent.wait_for("start", number), whole.collection
    agent.tell(
        "restored", round=start["round"], rows=rows, seconds={}, bytes_local=0, bytes_remote=0,
        fingerprints=np.zeros(len(rows), np.uint64),
    )  # fmt: skip
    return start


def test_damage_of_the_only_copy_ends_the_job_and_is_named(tmp_path: Path) -> None:
    line = Line(tmp_path, "--nnodes", "1", "--max-restarts", "0")
    whole = part(tmp_path, "a", 4, 30, "r-1-30")
    agent = line.join("a", parts=(whole,), is_slow=True)
    agent.damage[4] = (LINE,)
    fail_before_the_proof(agent, 1, whole, "a proof")
    end = agent.wait_for("exit")
    assert end["code"] == 3 and end["keeps_state"], "no restart was left, and none was needed"
    assert not agent.heard("doubt") and not agent.heard("drop")
    for found in (
        r"generation 4 of step 30",
        r"'a': 'param/w' in /d/x",
        r"nothing.*whole",
        "fresh",
    ):
        assert re.search(found, end["reason"]), end["reason"]
    line.end()


def fail_before_the_proof(agent: FakeAgent, number: int, whole: HostManifest, how: str) -> None:
    if how == "a proof":
        restored(agent, number, whole)
        return
    start = agent.wait_for("start", number)
    agent.tell("published", round=start["round"], tensors=("param/w",))
    agent.tell("workers_failed", round=start["round"], reason="rank 0: AssertionError: other steps")


@pytest.mark.parametrize("how", ["a proof", "the script"])
def test_what_is_damaged_on_one_host_is_gone_on_from_where_another_has_it(
    tmp_path: Path, how: str
) -> None:
    line = Line(tmp_path, "--nnodes", "2", "--max-restarts", "0")
    whole = [part(tmp_path, host, 4, 30, "r-1-30") for host in "ab"]
    agents = [line.join(each.host, parts=(each,), is_slow=True) for each in whole]
    agents[0].damage[4] = ("'param/w' in /d/x differs",)
    for agent, each in zip(agents, whole, strict=True):
        fail_before_the_proof(agent, 1, each, how)
    again = agents[0].wait_for("start", 2)
    assert again["generation"] == 4 and "event=damage generation=4 host=a" in "".join(line.log)
    recovery = [text for text in line.log if "event=recovery" in text]
    assert "hosts=b" in recovery[-1] and "hosts=a,b" in recovery[0]
    line.end()


def test_what_is_damaged_and_nobody_else_has_is_passed_over_for_an_older_generation(
    tmp_path: Path,
) -> None:
    line = Line(tmp_path, "--nnodes", "1", "--max-restarts", "0")
    older, whole = part(tmp_path, "a", 3, 20, "r-1-20"), part(tmp_path, "a", 4, 30, "r-1-30")
    agent = line.join("a", parts=(older, whole), is_slow=True)
    agent.damage[4] = (LINE,)
    fail_before_the_proof(agent, 1, whole, "the script")
    assert agent.wait_for("start", 2)["generation"] == 3
    recovery = [text for text in line.log if "event=recovery" in text]
    assert "step=20" in recovery[-1] and "'param/w' in /d/x differs" in recovery[-1]
    line.end()


def test_what_the_script_raises_before_the_proof_is_its_failure_where_all_is_whole(
    tmp_path: Path,
) -> None:
    line = Line(tmp_path, "--nnodes", "1", "--max-restarts", "1")
    whole = part(tmp_path, "a", 4, 30, "r-1-30")
    agent = line.join("a", parts=(whole,), is_slow=True)
    for number in (1, 2):
        fail_before_the_proof(agent, number, whole, "the script")
    end = agent.wait_for("exit")
    assert end["code"] == 1 and "restart budget" in end["reason"], end["reason"]
    assert len(agent.heard("examine")) == 2 and not agent.heard("doubt")
    line.end()


def test_who_gives_what_was_not_committed_is_asked(line: Line, tmp_path: Path) -> None:
    agent = line.join("a", parts=(part(tmp_path, "a", 4, 30, "r-1-30"),))
    agent.wait_for("start")
    agent.tell("suspected", generation=4, hosts=["a", "gone"], reason="it differs")
    assert agent.wait_for("examine")["generation"] == 4


def without_pieces(whole: HostManifest) -> HostManifest:
    """Return what is left of a part of which all pieces were found damaged."""
    return without_rows(whole, range(len(whole.collection)))


def test_damage_that_was_found_under_another_coordinator_ends_a_job_that_has_nothing_else(
    tmp_path: Path,
) -> None:
    line = Line(tmp_path, "--nnodes", "1", "--max-restarts", "0")
    whole = part(tmp_path, "a", 4, 30, "r-1-30")
    line.join("a", parts=(without_pieces(whole),), examined=((4, (LINE,)),))
    assert "event=damage generation=4 host=a" in "".join(line.log)
    line.thread.join(DEADLINE_S)
    assert line.code == [3], "it waits for nobody: there is nobody who may have it"
    end = next(text for text in line.log if "event=exit" in text)
    assert LINE in end and "nothing else is whole" in end
    line.end()
