"""The coordinator with agents that answer at the test's word: who joins with which state, and what
the job goes on from."""

import argparse
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scalai.core.errors import PeerError, ProofError, UnprovenError, UsageError
from scalai.core.job.function_proof import Numbers, ProofAsked, Waiting
from scalai.core.job.membership import Phase
from scalai.core.messages.reports import Stalled
from scalai.core.tensors.collection import Collection, Tensor
from scalai.core.tensors.fingerprint import CommitStatement
from scalai.core.tensors.region import Box
from scalai.launch import cli
from scalai.launch.commands import job_commands
from scalai.launch.commands import status as status_command
from scalai.launch.commands.status import STANDS_S, await_change, lines, troubles
from scalai.launch.config.endpoint import JobEnding
from scalai.launch.coordinator import held_states
from scalai.launch.coordinator.person_calls import Scale, Status
from scalai.runtime.calls import Channel
from scalai.store.manifest import HostManifest, manifest_bytes
from scalai.store.parts import without_rows
from support.committed_parts import half, part
from support.coordinator_line import TOKEN, FakeAgent, Line, running
from support.laws import but
from support.waiting import wait_until

from .conftest import OpenLine

ONE = ("--nnodes", "1", "--max-restarts", "0")
"""One host, and no failure of the script is forgiven."""


def of_two_hosts(folder: Path, number: int, step: int, **about: Any) -> list[HostManifest]:
    """The parts of hosts a and b of a state that names both."""
    whole = part(folder, "a", number, step, f"r-1-{step}", **about)
    stated = CommitStatement(("a", "b"), {}) if number >= 0 else None
    return [replace(half(whole, host, n), committed=stated) for n, host in enumerate("ab")]


def has_said(line: Line, *patterns: str) -> bool:
    return all(any(re.search(pattern, text) for text in line.log) for pattern in patterns)


# ---------------------------------------------------------------------- who may join


def test_a_second_agent_of_a_host_and_another_job_are_refused(line: Line) -> None:
    line.join("a", store=["machine", 1])
    with pytest.raises(UsageError, match=r"already in job 'j'.*--host-id"):
        line.join("a", store=["machine", 2])
    with pytest.raises(UsageError, match=r"script is 'other.py', the job's is"):
        line.join("b", spec=line.spec_of(script="other.py"))


def test_hosts_that_join_within_the_settling_time_begin_together(open_line: OpenLine) -> None:
    line = open_line("--nnodes", "1:3", "--settle-s", "1")
    agents = [line.join("a"), line.join("b")]
    for agent in agents:
        assert agent.wait_for("start")["group"] == ["a", "b"]
        assert [command["round"] for command in agent.heard("start")] == [1]


def test_a_coordinator_that_nobody_needs_ends(open_line: OpenLine) -> None:
    line = open_line("--nnodes", "1:3", alone_s=30.0)
    line.pass_time(29.0)
    assert line.code is None
    line.pass_time(2.0)
    assert line.code == 1


@pytest.mark.parametrize(
    ("machines", "leaving", "is_told"),
    [
        ({"a": "127.0.0.1", "b": "192.0.2.2"}, "a", True),
        ({"a": "127.0.0.1", "b": "192.0.2.2"}, "b", False),
        ({"a": "127.0.0.1", "b": "192.0.2.2", "c": "127.0.0.1"}, "a", False),
    ],
)
def test_who_leaves_the_coordinator_behind_hears_what_comes_of_that(
    line: Line, machines: dict[str, str], leaving: str, is_told: bool
) -> None:
    """It has the coordinator's machine for itself, and no other machine can have the next one."""
    agents = {name: line.join(name, address=(machine, 1)) for name, machine in machines.items()}
    agents[leaving].tell("leaving")
    reason = agents[leaving].wait_for("exit")["reason"]
    assert reason.startswith("drained: the job goes on without this host")
    assert ("keep it up until the job has ended" in reason) == is_told, reason


# ---------------------------------------------------------------------- what it goes on from


@pytest.mark.fault
def test_it_waits_for_the_host_of_a_newer_part_and_names_it_and_the_ways_out(
    line: Line, tmp_path: Path
) -> None:
    older, (of_a, of_b) = part(tmp_path, "a", 3, 20, "r-1-20"), of_two_hosts(tmp_path, 4, 30)
    first = line.join("a", parts=(older, of_a))
    line.pass_time(60.0)
    assert has_said(
        line,
        r"generation 4 of step 30 is not whole .*'a'.* hold parts.*\['b'\] are missing",
        r"Start the agents of \['b'\].*--durable-dir.*--fresh",
        r"generation 3 of step 20, 10 steps back: scalai resume --job j --generation 3",
    )
    assert not first.heard("start") and not first.heard("drop")
    line.join("b", parts=(of_b,))
    assert first.wait_for("start")["generation"] == 4


@pytest.mark.fault
def test_a_damaged_newest_generation_is_waited_for_and_its_number_not_used_again(
    line: Line, tmp_path: Path
) -> None:
    older = part(tmp_path, "a", 3, 20, "r-1-20")
    agent = line.join("a", parts=(older,), damaged=((5, "/x/generation-5 is damaged"),))
    line.pass_time(5.0)
    assert has_said(line, "generation 5 is not whole .*host 'a': /x/generation-5 is damaged")
    answer = line.resume(3)
    assert "going on from generation 3 of step 20; given up: generation 5" in answer
    start = agent.wait_for("start")
    assert start["generation"] == 3
    agent.seal(part(tmp_path, "a", -1, 25, f"{start['run']}-1-25"))
    assert agent.wait_for("commit")["generation"] == 6


@pytest.mark.fault
def test_a_person_goes_on_from_an_older_generation_and_what_is_newer_goes_at_the_start(
    line: Line, tmp_path: Path
) -> None:
    older, (of_a, of_b) = part(tmp_path, "a", 3, 20, "r-1-20"), of_two_hosts(tmp_path, 4, 30)
    agent = line.join("a", parts=(older, of_a))
    line.pass_time(5.0)
    assert "given up: generation 4, 10 steps" in line.resume(3, dry_run=True)
    with pytest.raises(UsageError, match=r"generation 4 is not whole.*Whole: 3 \(step 20\)"):
        line.resume(4)
    assert not agent.heard("start")
    line.resume(3)
    assert agent.wait_for("start")["generation"] == 3
    assert agent.wait_for("drop")["generation"] == 4
    assert line.join("b", parts=(of_b,)).wait_for("drop")["generation"] == 4
    with pytest.raises(UsageError, match="not waiting"):
        line.resume(3)
    agent.tell("grown", part=manifest_bytes(of_a))  # what it had fetched was on its way
    assert agent.wait_for("drop", 2)["generation"] == 4


@pytest.mark.fault
def test_a_job_does_not_begin_anew_without_what_was_sealed_and_names_who_is_missing(
    line: Line, tmp_path: Path
) -> None:
    of_a, of_b = of_two_hosts(tmp_path, -1, 30, hosts=["a", "b"])
    first = line.join("a", sealed=(of_a,))
    line.pass_time(60.0)
    assert has_said(
        line,
        r"sealed at step 30 is not whole .*\['a'\] hold parts.*\['b'\] are missing",
        r"Start the agents of \['b'\].*--fresh",
    )
    assert not first.heard("start") and not first.heard("discard")
    second = line.join("b", sealed=(of_b,))
    for agent in (first, second):
        assert agent.wait_for("commit")["snapshot"] == "r-1-30"
        assert agent.wait_for("start")["restorable_step"] == 30


@pytest.mark.fault
def test_a_job_does_not_begin_without_what_was_sealed_and_cannot_be_read(
    line: Line, tmp_path: Path
) -> None:
    agent = line.join("a", damaged=((-1, "/s/j/a/snapshot-4/manifest.json is damaged."),))
    line.pass_time(60.0)
    unread = r"sealed last cannot be read \(host 'a': /s/j/a/snapshot-4.*move that.*--fresh"
    assert has_said(line, unread) and not agent.heard("start")
    agent.die()
    line.join("b", parts=(part(tmp_path, "b", 3, 20, "r-1-20"),))
    line.pass_time(5.0)
    assert has_said(line, r"sealed last cannot be read .*generation 3 of step 20: scalai resume")
    assert line.join("a").wait_for("start")["generation"] == 3, "somebody has moved it away"


def test_the_newest_state_counts_and_sealed_parts_are_one_again(
    open_line: OpenLine, tmp_path: Path
) -> None:
    """All agents had died when two of them had sealed their parts, and nobody had committed."""
    line = open_line("--nnodes", "1:2", "--settle-s", "600")
    old = [part(tmp_path, "a", number, 10 * number, f"r-1-{number}0") for number in (2, 3)]
    of_a, of_b = of_two_hosts(tmp_path, -1, 35)
    agents = [line.join("a", parts=tuple(old), sealed=(of_a,)), line.join("b", sealed=(of_b,))]
    for agent in agents:
        commit = agent.wait_for("commit")
        assert (commit["generation"], commit["snapshot"]) == (4, "r-1-35")
        assert agent.wait_for("start")["generation"] == 4


def test_a_sealed_part_whose_snapshot_was_committed_elsewhere_joins_it(
    line: Line, tmp_path: Path
) -> None:
    whole = part(tmp_path, "a", 3, 20, "r-1-20")
    line.join("a", parts=(half(whole, "a", 0),))
    second = line.join("b", sealed=(half(replace(whole, generation=-1), "b", 1),))
    commit = second.wait_for("commit")
    assert (commit["generation"], commit["snapshot"]) == (3, "r-1-20")
    assert second.wait_for("start")["generation"] == 3


@pytest.mark.fault
def test_sealed_parts_that_make_nothing_whole_are_given_up(line: Line, tmp_path: Path) -> None:
    sealed = half(part(tmp_path, "a", -1, 25, "r-1-25"), "a", 0)
    agent = line.join("a", parts=(part(tmp_path, "a", 3, 20, "r-1-20"),), sealed=(sealed,))
    assert agent.wait_for("start")["generation"] == 3
    kinds = [command["command"] for command in agent.commands]
    assert kinds.index("discard") < kinds.index("start") and "commit" not in kinds


@pytest.mark.fault
def test_parts_that_were_committed_otherwise_are_refused_by_name(
    line: Line, tmp_path: Path
) -> None:
    one, other = (
        replace(each, committed=CommitStatement(("a", "b"), {"param/w": value}))
        for each, value in zip(of_two_hosts(tmp_path, 4, 30), (7, 9), strict=True)
    )
    line.join("a", parts=(one,))
    with pytest.raises(UsageError, match=r"hosts 'a' and 'b'.*generation 4.*param/w"):
        line.join("b", parts=(other,))


# ---------------------------------------------------------------------- disks


def without_memory(line: Line, folder: Path) -> tuple[FakeAgent, HostManifest]:
    """The agent that is left of a job whose state has gone with host a, and that state."""
    mine = part(folder, "a", 2, 60, "r-1-60")
    first = line.join("a", parts=(mine,))
    assert first.wait_for("start")["generation"] == 2
    second = line.join("b")
    first.die()
    line.until(lambda: has_said(line, "generation 2 of step 60 is not whole"), "it waits")
    return second, mine


def attach(agent: FakeAgent, *parts: HostManifest, damaged: Sequence[Any] = ()) -> None:
    """Tell what a look into the durable directory has found."""
    agent.tell("attached", parts=[manifest_bytes(each) for each in parts], damaged=[*damaged])


@pytest.mark.fault
def test_an_older_state_on_a_disk_is_not_taken_for_its_higher_number(
    line: Line, tmp_path: Path
) -> None:
    """A disk of one host may hold what another run has left there."""
    left, mine = without_memory(line, tmp_path)
    attach(left, part(tmp_path, "b", 7, 50, "other-1-50"))
    line.pass_time(5.0)
    back = r"generation 7 of step 50, 10 steps back: scalai resume --job j --generation 7"
    assert has_said(line, back)
    line.join("c")
    assert line.join("a", parts=(mine,)).wait_for("start")["generation"] == 2
    assert left.wait_for("drop")["generation"] == 7


@pytest.mark.fault
def test_disks_are_looked_at_though_too_few_hosts_are_left(
    open_line: OpenLine, tmp_path: Path
) -> None:
    line = open_line("--nnodes", "2:3", "--durable-dir", str(tmp_path / "disk"))
    first = line.join("a", parts=(part(tmp_path, "a", 2, 60, "r-1-60"),))
    left = line.join("b")
    first.wait_for("start")
    first.die()
    left.wait_for("look")
    attach(left, part(tmp_path, "b", 1, 50, "r-1-50"))
    line.join("c")
    line.pass_time(5.0)
    back = r"generation 1 of step 50, 10 steps back: scalai resume --job j --generation 1"
    assert has_said(line, back) and not left.heard("drop")


@pytest.mark.fault
def test_what_is_found_on_a_disk_goes_where_the_job_has_gone_on_meanwhile(
    line: Line, tmp_path: Path
) -> None:
    left, mine = without_memory(line, tmp_path)
    line.join("a", parts=(mine,)).wait_for("start")
    attach(left, replace(mine, host="b"), part(tmp_path, "b", 1, 50, "r-1-50"))
    assert [each["generation"] for each in left.heard("drop")] == [1], "no room for a third one"


@pytest.mark.fault
def test_the_number_of_a_state_that_turned_up_on_a_disk_is_not_used_again(
    line: Line, tmp_path: Path
) -> None:
    left, _ = without_memory(line, tmp_path)
    attach(left, part(tmp_path, "b", 7, 50, "o-1-50"), damaged=[(8, "its manifest is torn")])
    assert "given up: generation 2, 8, 10 steps" in line.resume(7)
    start = left.wait_for("start")
    assert start["generation"] == 7
    left.seal(part(tmp_path, "b", -1, 55, f"{start['run']}-{start['round']}-55"))
    assert left.wait_for("commit")["generation"] == 9


def test_where_all_hosts_were_lost_a_person_may_go_back_to_what_the_job_had_dropped(
    line: Line, tmp_path: Path
) -> None:
    """Their memory is lost, and a disk has only an older generation."""
    older, newest = part(tmp_path, "a", 3, 20, "r-1-20"), part(tmp_path, "a", 4, 30, "r-1-30")
    first = line.join("a", parts=(older, newest))
    assert first.wait_for("start")["generation"] == 4
    assert first.wait_for("drop")["generation"] == 3
    first.die()
    again = line.join("a", parts=(older,))
    line.pass_time(5.0)
    assert has_said(line, "scalai resume") and not again.heard("drop") + again.heard("start")
    line.resume(3)
    assert again.wait_for("start")["generation"] == 3


# ---------------------------------------------------------------------- beginning anew


@pytest.fixture
def fresh_line(open_line: OpenLine) -> Line:
    return open_line("--nnodes", "1:3", "--settle-s", "0.2", "--fresh")


@pytest.mark.fault
def test_a_fresh_job_keeps_the_old_state_until_it_has_its_own(
    fresh_line: Line, tmp_path: Path
) -> None:
    agent = fresh_line.join("a", parts=(part(tmp_path, "a", 7, 20, "r-1-20"),))
    assert agent.answer["sets_aside"]
    start = agent.wait_for("start")
    assert has_said(fresh_line, "host=a gives up generation 7 of step 20")
    assert start["generation"] is None and not agent.heard("drop")
    agent.seal(part(tmp_path, "a", -1, 0, f"{start['run']}-1-0"), "start")
    assert agent.wait_for("commit")["generation"] == 8
    assert agent.wait_for("drop")["generation"] == 7


@pytest.mark.fault
def test_only_who_says_so_begins_anew(
    fresh_line: Line, open_line: OpenLine, tmp_path: Path
) -> None:
    old = part(tmp_path, "a", 7, 20, "r-1-20")
    fresh_line.flags.remove("--fresh")
    plain = fresh_line.spec_of()
    with pytest.raises(UsageError, match=r"begins anew.*holds generation 7 of step 20.*--fresh to"):
        fresh_line.join("a", parts=(old,), spec=plain)
    assert not fresh_line.join("b", spec=plain).heard("drop")
    line = open_line()
    with pytest.raises(UsageError, match=r"started without it.*waiting, round 0"):
        line.join("a", spec=line.spec_of("--fresh"))
    assert line.join("a", parts=(old,)).wait_for("start")["generation"] == 7
    with pytest.raises(UsageError, match=r"--fresh begins job 'j' anew, but"):
        line.join("b", spec=line.spec_of("--fresh"))


@pytest.mark.fault
def test_what_a_late_host_sets_aside_is_never_the_jobs_own_under_that_number(
    fresh_line: Line, tmp_path: Path
) -> None:
    agent = fresh_line.join("a")
    run = agent.wait_for("start")["run"]
    agent.seal(part(tmp_path, "a", -1, 0, f"{run}-1-0"), "start")
    assert agent.wait_for("commit")["generation"] == 1
    late = fresh_line.join("b", parts=(part(tmp_path, "b", 1, 20, "r-1-20"),))
    assert late.wait_for("drop")["generation"] == 1 and not late.answer["sets_aside"]
    agent.seal(part(tmp_path, "a", -1, 5, f"{run}-1-5"))
    assert agent.wait_for("commit", 2)["generation"] == 2
    assert len(late.heard("drop")) == 1


# ---------------------------------------------------------------------- a start that fails


def fail_before_the_proof(agent: FakeAgent, number: int, whole: HostManifest, how: str) -> None:
    """Answer a start as workers that have restored something else, or whose script raises."""
    start = agent.wait_for("start", number)
    if how == "a proof":
        agent.tell(
            "restored", round=start["round"], rows=whole.collection, seconds={}, bytes_local=0,
            bytes_remote=0, fingerprints=np.zeros(len(whole.collection), np.uint64),
        )  # fmt: skip
        return
    agent.tell("published", round=start["round"], tensors=("param/w",))
    agent.tell("workers_failed", round=start["round"], reason="rank 0: AssertionError: other steps")


DAMAGE = "'param/w' in /d/x differs"


@pytest.mark.fault
def test_a_failed_proof_fetches_anew_once_and_a_second_one_ends_the_job(
    open_line: OpenLine, tmp_path: Path
) -> None:
    whole = part(tmp_path, "a", 4, 30, "r-1-30")
    agent = open_line(*ONE).join("a", parts=(whole,), is_slow=True)
    fail_before_the_proof(agent, 1, whole, "a proof")
    assert agent.wait_for("doubt")["generation"] == 4
    fail_before_the_proof(agent, 2, whole, "a proof")
    end = agent.wait_for("exit")
    assert end["code"] == 3 and end["keeps_state"], "no restart was left, and none was needed"
    for found in (r"generation 4 of step 30", r"'a' \(/d\)", r"--fresh"):
        assert re.search(found, end["reason"]), end["reason"]


@pytest.mark.fault
def test_the_only_copy_is_kept_though_it_was_fetched_and_never_proven(
    open_line: OpenLine, tmp_path: Path
) -> None:
    """The hosts that it came from have gone."""
    whole = part(tmp_path, "a", 4, 30, "r-1-30")
    unproven = replace(whole, unproven=tuple(range(len(whole.files))))
    agent = open_line(*ONE).join("a", parts=(unproven,), is_slow=True)
    for number in (1, 2):
        fail_before_the_proof(agent, number, whole, "a proof")
    end = agent.wait_for("exit")
    assert end["code"] == 3 and end["keeps_state"] and not agent.heard("doubt")


@pytest.mark.fault
def test_what_was_fetched_and_is_not_what_was_promised_is_doubted(
    line: Line, tmp_path: Path
) -> None:
    agent = line.join("a", parts=(part(tmp_path, "a", 4, 30, "r-1-30"),), is_slow=True)
    start = agent.wait_for("start")
    agent.tell("unproven", round=start["round"], reason="1 fetched pieces are not what")
    assert agent.wait_for("doubt")["generation"] == 4
    assert agent.wait_for("start", 2)["generation"] == 4
    agent.tell("stepped")
    agent.tell("suspected", generation=4, hosts=["a", "gone"], reason="it differs")
    assert agent.wait_for("examine", 2)["generation"] == 4, "who gives what was not committed"


@pytest.mark.fault
def test_damage_of_the_only_copy_ends_the_job_and_is_named(
    open_line: OpenLine, tmp_path: Path
) -> None:
    whole = part(tmp_path, "a", 4, 30, "r-1-30")
    agent = open_line(*ONE).join("a", parts=(whole,), is_slow=True)
    agent.damage[4] = (DAMAGE,)
    fail_before_the_proof(agent, 1, whole, "a proof")
    end = agent.wait_for("exit")
    assert end["code"] == 3 and end["keeps_state"], "no restart was left, and none was needed"
    assert not agent.heard("doubt") and not agent.heard("drop")
    for found in ("generation 4 of step 30", "'a': 'param/w' in /d/x", "nothing.*whole", "fresh"):
        assert re.search(found, end["reason"]), end["reason"]


@pytest.mark.fault
@pytest.mark.parametrize("how", ["a proof", "the script"])
def test_what_is_damaged_on_one_host_is_gone_on_from_where_another_has_it(
    open_line: OpenLine, tmp_path: Path, how: str
) -> None:
    line = open_line("--nnodes", "2", "--max-restarts", "0")
    whole = [part(tmp_path, host, 4, 30, "r-1-30") for host in "ab"]
    agents = [line.join(each.host, parts=(each,), is_slow=True) for each in whole]
    agents[0].damage[4] = (DAMAGE,)
    for agent, each in zip(agents, whole, strict=True):
        fail_before_the_proof(agent, 1, each, how)
    assert agents[0].wait_for("start", 2)["generation"] == 4
    assert line.logged("event=damage generation=4 host=a")
    first, *_, last = line.logged("event=recovery")
    assert "hosts=a,b" in first and "hosts=b" in last


@pytest.mark.fault
def test_what_is_damaged_and_nobody_else_has_is_passed_over_for_an_older_generation(
    open_line: OpenLine, tmp_path: Path
) -> None:
    line = open_line(*ONE)
    older, whole = part(tmp_path, "a", 3, 20, "r-1-20"), part(tmp_path, "a", 4, 30, "r-1-30")
    agent = line.join("a", parts=(older, whole), is_slow=True)
    agent.damage[4] = (DAMAGE,)
    fail_before_the_proof(agent, 1, whole, "the script")
    assert agent.wait_for("start", 2)["generation"] == 3
    last = line.logged("event=recovery")[-1]
    assert "step=20" in last and DAMAGE in last


@pytest.mark.fault
def test_what_the_script_raises_before_the_proof_is_its_failure_where_all_is_whole(
    open_line: OpenLine, tmp_path: Path
) -> None:
    whole = part(tmp_path, "a", 4, 30, "r-1-30")
    line = open_line("--nnodes", "1", "--max-restarts", "1")
    agent = line.join("a", parts=(whole,), is_slow=True)
    for number in (1, 2):
        fail_before_the_proof(agent, number, whole, "the script")
    end = agent.wait_for("exit")
    assert end["code"] == 1 and "restart budget" in end["reason"], end["reason"]
    assert len(agent.heard("examine")) == 2 and not agent.heard("doubt")


@pytest.mark.fault
def test_damage_that_was_found_under_another_coordinator_ends_a_job_that_has_nothing_else(
    open_line: OpenLine, tmp_path: Path
) -> None:
    """It waits for nobody: there is nobody who may have it."""
    line, whole = open_line(*ONE), part(tmp_path, "a", 4, 30, "r-1-30")
    left = without_rows(whole, range(len(whole.collection)))
    agent = line.join("a", parts=(left,), examined=((4, (DAMAGE,)),))
    end = agent.wait_for("exit")
    assert end["code"] == 3 and DAMAGE in end["reason"] and "nothing else is whole" in end["reason"]
    assert line.logged("event=damage generation=4 host=a")


# ---------------------------------------------------------------------- parts sealed at a death


class TwoHosts:
    """A running job on hosts a and b that began from a generation whole on either; what they seal
    is whole only together. b dies with a part that it has sealed."""

    def __init__(self, line: Line, folder: Path) -> None:
        self.line, self._folder, self.step = line, folder, 7
        self._old = {host: part(folder, host, 1, 0, "r-0-0") for host in "ab"}
        self.a, self.b = self.join("a"), self.join("b")
        self.a.unanswered = {"stop"}
        self.run = self.a.wait_for("start")["run"]
        line.until(lambda: line.logged("event=started"), "every rank has stepped")

    def join(self, host: str, *sealed: HostManifest) -> FakeAgent:
        old = self._old[host]
        return self.line.join(host, store=["machine", 1, host], parts=(old,), sealed=sealed)

    def begin_to_stop(self) -> None:
        """Ask for a change; both hosts stand at the agreed stop and may snapshot."""
        self.line.scale(3)
        self.step = self.a.wait_for("agree")["stop"]
        for agent in (self.a, self.b):
            agent.tell("arrived", round=1, stop=self.step)
        self.b.wait_for("take_snapshot")

    def sealed(self, host: str) -> HostManifest:
        """What a host seals at the present stop."""
        whole = part(self._folder, host, -1, self.step, f"{self.run}-1-{self.step}")
        return half(whole, host, "ab".index(host))

    def a_seals(self) -> None:
        self.a.seal(self.sealed("a"), "stop" if self.a.heard("take_snapshot") else "snapshot")

    def a_stops(self) -> None:
        self.a.wait_for("stop")
        self.a.tell("stopped", newest=self.step)

    def comes_back(self) -> None:
        self.b = self.join("b", self.sealed("b"))

    def is_lost(self) -> None:
        self.b.die()
        self.line.until(lambda: self.line.phase is Phase.STOPPING, "workers are stopped")

    def check(self) -> None:
        """Both hosts commit what they had sealed, and go on from there."""
        start = self.b.wait_for("start")
        assert not self.line.logged("event=went_back"), self.line.log
        for agent in (self.a, self.b):
            assert agent.wait_for("commit")["snapshot"] == f"{self.run}-1-{self.step}"
        assert (start["generation"], start["restorable_step"]) == (2, self.step)
        assert set(start["sources"]) == {"a", "b"}


@pytest.fixture
def pair(line: Line, tmp_path: Path) -> TwoHosts:
    return TwoHosts(line, tmp_path)


@pytest.mark.fault
@pytest.mark.parametrize(
    "order",
    [
        "begin_to_stop a_seals comes_back a_stops",
        "begin_to_stop comes_back a_seals a_stops",
        "begin_to_stop a_seals is_lost comes_back a_stops",
        "begin_to_stop a_seals is_lost a_stops comes_back",
        "a_seals comes_back a_stops",
        "comes_back a_seals a_stops",
        "a_seals is_lost comes_back a_stops",
    ],
)
def test_a_successor_brings_the_part_that_its_host_had_sealed(
    open_line: OpenLine, tmp_path: Path, order: str
) -> None:
    """In whatever order its death, the end of the round and its successor become known."""
    nodes = "2" if order.endswith("comes_back") else "1:2"
    pair = TwoHosts(open_line("--nnodes", nodes, "--max-restarts", "9"), tmp_path)
    for what in order.split():
        getattr(pair, what)()
    pair.check()


@pytest.mark.fault
def test_a_state_whose_replicas_differ_at_a_stop_is_not_gone_on_from(
    pair: TwoHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job goes back to the newest committed one, and says which tensor."""

    def differ(parts: object) -> None:
        raise ProofError("replicas of tensor 'param/w' differ.")

    pair.begin_to_stop()
    monkeypatch.setattr(held_states, "written_fingerprints", differ)
    pair.a_seals()
    pair.b.seal(pair.sealed("b"), "stop")
    pair.a_stops()
    assert pair.a.wait_for("start", 2)["generation"] == 1
    assert pair.line.logged("event=snapshot_refused", "'param/w'")
    assert pair.line.logged("what was written is refused: replicas of tensor 'param/w'")
    assert not pair.line.logged("do not cover the state")
    assert not pair.line.logged("event=crashed")


@pytest.mark.fault
def test_a_whole_state_of_another_run_is_refused_and_nothing_changes(
    pair: TwoHosts, tmp_path: Path
) -> None:
    """Whoever holds it keeps it, and the job goes on from its own state."""
    held, sealed = (part(tmp_path, "b", number, 500, "otherrun-3-500") for number in (7, -1))
    with pytest.raises(UsageError, match="step 500 of another run"):
        pair.line.join("b", store=["machine", 1, "b"], parts=(held,))
    with pytest.raises(
        UsageError, match=r"'c' has sealed .* step 500 in another run.*scalai clean"
    ):
        pair.line.join("c", sealed=(replace(sealed, host="c"),))
    assert not pair.a.heard("stop") and pair.line.live.members.hosts() == ("a", "b")


@pytest.mark.fault
@pytest.mark.parametrize("is_of_this_run", [True, False])
def test_what_was_left_behind_never_becomes_the_state(
    pair: TwoHosts, tmp_path: Path, is_of_this_run: bool
) -> None:
    """A host that was cut off in an earlier round of this run brings its part, or two bring halves
    of another run's."""
    name = f"{pair.run}-0-500" if is_of_this_run else "otherrun-3-500"
    whole = part(tmp_path, "c", -1, 500, name)
    halves = [half(whole, host, n) for n, host in enumerate("cd")]
    left = [whole] if is_of_this_run else halves
    joined = [pair.line.join(each.host, sealed=(each,)) for each in left]
    assert pair.line.logged("host c gives up what it had sealed at step 500")
    pair.line.pass_time(60.0)
    assert not any(agent.heard("commit") for agent in joined)


@pytest.mark.fault
@pytest.mark.parametrize("has_joined", [False, True], ids=["", "a host joins"])
def test_what_a_round_has_sealed_that_computes_otherwise_is_no_state(
    pair: TwoHosts, has_joined: bool
) -> None:
    """Its workers train already when those of the round before tell what they have computed; while
    they stop a host may join."""
    live, old = pair.line.live, 99
    assert live.state.current is not None
    ran = replace(live.state.current, micro_batch_size=7)
    asked = ProofAsked(old, frozenset("ab"), until=pair.line.now + 60.0)
    function = replace(live.state.function, proof=Waiting(asked), after=Numbers(5.0, 2.0))
    live.state = but(live.state, ran=ran, function=function)
    pair.a_seals()
    pair.b.seal(pair.sealed("b"))
    pair.b.unanswered = {"stop"}
    for agent in (pair.a, pair.b):
        agent.tell("stepped", round=old, numbers=Numbers(5.0, 2.1))
    pair.b.wait_for("stop")
    if has_joined:
        pair.line.join("c")
    pair.a_stops()
    pair.b.tell("stopped", newest=7)
    assert pair.a.wait_for("start", 2)["generation"] == 1
    assert pair.line.logged("event=function_differs level=WARNING")
    assert pair.line.logged("event=went_back steps_lost=7")
    assert not pair.line.logged("event=snapshot committed")
    assert not pair.line.logged("event=recovered")


# ---------------------------------------------------------------------- where workers meet


@pytest.mark.fault
def test_nobody_waits_for_where_the_next_workers_will_meet(line: Line) -> None:
    """What opens it imports torch first (behind a change of the coordinator, say), or is stopped;
    agents and persons are answered meanwhile."""
    agent = line.join("a")
    agent.wait_for("start")
    late = line.stores.late = []
    assert line.scale(1)["workers"] == {"a": 1}
    assert len(late) == 1 and line.status()["phase"] == "building"
    agent.tell("moved", round=1, bytes=1)
    assert not agent.heard("build")
    late[0](17)
    assert agent.wait_for("build")["master_port"] == 17


@pytest.mark.fault
def test_what_was_given_up_before_its_workers_could_meet_is_not_begun(line: Line) -> None:
    """A host is lost, say, before the store is open: the round is another one then."""
    late = line.stores.late = []
    agent, lost = line.join("a"), line.join("b")
    line.until(lambda: late, "a store is asked for")
    lost.die()
    line.until(lambda: len(late) == 2, "one is asked for that round 2 needs")
    late[0](17)
    assert line.stores.closed == [17] and not agent.heard("start")
    late[1](18)
    begun = agent.wait_for("start")
    assert (begun["round"], begun["master_port"], begun["group"]) == (2, 18, ["a"])


@pytest.mark.fault
def test_a_job_that_has_ended_builds_nothing(line: Line) -> None:
    """The script comes to its end while the next workers wait for where they will meet."""
    agent = line.join("a")
    agent.wait_for("start")
    late = line.stores.late = []
    other = line.join("b")
    line.until(lambda: late, "a store is asked for")
    agent.tell("finished")
    agent.wait_for("exit")
    late[0](17)
    line.settle()
    assert not agent.heard("build") and not other.heard("build")


@pytest.mark.fault
@pytest.mark.parametrize("is_standby", [False, True])
def test_workers_that_can_meet_nowhere_end_a_start_and_no_job_that_runs(
    line: Line, is_standby: bool
) -> None:
    nowhere, late = PeerError("the workers' rendezvous store cannot be opened"), list[Any]()
    line.stores.late = None if is_standby else late
    agent = line.join("a")
    if is_standby:
        agent.wait_for("start")
        line.stores.late = late
        line.join("b")
    line.until(lambda: late, "a store is asked for")
    late[0](nowhere)
    if not is_standby:
        assert "cannot be opened" in agent.wait_for("exit")["reason"]
        return
    agent.wait_for("prepare")
    assert line.logged("not built beside", "cannot be opened") and not agent.heard("build")


# ---------------------------------------------------------------------- persons' requests


def test_the_answer_to_a_request_says_whether_most_hosts_keep_it(line: Line) -> None:
    """So that it outlives the coordinator; a host that comes later keeps it too."""
    first, second = line.join("a"), line.join("b")
    first.wait_for("start")
    line.until(lambda: line.phase is Phase.RUNNING, "it runs")
    second.is_paused = True
    late = "hosts have yet to hear of it: ask again if the coordinator is lost"
    assert late in line.scale(1)["reason"] and not line.live.memory.wait_kept(0.0)
    second.is_paused = False
    line.settle()
    assert line.live.memory.wait_kept(0.0)
    for agent in (first, second, line.join("c")):
        assert agent.heard("remember")[-1]["known"].value.request.value()[0] == 1


@pytest.mark.fault
def test_the_status_shows_workers_that_make_no_steps(
    line: Line, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only of the present round: between two rounds an agent polls with no round."""
    agent = line.join("a")
    agent.wait_for("start")
    agent.stalled = Stalled((1, 3), 41, 75.2)
    line.settle()
    monkeypatch.setattr(job_commands, "read_card", lambda folder: (line.address, TOKEN))
    with running(line), pytest.raises(SystemExit):
        cli.main(["status"])
    assert "a: ranks 1, 3 at step 41 for 75 s" in capsys.readouterr().out
    agent.round = 0
    line.settle()
    assert line.status()["no_progress"] == {}


def test_the_status_tells_of_the_risk_and_why_hosts_are_idle(line: Line) -> None:
    first, second = line.join("a"), line.join("b")
    first.wait_for("start")
    line.until(lambda: line.phase is Phase.RUNNING, "it runs")
    line.settle()
    status = line.status()
    assert status["is_training"] and status["phase_s"] >= 0 and not troubles(status)
    assert status["host_loss"]["steps"] is None and "no replicas" in status["host_loss"]["why"]
    idle = {h for h in status["hosts"] if not status["workers"].get(h)}
    assert set(status["idle_hosts"]) == idle
    text = "\n".join(lines(status))
    assert all(f"{host} is idle: " in text for host in idle) and status["degrees"] in text
    agents = (first, second)
    for agent in agents:
        agent.is_paused = True
    line.now += STANDS_S + 1.0
    status = {**line.status(), "is_training": False, "phase": "starting"}
    assert troubles(status)[0].startswith("starting for 10 min")


@pytest.mark.fault
def test_the_status_tells_of_the_last_refusal_who_asked_what_when_and_why(line: Line) -> None:
    def told() -> tuple[str, str, str]:
        found = line.status()["last_refusal"]
        assert asked_at <= found["at"] <= time.time()
        (text,) = [text for text in lines(line.status()) if text.startswith("last refusal")]
        assert f"{found['who']} asked {found['asked']}: {found['why']}" in text
        return found["who"], found["asked"], found["why"]

    asked_at = time.time()
    line.join("a").wait_for("start")
    assert line.status()["last_refusal"] is None
    with pytest.raises(UsageError):
        line.ask(Scale(4, None, "tp7", dry_run=True))
    assert line.status()["last_refusal"] is None, "it was only tried"
    with pytest.raises(UsageError) as error:
        line.ask(Scale(4, None, "tp7", dry_run=False))
    assert told() == ("a person", "for --nproc 4 --degrees tp7", str(error.value))
    with pytest.raises(UsageError, match="not waiting"):
        line.resume(3)
    assert told()[:2] == ("a person", "to resume generation 3")
    with pytest.raises(UnprovenError):
        Channel(line.coordinator.address, b"another job's")
    wait_until(lambda: told()[1] == "to connect", "it is noted")
    assert "does not have this job's token" in told()[2]
    with pytest.raises(UsageError) as error:
        line.join("b", spec=line.spec_of(script="another.py"))
    assert told() == ("host b", "to join", str(error.value))
    with pytest.raises(UsageError):
        line.ask(Status(job="another"))
    assert told()[0] == "host b", "nothing was asked of this job"
    assert len(line.logged("event=refused")) == 3


ABSENT, CUT = PeerError("nobody listens there"), PeerError("it went away")


@pytest.mark.fault
@pytest.mark.parametrize(
    ("answers", "ending", "code", "said"),
    [
        (
            ["", ABSENT, CUT, ""],
            JobEnding(0, "finished", 0.0),
            0,
            "exit code 0 (finished): finished",
        ),
        (
            [""],
            JobEnding(75, "saved at step 9", 0.0),
            75,
            "the same command goes on): saved at step",
        ),
        (
            [""],
            JobEnding(1, "no restart is left", 0.0),
            1,
            "exit code 1 (failed): no restart is left",
        ),
        (["", ""], None, None, "nobody has answered for"),
        ([ABSENT], JobEnding(0, "finished", 0.0), None, ""),
    ],
)
def test_a_watch_outlives_a_silence_and_ends_with_the_job(
    answers: list[str | PeerError], ending: JobEnding | None, code: int | None, said: str,
    line: Line, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Without an answer or an end, it stops after a while; at once where there was no job."""
    line.join("a").wait_for("start")
    status, left, silences = line.status(), iter(answers), 0

    def ask() -> dict[str, Any]:
        nonlocal silences
        answer = next(left, ABSENT)
        silences += isinstance(answer, PeerError)
        if isinstance(answer, PeerError):
            if silences > 4:
                monkeypatch.setattr(status_command, "SILENT_S", -1.0)
            raise answer
        return {**status, "job": f"j{answer}"}

    def ended() -> JobEnding | None:
        return ending if silences > 2 else None

    arguments = argparse.Namespace(watch=0.001)
    if code is None:
        with pytest.raises(PeerError):
            status_command.show(arguments, ask, ended)
    else:
        assert status_command.show(arguments, ask, ended) == code
    found = capsys.readouterr().out
    assert said in found and found.count("job            j") == answers.count("")


def test_a_watch_ends_with_a_job_whose_coordinator_still_answers(
    line: Line, capsys: pytest.CaptureFixture[str]
) -> None:
    line.join("a").wait_for("start")
    with line.coordinator.lock:
        line.live.end(3, "the state is refused")
    arguments = argparse.Namespace(watch=60.0)
    assert status_command.show(arguments, line.status, lambda: pytest.fail("it is known")) == 3
    assert "exit code 3 (failed): the state is refused" in capsys.readouterr().out


def test_a_dry_run_prints_the_order_of_the_change(
    line: Line, capsys: pytest.CaptureFixture[str]
) -> None:
    line.join("a").wait_for("start")
    line.until(lambda: line.phase is Phase.RUNNING, "it runs")
    answer = line.ask(Scale(1, None, None, dry_run=True))
    ahead, still, moved, first = answer["schedule"]
    assert "beside the training" in ahead and still.startswith("standing still:")
    assert "restored beside the next" in moved and "the proof beside them" in first
    arguments = argparse.Namespace(json=False, dry_run=True)
    job_commands._print_answer(answer, arguments)
    assert f"\n  {still}\n  {moved}\n" in capsys.readouterr().out
    assert "schedule" not in line.scale(1)


@pytest.mark.parametrize("is_possible", [False, True])
def test_a_request_is_waited_for_until_the_job_trains_so(
    is_possible: bool, line: Line, capsys: pytest.CaptureFixture[str]
) -> None:
    """Or until it is known that it cannot."""
    agent = line.join("a")
    agent.wait_for("start")
    line.until(lambda: line.phase is Phase.RUNNING, "it runs")
    before, target = line.status(), line.scale(1)
    answers = iter([before, {**before, "phase": "draining"}])

    def ask() -> dict[str, Any]:
        found = next(answers, None)
        if found is not None:
            return found
        if is_possible:
            last = {"reason": "asked", "seconds": {}, "total_s": 2.0, "at": 0.0}
            return {**before, **{k: target[k] for k in ("degrees", "workers")}, "last_resize": last}
        return {**before, "failed_changes": ["TP1·PP1·DP1: it does not fit"]}

    assert await_change(ask, target, 60.0) == (0 if is_possible else 1)
    said = capsys.readouterr()
    expected = "2.00 s in all" if is_possible else "TP1·PP1·DP1: it does not fit"
    assert expected in (said.out if is_possible else said.err)


# ---------------------------------------------------------------------- memory for replicas

MASTER = Tensor("main/w", (4, 4), "F32")
"""Each of two hosts has two rows of it, 32 bytes."""
ENOUGH = 2 * (32 + 32)


def publish(agents: Sequence[FakeAgent], round: int = 1, room: int | None = ENOUGH) -> None:
    """Tell what workers hold, and which room there is (None: nothing is said of it)."""
    for agent in agents:
        agent.wait_for("start", round)
        held = Collection.of([(MASTER, Box((2 * "ab".index(agent.host), 0), (2, 4)))])
        if room is not None:
            agent.tell("holding", round=round, rows=held, room_bytes=room)
        agent.tell("published", round=round, tensors=(MASTER.name,))


@pytest.mark.fault
@pytest.mark.parametrize(
    ("flags", "room", "said", "is_warned"),
    [
        (("--replicas", "1"), ENOUGH, f"needed_bytes={ENOUGH} replica_bytes=64", False),
        ((), ENOUGH - 1, "lacks_bytes=1", True),
        (("--replicas", "0"), 63, "needed_bytes=64 replica_bytes=0 room_bytes=63 lacks_b", False),
    ],
    ids=["enough", "too little for those of the default", "too little without replicas"],
)
def test_what_generations_take_is_said_for_each_host_before_the_first_step(
    open_line: OpenLine, flags: tuple[str, ...], room: int, said: str, is_warned: bool
) -> None:
    line = open_line("--nnodes", "2", *flags)
    agents = [line.join(host, is_slow=True) for host in "ab"]
    publish(agents, room=room)
    for agent in agents:
        agent.wait_for("expect")
        assert line.logged(f"event=store_memory host={agent.host}", said)
    assert len(line.logged("event=no_replica_room")) == is_warned and line.live.exit_code == 0


@pytest.mark.fault
def test_too_little_room_for_replicas_that_were_asked_for_ends_the_job(
    open_line: OpenLine,
) -> None:
    line = open_line("--nnodes", "2", "--replicas", "1", "--max-restarts", "3")
    agents = [line.join(host, is_slow=True) for host in "ab"]
    publish(agents, room=ENOUGH - 1)
    for agent in agents:
        told = agent.wait_for("exit")
        assert told["code"] == 3 and f"needs {ENOUGH} bytes" in told["reason"], told
        assert not agent.heard("expect"), "no worker is let go on"


@pytest.mark.fault
def test_a_job_that_runs_is_not_ended_for_want_of_room(open_line: OpenLine) -> None:
    line = open_line("--nnodes", "2", "--replicas", "1", "--max-restarts", "3")
    agents = [line.join(host, is_slow=True) for host in "ab"]
    publish(agents)
    for agent in agents:
        agent.tell("stepped")
    assert line.logged("event=started")
    agents[0].tell("workers_failed", round=1, reason="killed", is_chance=True)
    for agent in agents:
        agent.wait_for("freeze")
        agent.tell("frozen", round=1, steps=())
    publish(agents, 2, room=ENOUGH - 1)
    assert not line.logged("event=no_replica_room"), "the start is not kept waiting"
    for agent in agents:
        agent.wait_for("expect", 2)
        agent.tell("stepped")
    assert line.logged("event=no_replica_room") and not agents[0].heard("exit")


def test_an_agent_that_says_nothing_of_its_room_keeps_nobody_waiting(open_line: OpenLine) -> None:
    line = open_line("--nnodes", "2", "--replicas", "1")
    first, silent = (line.join(host, is_slow=True) for host in "ab")
    publish([first])
    publish([silent], room=None)
    silent.wait_for("expect")
    assert not line.logged("event=store_memory")


def test_a_report_folder_that_cannot_be_made_ends_nothing(
    open_line: OpenLine, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no folder")
    line = open_line("--nnodes", "1:3", "--report-dir", str(tmp_path / "file" / "below"))
    line.join("a").wait_for("start")
    assert line.logged("event=report_failed")
