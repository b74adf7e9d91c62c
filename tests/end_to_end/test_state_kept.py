"""Nothing starts again at step 0: states that were saved, finished, damaged or lost, disks that
rot, hang or fill up, and a memory that is full."""

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from scalai.core.dataset.ledger import Ledger
from scalai.launch.agent.durable import look
from scalai.launch.config.endpoint import TOKEN_VARIABLE, read_card
from support.agents import MARK, Agents, one_worker, tiny_agents
from support.full_disk import ALONE, can_mount
from support.passthrough_disk import HAS_FUSE, passthrough_disk
from support.tiny_job import check_steps

pytestmark = pytest.mark.fault
needs_fuse = pytest.mark.skipif(not HAS_FUSE, reason="no /dev/fuse here, or no fuse3")
FLAGS = ("--max-restarts", "5")


def durable(folder: Path) -> tuple[str, ...]:
    return (*FLAGS, "--durable-dir", str(folder / "durable"))


def goes_on(agents: Agents, made: int) -> None:
    """Check that the next step is the one behind ``made``, and no step was made twice."""
    agents.wait_for_step(made + 3)
    agents.check_each_once()


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
        done = agents.command("resume", "--generation", number)
        assert "going on from generation" in done.stdout
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
        agents.command("resume", "--generation", number)
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


SHARDS = '3 = "tp3"\n2 = "tp2"\n1 = "tp1"'
ARCHIVE = "snapshot_every = 7\nreplicas = 0\ndurable_dir = '{disk}'\ndurable_every_s = 1"


def hosts_ab(folder: Path, **given: Any) -> Any:
    settings = {"store": ARCHIVE.format(disk=folder / "disk")}
    return tiny_agents(folder, SHARDS, slots=1, settings=settings, **given)


def train_ab(agents: Agents) -> None:
    for host in "ab":
        agents.start(host)
    agents.wait_until(lambda: bool(agents.resizes()), "every rank has stepped")
    agents.wait_for_step(8)


def archived(agents: Agents, count: int = 1) -> list[int]:
    """Return the generations that came to the disk, once there are so many."""

    def found() -> list[int]:
        texts = "".join(path.read_text() for path in sorted(agents.folder.glob("*.log")))
        return [int(number) for number in re.findall(r"event=archived generation=(\d+)", texts)]

    agents.wait_until(lambda: len(found()) >= count, f"{count} generations are archived")
    return found()


def saved(folder: Path) -> dict[int, list[str]]:
    """Return the hosts whose parts are shown, by generation."""
    seen = look(next((folder / "disk").iterdir()))
    assert not seen.damaged
    return {n: sorted(part.host for _, part in parts) for n, parts in seen.parts.items()}


def test_after_all_hosts_died_others_go_on_from_the_newest_that_is_shown(tmp_path: Path) -> None:
    with hosts_ab(tmp_path, flags=("--max-restarts", "0")) as agents:
        train_ab(agents)
        archived(agents, 4)
        for host in "ab":
            agents.kill(host, with_its_memory=True)
        agents.kill_coordinator()
        kept = saved(tmp_path)
        assert 1 <= len(kept) <= 3, "two are kept, and one may just have come"
        assert all(hosts == ["a", "b"] for hosts in kept.values()), kept
        shutil.rmtree(agents.reports)  # another coordinator numbers its own anew
        agents.start("c")
        agents.wait_until(lambda: bool(agents.resizes()), "the job goes on")
        report = agents.resizes()[-1]
        assert report["generation"] == max(kept) and report["step"] % 7 == 0, (report, kept)
        agents.wait_for_step(report["step"] + 8)
        check_steps(agents.lines())


def start_coordinator(agents: Agents) -> None:
    """Start the job's coordinator by hand, with the agents' command line."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "scalai.launch.cli", "coordinator", "--listen",
               f"127.0.0.1:{port}", "--", *agents.launcher[1:], *agents.script]  # fmt: skip
    with (agents.folder / "coordinator.log").open("ab") as log:
        agents.started.append(
            subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT,
                env={**os.environ, MARK: str(agents.store)},
            )
        )  # fmt: skip
    agents.wait_until(lambda: read_card(agents.store / agents.job) is not None, "its card")


@pytest.mark.campaign
def test_a_job_resumes_from_disk_whoever_starts_the_coordinator_and_whoever_is_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "ab" * 32)
    degrees = '2 = "tp2"\n1 = "tp1"'
    with tiny_agents(tmp_path, degrees, slots=1, flags=durable(tmp_path)) as agents:
        start_coordinator(agents)
        agents.start("a")
        agents.wait_for_step(5, world=1)
        agents.drain("a")
        assert agents.exit_code("a") == 75, agents.logs()
        made = agents.lines()[-1]["step"]
        agents.wait_until(lambda: not agents.family(), "nothing of the job is left")

        start_coordinator(agents)
        agents.start("a")
        goes_on(agents, made)
        agents.drain("a")
        assert agents.exit_code("a") == 75, agents.logs()
        made = agents.lines()[-1]["step"]
        agents.wait_until(lambda: not agents.family(), "nothing of the job is left")

        # Another host is there first, and the one that saved comes later.
        agents.start("b")
        goes_on(agents, made)
        agents.start("a")
        agents.wait_for_world(2)
        check_steps(agents.lines())


TWO_WORKERS = '2 = "tp2"\n1 = "tp1"'
HUNG_STORE = "snapshot_every = 50\ndurable_dir = '{disk}'\ndurable_every_s = 2"


@needs_fuse
@pytest.mark.turns
def test_a_disk_that_hangs_holds_up_no_change_and_the_end_waits_for_it(tmp_path: Path) -> None:
    """Generations and reports go there."""
    with passthrough_disk(tmp_path) as disk:
        settings = {"store": HUNG_STORE.format(disk=disk.point)}
        reports = ["--report-dir", str(disk.point / "reports")]
        with tiny_agents(
            tmp_path, TWO_WORKERS, slots=2, settings=settings, flags=reports
        ) as agents:
            agents.start("a")
            agents.wait_until(lambda: "event=archived" in agents.text(), "one is archived")
            disk.hang()
            step = int(agents.lines()[-1]["step"])
            agents.wait_for_step(step + 110)  # snapshots are made on the way
            agents.scale(nproc=1)
            agents.wait_for_step(agents.wait_for_world(1) + 60)
            agents.wait_until(lambda: "event=report_late" in agents.text(), "that is said")
            agents.let_end()
            agents.wait_until(
                lambda: f"event=waiting for {disk.point / 'tiny'}" in agents.text(), "that, too"
            )
            disk.go_on()
            assert agents.exit_code("a") == 0
        assert (disk.folder / "tiny" / "finished.json").exists()


@needs_fuse
@pytest.mark.turns
def test_an_agent_says_that_it_waits_for_the_disk_and_begins_once_that_answers(
    tmp_path: Path,
) -> None:
    with passthrough_disk(tmp_path) as disk:
        settings = {"store": HUNG_STORE.format(disk=disk.point)}
        with tiny_agents(tmp_path, TWO_WORKERS, slots=1, nodes="1", settings=settings) as agents:
            disk.hang()
            agents.start("a")
            agents.wait_until(
                lambda: f"event=waiting for --durable-dir {disk.point}" in agents.text(), "it waits"
            )
            assert not agents.workers()
            disk.go_on()
            agents.wait_for_step(5)
            agents.let_end()
            assert agents.exit_code("a") == 0


DEADLINE_S = 240.0


def scenario(folder: Path, memory: Path) -> None:
    """Fill the memory while a job trains, then change its degrees."""
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(memory)], check=True, timeout=30
    )
    degrees = '4 = "tp2"\n3 = "tp1"\n2 = "tp2"'
    with tiny_agents(folder, degrees, slots=4, nodes="1", store=memory / "store") as agents:
        agents.start("a")
        agents.wait_for_step(20)
        filler = memory / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(b"x" * 4096)
        assert os.statvfs(memory).f_bavail == 0
        agents.scale(nproc=3)
        made = agents.wait_for_all(3)
        log = agents.text()
        assert "control-2 needs 8192 bytes, but No space left on device" in log, log
        filler.unlink()
        agents.scale(nproc=2)
        assert agents.wait_for_world(2) > made
        steps = [line["step"] for line in agents.lines()]
        assert steps == list(range(1, len(steps) + 1))


@pytest.mark.campaign
@pytest.mark.skipif(not can_mount(), reason="needs root, unshare and mount")
def test_a_full_memory_neither_ends_the_agent_nor_loses_a_step(tmp_path: Path) -> None:
    # Short, because of the sockets of multiprocessing.
    with tempfile.TemporaryDirectory(prefix="scalai-") as memory:
        ran = subprocess.run(
            [*ALONE, sys.executable, __file__, str(tmp_path), memory],
            capture_output=True, text=True, timeout=DEADLINE_S, check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr


if __name__ == "__main__":
    scenario(Path(sys.argv[1]), Path(sys.argv[2]))
