"""Nothing starts again at step 0: durable generations, finished jobs, states that grew and died."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scalai.core.dataset.ledger import Ledger
from support.agents import Agents, one_worker, tiny_agents
from support.tiny_job import check_steps

pytestmark = pytest.mark.fault

FLAGS = ("--max-restarts", "5")


def durable(folder: Path) -> tuple[str, ...]:
    return (*FLAGS, "--durable-dir", str(folder / "durable"))


def newest_on_disk(folder: Path) -> Path:
    saved = (folder / "durable" / "tiny").glob("generation-*")
    return max(saved, key=lambda path: int(path.name.split("-")[1]))


def goes_on(agents: Agents, made: int) -> None:
    """Check that the next step is the one behind ``made``, and no step was made twice."""
    agents.wait_for_step(made + 3)
    steps = check_steps(agents.lines())
    assert steps == list(range(1, len(steps) + 1)), agents.logs()


@pytest.mark.turns
def test_a_finished_job_begins_anew_only_where_a_person_says_so(tmp_path: Path) -> None:
    flags = durable(tmp_path)
    with one_worker(tmp_path, steps=40, flags=flags) as agents:
        agents.start("a")
        agents.wait_for_step(5)
        agents.drain("a")
        assert agents.exit_code("a") == 75
        agents.start("a")
        assert agents.exit_code("a") == 0, agents.logs()
        assert check_steps(agents.lines()) == list(range(1, 41))
        reported = json.loads((tmp_path / "durable" / "tiny" / "finished.json").read_text())
        assert reported["step"] == 40 and reported["generation"] and reported["at"]
        kept = json.loads((tmp_path / "durable" / "tiny" / "ledger-a.json").read_text())
        assert Ledger.from_json(kept).at[0] == 40
        agents.start("a")
        assert agents.exit_code("a") == 3
        assert "job 'tiny' finished at step 40 on" in agents.text()
        assert "--fresh" in agents.text() and not agents.workers()
        agents.start("a", "--fresh")
        agents.wait_until(lambda: len(agents.lines()) > 43, "it begins anew")
        assert [line["step"] for line in agents.lines()[40:43]] == [1, 2, 3]
        (aside,) = (tmp_path / "durable").glob("tiny.set-aside-*")
        assert (aside / "finished.json").exists() and list(aside.glob("generation-*"))


@pytest.mark.campaign
def test_a_damaged_newest_state_is_waited_for_until_a_person_decides(tmp_path: Path) -> None:
    settings = {"store": "snapshot_every = 5"}
    flags = durable(tmp_path)
    with one_worker(tmp_path, settings=settings, flags=flags) as agents:
        for _ in range(2):
            agents.start("a")
            agents.wait_until(
                lambda: len(agents.lines()) > 5 and len(agents.resizes()) > 0, "it trains"
            )
            step = agents.lines()[-1]["step"]
            agents.wait_for_step(step + 3)
            agents.drain("a")
            assert agents.exit_code("a") == 75, agents.logs()
        saved = sorted((tmp_path / "durable" / "tiny").glob("generation-*"),
                       key=lambda path: int(path.name.split("-")[1]))  # fmt: skip
        older, newest = saved[-2], saved[-1]
        manifest = newest / "a" / "manifest.json"
        manifest.write_text(manifest.read_text()[:-40])
        made = len(agents.lines())
        agents.start("a")
        agents.wait_until(lambda: "scalai resume" in agents.text(), "it says the way out")
        assert "is not whole (host 'a': " in agents.text() and not agents.workers()
        number = older.name.split("-")[1]
        command = [sys.executable, "-m", "scalai.launch.cli", "resume", "--job", "tiny",
                   "--store-dir", str(agents.store), "--generation", number]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and "going on from generation" in done.stdout, done.stderr
        agents.wait_until(lambda: len(agents.lines()) > made + 8, "it goes on")
        step = json.loads((older / "a" / "manifest.json").read_text())["step"]
        assert agents.lines()[made]["step"] == step + 1
        check_steps(agents.lines())
        assert manifest.exists(), "what is damaged is left as it is"


@pytest.mark.turns
def test_bytes_that_rot_on_the_disk_end_the_start_and_are_named(tmp_path: Path) -> None:
    with tiny_agents(tmp_path, '2 = "tp2"', nodes="1", flags=durable(tmp_path)) as agents:
        agents.start("a")
        agents.wait_for_step(5)
        agents.drain("a")
        assert agents.exit_code("a") == 75
        (file, *_) = sorted((tmp_path / "durable").rglob("rank-*.safetensors"))
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        made = len(agents.lines())
        agents.start("a")
        assert agents.exit_code("a") == 3, agents.logs()
        log = agents.text()
        assert "and nothing else is whole" in log and len(agents.lines()) == made
        assert f"in {file} has fingerprint" in log and "--fresh" in log
        # The state is kept, and another copy of it is taken as it is.
        content[-1] ^= 1
        file.write_bytes(content)
        agents.wait_until(lambda: not agents.family(), "nothing of the job is left")
        agents.start("a")
        goes_on(agents, agents.lines()[made - 1]["step"])


@pytest.mark.campaign
def test_where_memory_is_lost_an_older_state_on_disk_is_named_and_not_taken_unasked(
    tmp_path: Path,
) -> None:
    degrees, settings = '2 = "tp2"\n1 = "tp1"', {"store": "snapshot_every = 5\nreplicas = 0"}
    flags = durable(tmp_path)
    with tiny_agents(tmp_path, degrees, slots=1, settings=settings, flags=flags) as agents:
        agents.start("a")
        agents.wait_for_step(3)
        agents.drain("a")
        assert agents.exit_code("a") == 75, agents.logs()
        saved = agents.lines()[-1]["step"]
        agents.start("a")
        agents.start("b")
        agents.wait_for_step(saved + 12, world=2)
        agents.kill("b", with_its_memory=True)
        agents.wait_until(lambda: "scalai resume" in agents.text(), "it names the way out")
        assert f"of step {saved}" in agents.text()
        agents.start("b")
        agents.wait_until(lambda: agents.text().count("event=join host=b") > 1, "b is back, empty")
        made = len(agents.lines())
        number = re.findall(r"resume --job tiny --generation (\d+)", agents.text())[-1]
        command = [sys.executable, "-m", "scalai.launch.cli", "resume", "--job", "tiny",
                   "--store-dir", str(agents.store), "--generation", number]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr + agents.logs()
        agents.wait_until(lambda: len(agents.lines()) > made, "it goes on")
        assert agents.lines()[made]["step"] == saved + 1, agents.logs()
        check_steps(agents.lines())


def test_a_durable_directory_that_cannot_be_written_is_refused_at_the_start(
    tmp_path: Path,
) -> None:
    (tmp_path / "durable").write_text("a file")
    with one_worker(tmp_path, flags=durable(tmp_path)) as agents:
        agents.start("a")
        assert agents.exit_code("a") == 3
        assert "cannot be written" in agents.text() and not agents.family()


@pytest.mark.turns
def test_a_state_that_cannot_be_saved_stays_in_memory_and_says_where(tmp_path: Path) -> None:
    with one_worker(tmp_path, flags=durable(tmp_path)) as agents:
        agents.start("a")
        agents.wait_for_step(5)
        shutil.rmtree(tmp_path / "durable")
        (tmp_path / "durable").write_text("stands for a full disk")
        agents.drain("a")
        assert agents.exit_code("a") == 1
        assert f"The state stays in {agents.store}" in agents.text()
        made = agents.lines()[-1]["step"]
        (tmp_path / "durable").unlink()
        agents.wait_until(lambda: not agents.family(), "nothing of the job is left")
        agents.start("a")
        goes_on(agents, made)
