"""How jobs start: refused, plain, standalone, planned, from a saved state, over a network."""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from support.agents import SCALAI_RUN, TINY_JOB, Agents, tiny_agents
from support.network_namespaces import NetworkHosts, network_agents
from support.ports import free_port
from support.tiny_job import check_steps
from support.waiting import wait_until

DEADLINE_S = 120.0
no_network = NetworkHosts.obstacle()
needs_network = pytest.mark.skipif(no_network is not None, reason=str(no_network))
SAVED = sorted((Path(__file__).parents[1] / "data").glob("*/durable/tiny"))
REFUSING = """
import time
from scalai.core.errors import RefusedError
time.sleep(0.2)
raise RefusedError("this framework is too new. Install an older one.")
"""
UNCONNECTED = """
import time, torch
weight = torch.nn.Parameter(torch.zeros(1))
optimizer = torch.optim.SGD([weight], lr=0.1)
for step in range({steps}):
    weight.grad = torch.ones(1)
    optimizer.step()
    time.sleep(0.05)
{then}
"""
ATTACHING = """
import sys
sys.argv = ["tiny_job.py", "--steps", "5", "--metrics", {metrics!r}]
from support import tiny_job
tiny_job.main()
"""


def agents_of(folder: Path, script: str, *, slots: int = 1, flags: Sequence[str] = ()) -> Agents:
    path = folder / "script.py"
    path.write_text(script)
    return Agents(folder, f'{slots} = "tp1"', [str(path)], slots=slots, nodes="1", flags=flags)


@pytest.mark.fault
def test_a_refusal_in_the_workers_is_one_message(tmp_path: Path) -> None:
    with agents_of(tmp_path, REFUSING, slots=2, flags=("--max-restarts", "3")) as agents:
        agents.start("a")
        code = agents.exit_code("a")
        log = (tmp_path / "a.log").read_text()
        assert code == 3, log
        assert "this framework is too new" in log
        assert "Traceback" not in log and "round=2" not in log, log


@pytest.mark.fault
@pytest.mark.turns
def test_a_script_that_nothing_connects_is_told_so_once(tmp_path: Path) -> None:
    script = UNCONNECTED.format(steps=40, then="import os; print('end of', os.environ['RANK'])")
    flags = ("--local-ranks-filter", "1")
    with agents_of(tmp_path, script, slots=2, flags=flags) as agents:
        agents.start("a")
        agents.exit_code("a")
        log = (tmp_path / "a.log").read_text()
        assert "end of 1" in log and "end of 0" not in log, "the console shows local rank 1 alone"
        assert log.count("THE SCRIPT TRAINS, BUT NOTHING CONNECTS IT") == 1, log
        assert "event=unhooked host=a" in log


@pytest.mark.fault
@pytest.mark.campaign
def test_a_script_that_attaches_after_steps_on_dummy_data_is_connected(tmp_path: Path) -> None:
    then = ATTACHING.format(metrics=str(tmp_path / "metrics.jsonl"))
    with agents_of(tmp_path, UNCONNECTED.format(steps=3, then=then)) as agents:
        agents.start("a")
        assert agents.exit_code("a") == 0, agents.logs()
        log = (tmp_path / "a.log").read_text()
        assert log.index("event=unhooked host=a") < log.index("event=hooked host=a")


@pytest.mark.fault
@pytest.mark.turns
@pytest.mark.parametrize(
    "builder", ["initialize", pytest.param("train", marks=pytest.mark.campaign)]
)
def test_steps_by_which_a_framework_builds_its_state_are_no_training(
    tmp_path: Path, builder: str
) -> None:
    package = tmp_path / "accelerate"
    package.mkdir()
    (package / "__init__.py").write_text(f"def {builder}(step):\n    step()\n")
    script = UNCONNECTED.replace("    optimizer.step()", f"    framework.{builder}(optimizer.step)")
    script = script.replace("import time, torch", "import time, torch, accelerate as framework")
    with agents_of(tmp_path, script.format(steps=3, then="")) as agents:
        agents.start("a")
        agents.exit_code("a")
        assert ("event=unhooked" in agents.text()) == (builder == "train")


SCRIPT = """
import json, os, sys
from support.waiting import wait_until
folder, how = sys.argv[1:3]
rank, world, round = (os.environ[n] for n in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"))
assert "SCALAI_ELASTIC" not in os.environ and "SCALAI_AGENT" not in os.environ
with open(f"{folder}/metrics.jsonl", "a") as file:
    file.write(json.dumps({"step": int(round), "world": int(world), "rank": int(rank)}) + "\\n")
if how == "fails" and rank == "0":
    sys.exit(3)
if how == "stays":
    wait_until(lambda: os.path.exists(f"{folder}/enough"), "enough", 600.0)
"""


def plain(folder: Path, how: str, *flags: str, nodes: str = "1:2") -> Agents:
    (folder / "script.py").write_text(SCRIPT)
    script = [str(folder / "script.py"), str(folder), how]
    return Agents(folder, None, script, flags=flags, nodes=nodes)


@pytest.mark.campaign
@pytest.mark.parametrize(("how", "code", "rounds"), [("ends", 0, {0}), ("fails", 1, {0, 1})])
def test_a_plain_script_is_started_as_often_as_asked_where_it_fails(
    tmp_path: Path, how: str, code: int, rounds: set[int]
) -> None:
    with plain(tmp_path, how, "--max-restarts", "1", nodes="1") as agents:
        agents.start("a")
        assert agents.exit_code("a") == code
        assert {line["step"] for line in agents.lines()} == rounds
        assert {line["rank"] for line in agents.lines()} == {0, 1}
        agents.wait_until(lambda: not agents.family(), "nothing is left")


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


def start(folder: Path, name: str, *flags: str) -> subprocess.Popen[str]:
    config = folder / "elastic.toml"
    config.write_text("[model]\nglobal_batch_size = 12\n[probe]\nkind = 'none'\n")
    script = [str(TINY_JOB), "--steps", "100000", "--metrics", str(folder / f"{name}.jsonl")]
    return subprocess.Popen(
        [str(SCALAI_RUN), "--nproc-per-node", "1",
         "--store-dir", str(store_of(folder)), "--durable-dir", str(folder / "disk"),
         "--elastic", str(config), *flags, *script],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def store_of(folder: Path) -> Path:
    return Path(f"/dev/shm/scalai-test-{os.getpid()}-{folder.name}")


def steps(path: Path) -> list[dict[str, int]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


@pytest.mark.fault
@pytest.mark.turns
def test_a_second_standalone_job_runs_beside_the_first_and_each_leaves_nothing_in_memory(
    tmp_path: Path,
) -> None:
    jobs = {name: start(tmp_path, name, "--standalone") for name in ("one", "two")}
    try:

        def both_train() -> bool:
            assert all(job.poll() is None for job in jobs.values()), "a job has ended"
            return all(len(steps(tmp_path / f"{name}.jsonl")) > 5 for name in jobs)

        wait_until(both_train, "the two jobs both train", DEADLINE_S)
        for job in jobs.values():
            job.send_signal(signal.SIGTERM)
        for name, job in jobs.items():
            logged, _ = job.communicate(timeout=DEADLINE_S)
            assert (job.returncode, logged.count("--job standalone-")) == (75, 1), logged
            assert check_steps(steps(tmp_path / f"{name}.jsonl"))[0] == 1
        store = store_of(tmp_path)
        wait_until(
            lambda: not list(store.iterdir()),
            lambda: f"empty {sorted(map(str, store.rglob('*')))}",
            DEADLINE_S,
        )
    finally:
        for job in jobs.values():
            job.kill()
            job.wait(30)
        shutil.rmtree(store_of(tmp_path), ignore_errors=True)


PLANNED_JOB = TINY_JOB.with_name("planned_job.py")
# Eleven layers: the tiny job has no pipelines.
MODEL = (
    "--num-layers 11 --hidden-size 768 --num-attention-heads 12 --seq-length 128 "
    "--max-position-embeddings 128 --micro-batch-size 1 --global-batch-size 12 "
    "--padded-vocab-size 1536"
)


@pytest.mark.turns
def test_degrees_are_computed_from_the_start_where_a_person_says_so(tmp_path: Path) -> None:
    script = [
        str(PLANNED_JOB), *MODEL.split(), "--step-s-of-tp", "0.02", "0.02",
        "--metrics", str(tmp_path / "metrics.jsonl"), "--enough", str(tmp_path / "enough"),
    ]  # fmt: skip
    settings = {"planner": 'kind = "cost"\ngpu = "a100-80gb"', "model": "num_layers = 11"}
    with Agents(tmp_path, "", script, nodes="1", settings=settings) as agents:
        agents.start("a")
        agents.wait_for_step(5)
        assert "by cost: " in agents.text()
        agents.wait_until(lambda: "event=ahead one_more=" in agents.text(), "it looks ahead")
        agents.let_end()
        assert agents.exit_code("a") == 0


@pytest.mark.fault
@pytest.mark.turns
@needs_network
def test_a_host_joins_over_the_network_without_any_interface_being_named(tmp_path: Path) -> None:
    settings = {"resize": "standby = 'never'"}
    with network_agents(
        tmp_path, '2 = "tp2"\n1 = "tp1"', slots=1, settings=settings
    ) as (agents, hosts):  # fmt: skip
        agents.start("h1")
        agents.wait_for_step(5, world=1)
        agents.start("h2")
        joined = agents.wait_for_world(2)
        agents.wait_for_step(joined + 10, world=2)
        for name in ("h1", "h2"):
            log = (tmp_path / f"{name}.log").read_text()
            assert f"GLOO_SOCKET_IFNAME={hosts.devices[name]}" in log
        agents.check_each_once()


@pytest.mark.fault
@pytest.mark.campaign
def test_a_job_whose_endpoint_is_an_ipv6_address_trains(tmp_path: Path) -> None:
    try:
        port = free_port("::1")
    except OSError as error:
        pytest.skip(f"this machine has no IPv6: {error}")
    # Both agents have this address, and of each only the data plane has a port of its own.
    flags = ("--rdzv-endpoint", f"[::1]:{port}", "--port-range", f"{port + 1}-{port + 20}")
    token = {"SCALAI_JOB_TOKEN": "0123456789abcdef0123456789abcdef"}
    settings = {"resize": "standby = 'never'"}
    with tiny_agents(
        tmp_path, '2 = "tp2"\n1 = "tp1"', slots=1, settings=settings, flags=flags,
        environment=token,
    ) as agents:  # fmt: skip
        agents.start("a")
        agents.wait_for_step(5, world=1)
        agents.start("b")
        joined = agents.wait_for_world(2)
        agents.wait_for_step(joined + 5, world=2)
        agents.check_each_once()


NAMES = ("h1", "h2", "h3")


@pytest.mark.fault
@pytest.mark.campaign
@needs_network
def test_a_broken_link_between_two_hosts_costs_no_step_and_its_repair_brings_both_back(
    tmp_path: Path,
) -> None:
    settings = {"store": "snapshot_every = 50", "resize": "hang_s = 20"}
    with network_agents(
        tmp_path, '3 = "tp1"\n2 = "tp1"\n1 = "tp1"', slots=1, nodes="1:3", names=NAMES,
        step_s=0.1, settings=settings, constants={"resize.stall_s": 10.0},
        flags=("--max-restarts", "2"),
    ) as (agents, hosts):  # fmt: skip
        for name in NAMES:
            agents.start(name)
        began = agents.wait_for_world(3)
        agents.wait_for_step(began + 20, world=3)
        hosts.sever("h2", "h3")
        cut = agents.wait_for_world(2)
        agents.wait_for_step(cut + 20, world=2)
        assert "event=unheard h2 and h3 do not hear each other" in agents.text()
        hosts.sever("h2", "h3", is_cut=False)
        agents.wait_until(lambda: agents.lines()[-1]["world"] == 3, "both take part again")
        agents.check_each_once()


@pytest.mark.turns
@pytest.mark.parametrize("saved", SAVED, ids=[folder.parents[1].name for folder in SAVED])
def test_a_job_goes_on_from_a_saved_generation_at_other_degrees(
    saved: Path, tmp_path: Path
) -> None:
    shutil.copytree(saved, tmp_path / "durable" / "tiny")
    (manifest,) = saved.glob("generation-*/a/manifest.json")
    step = json.loads(manifest.read_text())["step"]
    durable = ("--durable-dir", str(tmp_path / "durable"))
    with tiny_agents(tmp_path, '1 = "tp1"', slots=1, nodes="1", flags=durable) as agents:
        agents.start("c")
        agents.wait_for_step(step + 3)
        agents.let_end()
        assert agents.exit_code("c") == 0, agents.logs()
        steps = check_steps(agents.lines())
    assert steps == list(range(step + 1, step + 1 + len(steps)))


@pytest.mark.campaign
def test_a_person_may_forbid_to_build_beside_the_training(tmp_path: Path) -> None:
    settings = {"resize": 'standby = "never"'}
    with tiny_agents(tmp_path, '2 = "tp1"\n1 = "tp1"', nodes="1", settings=settings) as agents:
        agents.start("a")
        agents.wait_for_all(2)
        agents.scale(nproc=1)
        agents.wait_for_world(1)
        assert "event=build" not in agents.text()
        check_steps(agents.lines())
