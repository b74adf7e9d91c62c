"""What cannot run is said once, in words, with the exit code for it; a script that nothing connects
to the job is told so."""

import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from support.agents import SCALAI_RUN, Agents

pytestmark = pytest.mark.fault

DEADLINE_S = 120.0
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


def test_a_refusal_in_the_workers_is_one_message(tmp_path: Path) -> None:
    with agents_of(tmp_path, REFUSING, slots=2, flags=("--max-restarts", "3")) as agents:
        agents.start("a")
        code = agents.exit_code("a")
        log = (tmp_path / "a.log").read_text()
        assert code == 3, log
        assert "this framework is too new" in log
        assert "Traceback" not in log and "round=2" not in log, log


def test_a_refusal_before_the_start_is_one_message(tmp_path: Path) -> None:
    done = run(tmp_path, "--job", "j", "pretrain_gpt.py", "--num-layers", "2", "--hidden-size",
               "8", "--num-attention-heads", "2", "--micro-batch-size", "1",
               "--global-batch-size", "4", "--use-megatron-fsdp")  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert "scalai-run: " in done.stderr and "--use-megatron-fsdp" in done.stderr
    assert "Traceback" not in done.stderr, done.stderr


@pytest.mark.parametrize("flags", [(), ("--check-elastic",)], ids=["start", "check"])
def test_a_framework_beside_the_script_that_was_never_tried_is_refused_before_the_start(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "package_info.py").write_text("MAJOR = 9\nMINOR = 1\nPATCH = 0\n")
    (tmp_path / "pretrain_gpt.py").write_text("")
    done = run(tmp_path, *flags, str(tmp_path / "pretrain_gpt.py"), "--num-layers", "2",
               "--hidden-size", "8", "--num-attention-heads", "2", "--micro-batch-size", "1",
               "--global-batch-size", "4")  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert "scalai-run: megatron-core 9.1.0 was never tried" in done.stderr
    assert "Traceback" not in done.stderr and "event=round" not in done.stderr


def test_a_coordinator_whose_port_is_taken_says_so(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = run(tmp_path, "--coordinator", f"127.0.0.1:{port}", "-m", "script")
    assert done.returncode == 1
    (logged,) = [line for line in done.stderr.splitlines() if "Address already in use" in line]
    assert logged.startswith("scalai-run: ") and str(port) in logged
    assert "Traceback" not in done.stderr, done.stderr


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    config = folder / "elastic.toml"
    config.write_text("[model]\nglobal_batch_size = 12\n[probe]\nkind = 'none'\n")
    flags = ["--nproc-per-node", "2", "--store-dir", str(folder / "store"), "--elastic"]
    return subprocess.run(
        [str(SCALAI_RUN), *flags, str(config), *arguments],
        capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip


@pytest.mark.turns
def test_a_script_that_nothing_connects_is_told_so_once(tmp_path: Path) -> None:
    with agents_of(tmp_path, UNCONNECTED.format(steps=40, then=""), slots=2) as agents:
        agents.start("a")
        agents.exit_code("a")
        log = (tmp_path / "a.log").read_text()
        assert log.count("THE SCRIPT TRAINS, BUT NOTHING CONNECTS IT") == 1, log
        assert "event=unhooked host=a" in log


@pytest.mark.campaign
def test_a_script_that_attaches_after_steps_on_dummy_data_is_connected(tmp_path: Path) -> None:
    then = ATTACHING.format(metrics=str(tmp_path / "metrics.jsonl"))
    with agents_of(tmp_path, UNCONNECTED.format(steps=3, then=then)) as agents:
        agents.start("a")
        assert agents.exit_code("a") == 0, agents.logs()
        log = (tmp_path / "a.log").read_text()
        assert log.index("event=unhooked host=a") < log.index("event=hooked host=a")


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
