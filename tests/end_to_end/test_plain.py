"""Without ``--elastic`` a job is run as torchrun runs it: stopped and started anew, nothing
hooked."""

from pathlib import Path

import pytest

from support.agents import Agents

SCRIPT = """
import json, os, sys, time
folder, how = sys.argv[1:3]
rank, world, round = (os.environ[n] for n in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"))
assert "SCALAI_ELASTIC" not in os.environ and "SCALAI_AGENT" not in os.environ
with open(f"{folder}/metrics.jsonl", "a") as file:
    file.write(json.dumps({"step": int(round), "world": int(world), "rank": int(rank)}) + "\\n")
if how == "fails" and rank == "0":
    sys.exit(3)
while how == "stays" and not os.path.exists(f"{folder}/enough"):
    time.sleep(0.05)
"""


def plain(folder: Path, how: str, *flags: str, nodes: str = "1:2") -> Agents:
    (folder / "script.py").write_text(SCRIPT)
    script = [str(folder / "script.py"), str(folder), how]
    return Agents(folder, None, script, flags=flags, nodes=nodes)


@pytest.mark.campaign
@pytest.mark.turns
def test_a_script_that_ends_ends_the_job(tmp_path: Path) -> None:
    with plain(tmp_path, "ends", nodes="1") as agents:
        agents.start("a")
        assert agents.exit_code("a") == 0
        assert sorted(line["rank"] for line in agents.lines()) == [0, 1]
        agents.wait_until(lambda: not agents.family(), "nothing is left")


@pytest.mark.campaign
def test_a_script_that_fails_is_started_as_often_as_asked(tmp_path: Path) -> None:
    with plain(tmp_path, "fails", "--max-restarts", "1", nodes="1") as agents:
        agents.start("a")
        assert agents.exit_code("a") == 1
        assert {line["step"] for line in agents.lines()} == {0, 1}


@pytest.mark.turns
def test_hosts_come_and_go_by_a_restart_of_the_workers(tmp_path: Path) -> None:
    """torchrun 2.13 hangs when a host joins, and leaves orphans when an agent is killed."""
    with plain(tmp_path, "stays", "--max-restarts", "3") as agents:
        agents.start("a")
        agents.wait_for_world(2)
        agents.start("b")
        agents.wait_for_world(4)
        agents.kill("a")
        agents.wait_for_world(2)
        agents.start("c")
        agents.wait_for_world(4)
        agents.drain("b")
        assert agents.exit_code("b") == 0
        agents.wait_for_world(2)
        (tmp_path / "enough").touch()
        assert agents.exit_code("c") == 0
        agents.wait_until(lambda: not agents.family(), "nothing is left")
