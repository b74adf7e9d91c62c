"""A job that has a state never begins without it by itself: what it waits for, and the ways out."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scalai.core.errors import PeerError
from scalai.core.tensors.fingerprint import Committed
from scalai.launch.config.flags import parse_options
from scalai.launch.config.job_spec import JobSpec
from scalai.launch.coordinator.person_calls import Resume, Scale, Status
from scalai.runtime.calls import Channel
from scalai.store.manifest import HostManifest, manifest_bytes
from support.committed_parts import half, part
from support.coordinator_line import TOKEN, FakeAgent, Line, wait_until

pytestmark = pytest.mark.fault

FLAGS = ("--nnodes", "1:3", "--settle-s", "0.2", "--max-restarts", "9")


@pytest.fixture
def line(tmp_path: Path) -> Iterator[Line]:
    line = Line(tmp_path, *FLAGS)
    yield line
    line.end()


@pytest.fixture
def fresh_line(tmp_path: Path) -> Iterator[Line]:
    line = Line(tmp_path, *FLAGS, "--fresh")
    yield line
    line.end()


def of_two_hosts(folder: Path, number: int, step: int) -> list[HostManifest]:
    """Return the parts of hosts a and b of a generation that says whose it is."""
    whole = part(folder, "a", number, step, f"r-1-{step}")
    stated = Committed(("a", "b"), {})
    return [replace(half(whole, host, n), committed=stated) for n, host in enumerate("ab")]


CALLS = {"resume": Resume, "scale": Scale, "status": Status}


def call(line: Line, word: str, **arguments: Any) -> Any:
    channel = Channel(line.coordinator.address, TOKEN)
    try:
        return channel.call(CALLS[word](**arguments)).value()
    finally:
        channel.close()


def logged(line: Line, pattern: str) -> None:
    """Wait until the coordinator has said something."""
    wait_until(lambda: any(re.search(pattern, text) for text in line.log), f"it says {pattern}")


def test_it_waits_for_the_host_of_a_newer_part_and_names_it_and_the_ways_out(
    line: Line, tmp_path: Path
) -> None:
    older, (of_a, of_b) = part(tmp_path, "a", 3, 20, "r-1-20"), of_two_hosts(tmp_path, 4, 30)
    first = line.join("a", parts=(older, of_a))
    logged(line, r"generation 4 of step 30 is not whole .*'a'.* hold parts.*\['b'\] are missing")
    logged(line, r"Start the agents of \['b'\].*--durable-dir")
    logged(line, r"generation 3 of step 20, 10 steps back: scalai resume --job j --generation 3")
    logged(line, r"--fresh")
    assert not first.heard("start") and not first.heard("drop")
    line.join("b", parts=(of_b,))
    assert first.wait_for("start")["generation"] == 4


def test_a_damaged_newest_generation_is_waited_for_and_its_number_not_used_again(
    line: Line, tmp_path: Path
) -> None:
    older = part(tmp_path, "a", 3, 20, "r-1-20")
    agent = line.join("a", parts=(older,), damaged=((5, "/x/generation-5 is damaged"),))
    logged(line, "generation 5 is not whole .*host 'a': /x/generation-5 is damaged")
    answer = call(line, "resume", generation=3, dry_run=False)
    assert "going on from generation 3 of step 20; given up: generation 5" in answer["reason"]
    assert agent.wait_for("start")["generation"] == 3
    sealed = part(tmp_path, "a", -1, 25, f"{agent.wait_for('start')['run']}-1-25")
    agent.tell("sealed", round=1, reason="snapshot", part=manifest_bytes(sealed), seconds={})
    assert agent.wait_for("commit")["generation"] == 6


def test_a_person_goes_on_from_an_older_generation_and_what_is_newer_goes_at_the_start(
    line: Line, tmp_path: Path
) -> None:
    older, (of_a, of_b) = part(tmp_path, "a", 3, 20, "r-1-20"), of_two_hosts(tmp_path, 4, 30)
    agent = line.join("a", parts=(older, of_a))
    logged(line, "scalai resume")
    tried = call(line, "resume", generation=3, dry_run=True)
    assert "given up: generation 4, 10 steps" in tried["reason"] and not agent.heard("start")
    with pytest.raises(PeerError, match=r"generation 4 is not whole.*Whole: 3 \(step 20\)"):
        call(line, "resume", generation=4, dry_run=False)
    call(line, "resume", generation=3, dry_run=False)
    assert agent.wait_for("start")["generation"] == 3
    assert agent.wait_for("drop")["generation"] == 4
    assert line.join("b", parts=(of_b,)).wait_for("drop")["generation"] == 4
    with pytest.raises(PeerError, match="not waiting"):
        call(line, "resume", generation=3, dry_run=False)


def sealed_by(folder: Path, host: str, which: int) -> HostManifest:
    """Return one of two hosts' parts of a first snapshot, which nobody has committed."""
    whole = part(folder, host, -1, 30, "r-1-30")
    mine = half(whole, host, which)
    return replace(mine, about={**mine.about, "hosts": ["a", "b"]})


def test_a_job_does_not_begin_anew_without_what_was_sealed_and_names_who_is_missing(
    line: Line, tmp_path: Path
) -> None:
    first = line.join("a", sealed=(sealed_by(tmp_path, "a", 0),))
    logged(line, r"sealed at step 30 is not whole .*\['a'\] hold parts.*\['b'\] are missing")
    logged(line, r"Start the agents of \['b'\].*--fresh")
    assert not first.heard("start") and not first.heard("discard")
    line.join("b", sealed=(sealed_by(tmp_path, "b", 1),))
    assert first.wait_for("commit")["snapshot"] == "r-1-30"
    assert first.wait_for("start")["restorable_step"] == 30


UNREAD = (-1, "/s/j/a/snapshot-4/manifest.json is damaged.")


def test_a_job_does_not_begin_without_what_was_sealed_and_cannot_be_read(
    line: Line, tmp_path: Path
) -> None:
    agent = line.join("a", damaged=(UNREAD,))
    logged(line, r"sealed last cannot be read \(host 'a': /s/j/a/snapshot-4.*move that.*--fresh")
    assert not agent.heard("start")
    agent.leave()
    wait_until(lambda: "a" not in line.coordinator._live.members, "it is gone")
    line.join("b", parts=(part(tmp_path, "b", 3, 20, "r-1-20"),))
    logged(line, r"sealed last cannot be read .*generation 3 of step 20: scalai resume")
    assert line.join("a").wait_for("start")["generation"] == 3, "somebody has moved it away"


def test_parts_that_were_committed_otherwise_are_refused_by_name(
    line: Line, tmp_path: Path
) -> None:
    of_a, of_b = of_two_hosts(tmp_path, 4, 30)
    one, other = (
        replace(part, committed=Committed(("a", "b"), {"param/w": value}))
        for part, value in ((of_a, 7), (of_b, 9))
    )
    line.join("a", parts=(one,))
    with pytest.raises(PeerError, match=r"hosts 'a' and 'b'.*generation 4.*param/w"):
        line.join("b", parts=(other,))


def without_memory(line: Line, folder: Path) -> tuple[FakeAgent, HostManifest]:
    """Return the agent that is left of a job whose state has gone with host a, and that state."""
    mine = part(folder, "a", 2, 60, "r-1-60")
    first = line.join("a", parts=(mine,))
    assert first.wait_for("start")["generation"] == 2
    second = line.join("b")
    first.leave()
    logged(line, "generation 2 of step 60 is not whole")
    return second, mine


def test_an_older_state_on_a_disk_is_not_taken_for_its_higher_number(
    line: Line, tmp_path: Path
) -> None:
    """A disk of one host may hold what another run has left there."""
    left, mine = without_memory(line, tmp_path)
    other = part(tmp_path, "b", 7, 50, "other-1-50")
    left.tell("attached", parts=[manifest_bytes(other)], damaged=[])
    logged(line, r"generation 7 of step 50, 10 steps back: scalai resume --job j --generation 7")
    line.join("c")
    again = line.join("a", parts=(mine,))
    assert again.wait_for("start")["generation"] == 2
    assert left.wait_for("drop")["generation"] == 7


def test_disks_are_looked_at_though_too_few_hosts_are_left(tmp_path: Path) -> None:
    line = Line(tmp_path, "--nnodes", "2:3", "--durable-dir", str(tmp_path / "disk"))
    first = line.join("a", parts=(part(tmp_path, "a", 2, 60, "r-1-60"),))
    left = line.join("b")
    first.wait_for("start")
    first.leave()
    left.wait_for("look")
    older = part(tmp_path, "b", 1, 50, "r-1-50")
    left.tell("attached", parts=[manifest_bytes(older)], damaged=[])
    line.join("c")
    logged(line, r"generation 1 of step 50, 10 steps back: scalai resume --job j --generation 1")
    assert not left.heard("drop")
    line.end()


def test_what_is_found_on_a_disk_goes_where_the_job_has_gone_on_meanwhile(
    line: Line, tmp_path: Path
) -> None:
    left, mine = without_memory(line, tmp_path)
    line.join("a", parts=(mine,)).wait_for("start")
    found = [replace(mine, host="b"), part(tmp_path, "b", 1, 50, "r-1-50")]
    left.tell("attached", parts=[manifest_bytes(each) for each in found], damaged=[])
    assert left.wait_for("drop")["generation"] == 1, "its host has no room for a third one"
    assert len(left.heard("drop")) == 1


def test_the_number_of_a_state_that_turned_up_on_a_disk_is_not_used_again(
    line: Line, tmp_path: Path
) -> None:
    left, _ = without_memory(line, tmp_path)
    other = part(tmp_path, "b", 7, 50, "other-1-50")
    left.tell("attached", parts=[manifest_bytes(other)], damaged=[(8, "its manifest is torn")])
    answer = call(line, "resume", generation=7, dry_run=False)
    assert "given up: generation 2, 8, 10 steps" in answer["reason"]
    start = left.wait_for("start")
    assert start["generation"] == 7
    name = f"{start['run']}-{start['round']}-55"
    sealed = manifest_bytes(part(tmp_path, "b", -1, 55, name))
    left.tell("sealed", round=start["round"], reason="snapshot", part=sealed, seconds={})
    assert left.wait_for("commit")["generation"] == 9


# ------------------------------------------------------------------ beginning anew


def fresh(line: Line) -> JobSpec:
    return JobSpec.read(parse_options([*line.flags, "--fresh", "script.py"]))


def test_a_fresh_job_keeps_the_old_state_until_it_has_its_own(
    fresh_line: Line, tmp_path: Path
) -> None:
    agent = fresh_line.join("a", parts=(part(tmp_path, "a", 7, 20, "r-1-20"),))
    assert agent.answer["sets_aside"]
    logged(fresh_line, "host=a gives up generation 7 of step 20")
    start = agent.wait_for("start")
    assert start["generation"] is None and not agent.heard("drop")
    sealed = part(tmp_path, "a", -1, 0, f"{start['run']}-1-0")
    agent.tell("sealed", round=1, reason="start", part=manifest_bytes(sealed), seconds={})
    assert agent.wait_for("commit")["generation"] == 8
    assert agent.wait_for("drop")["generation"] == 7


def test_a_host_that_does_not_say_so_keeps_its_state(fresh_line: Line, tmp_path: Path) -> None:
    flags = [flag for flag in fresh_line.flags if flag != "--fresh"]
    plain = JobSpec.read(parse_options([*flags, "script.py"]))
    with pytest.raises(PeerError, match=r"begins anew.*holds generation 7 of step 20.*--fresh too"):
        fresh_line.join("a", parts=(part(tmp_path, "a", 7, 20, "r-1-20"),), spec=plain)
    assert not fresh_line.join("b", spec=plain).heard("drop")


def test_a_fresh_agent_does_not_touch_a_job_that_has_a_state(line: Line, tmp_path: Path) -> None:
    with pytest.raises(PeerError, match=r"started without it.*waiting, round 0"):
        line.join("a", spec=fresh(line))
    agent = line.join("a", parts=(part(tmp_path, "a", 7, 20, "r-1-20"),))
    assert agent.wait_for("start")["generation"] == 7
    with pytest.raises(PeerError, match=r"--fresh begins job 'j' anew, but"):
        line.join("b", spec=fresh(line))


def test_what_a_late_host_sets_aside_is_never_the_jobs_own_under_that_number(
    fresh_line: Line, tmp_path: Path
) -> None:
    agent = fresh_line.join("a")
    run = agent.wait_for("start")["run"]
    sealed = part(tmp_path, "a", -1, 0, f"{run}-1-0")
    agent.tell("sealed", round=1, reason="start", part=manifest_bytes(sealed), seconds={})
    assert agent.wait_for("commit")["generation"] == 1
    late = fresh_line.join("b", parts=(part(tmp_path, "b", 1, 20, "r-1-20"),))
    assert late.wait_for("drop")["generation"] == 1
    sealed = part(tmp_path, "a", -1, 5, f"{run}-1-5")
    agent.tell("sealed", round=1, reason="snapshot", part=manifest_bytes(sealed), seconds={})
    assert agent.wait_for("commit", 2)["generation"] == 2
    assert not late.answer["sets_aside"] and len(late.heard("drop")) == 1


def test_what_was_fetched_of_a_generation_that_was_left_behind_goes(
    line: Line, tmp_path: Path
) -> None:
    older, of_a = part(tmp_path, "a", 3, 20, "r-1-20"), of_two_hosts(tmp_path, 4, 30)[0]
    agent = line.join("a", parts=(older, of_a))
    logged(line, "scalai resume")
    call(line, "resume", generation=3, dry_run=False)
    agent.wait_for("drop")
    agent.tell("grown", part=manifest_bytes(of_a))  # it was on its way
    assert agent.wait_for("drop", 2)["generation"] == 4


# ------------------------------------------------------------------ a proof that fails


def restored(agent: FakeAgent, number: int, whole: HostManifest) -> dict[str, Any]:
    """Answer a start as workers would that have restored something else than this state."""
    start, rows = agent.wait_for("start", number), whole.collection
    agent.tell(
        "restored", round=start["round"], rows=rows, seconds={}, bytes_local=0, bytes_remote=0,
        fingerprints=np.zeros(len(rows), np.uint64),
    )  # fmt: skip
    return start


def test_a_failed_proof_fetches_anew_once_and_a_second_one_ends_the_job(tmp_path: Path) -> None:
    line = Line(tmp_path, "--nnodes", "1", "--max-restarts", "0")
    whole = part(tmp_path, "a", 4, 30, "r-1-30")
    agent = line.join("a", parts=(whole,), is_slow=True)
    restored(agent, 1, whole)
    assert agent.wait_for("doubt")["generation"] == 4
    agent.wait_for("stop")
    restored(agent, 2, whole)
    end = agent.wait_for("exit")
    assert end["code"] == 3 and end["keeps_state"], "no restart was left, and none was needed"
    for found in (r"generation 4 of step 30", r"'a' \(/d\)", r"--fresh"):
        assert re.search(found, end["reason"]), end["reason"]
    line.end()


def test_the_only_copy_is_kept_though_it_was_fetched_and_never_proven(tmp_path: Path) -> None:
    """The hosts that it came from have gone."""
    line = Line(tmp_path, "--nnodes", "1", "--max-restarts", "0")
    whole = part(tmp_path, "a", 4, 30, "r-1-30")
    unproven = tuple(range(len(whole.files)))
    agent = line.join("a", parts=(replace(whole, unproven=unproven),), is_slow=True)
    restored(agent, 1, whole)
    restored(agent, 2, whole)
    end = agent.wait_for("exit")
    assert end["code"] == 3 and end["keeps_state"] and not agent.heard("doubt")
    line.end()


def test_what_was_fetched_and_is_not_what_was_promised_is_doubted(
    line: Line, tmp_path: Path
) -> None:
    agent = line.join("a", parts=(part(tmp_path, "a", 4, 30, "r-1-30"),), is_slow=True)
    start = agent.wait_for("start")
    agent.tell("unproven", round=start["round"], reason="1 fetched pieces are not what")
    assert agent.wait_for("doubt")["generation"] == 4
    assert agent.wait_for("start", 2)["generation"] == 4
