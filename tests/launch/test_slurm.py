"""Slurm's variables and commands, as the agents read them; Slurm itself is in
``tests/end_to_end/test_slurm.py``."""

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from scalai.core.errors import PeerError, UsageError
from scalai.launch.agent.notices import LEAST_S, LONGEST_S, NoticeWatch, SlurmNotice
from scalai.launch.command_runner import CommandRunner
from scalai.launch.config import slurm
from scalai.launch.config.elastic_config import NoticeSource
from scalai.launch.config.flags import parse_options

ALLOCATION = {"SLURM_JOB_NODELIST": "gpu[03-05,9],login1", "SLURM_JOB_ID": "40123"}
TASK = {"SLURMD_NODENAME": "gpu03", "SLURM_JOB_ID": "40123", "SLURM_LOCALID": "0"}
ARRAY = {**TASK, "SLURM_ARRAY_JOB_ID": "40120", "SLURM_ARRAY_TASK_ID": "3"}

# What scontrol of Slurm 22.05 has printed, but for the kernel's name.
NODE = (
    "NodeName=gpu03 Arch=x86_64 CoresPerSocket=1 CPUAlloc=2 CPUEfctv=2 CPUTot=2 CPULoad=3.00 "
    "AvailableFeatures=(null) ActiveFeatures=(null) Gres=gpu:8 NodeAddr=192.0.2.3 "
    "NodeHostName=gpu03 Version=22.05.8 OS=Linux 6.1 RealMemory=4000 AllocMem=4000 FreeMem=19800 "
    "Sockets=2 Boards=1 State={state} ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A "
    "MCS_label=N/A Partitions=all BootTime=2026-11-27T17:42:15 {more}"
)
ADMIN = "Reason=State=DRAIN was asked for [root@2026-11-27T18:09:41]"


# ------------------------------------------------------------------ variables


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"), ("n1,n2", "n1"), ("n[1-3]", "n1"), ("n[7,9-12],m1", "n7"),
        ("gpu[007-012]-ib", "gpu007-ib"), ("rack[2-3]node[04,06]", "rack2node04"),
        ("a-b.example,c", "a-b.example"), ("login,n[1-2]", "login"),
    ],
)  # fmt: skip
def test_the_coordinator_is_on_the_first_host_of_the_allocation(nodes: str, first: str) -> None:
    allocation = {**ALLOCATION, "SLURM_JOB_NODELIST": nodes}
    assert slurm.endpoint("slurm", allocation) == f"{first}:29523"
    assert slurm.endpoint("h:1", allocation) == slurm.endpoint("h:1", {}) == "h:1"


@pytest.mark.parametrize("missing", ["SLURM_JOB_NODELIST", "SLURM_JOB_ID"])
def test_without_an_allocation_its_first_host_is_refused(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ALLOCATION.items():
        monkeypatch.setenv(name, value)
    assert parse_options(["--coordinator", "slurm", "x.py"]).coordinator == "gpu03:29523"
    monkeypatch.delenv(missing)
    with pytest.raises(UsageError, match="sbatch, srun or salloc, or name HOST:PORT"):
        parse_options(["--coordinator", "slurm", "x.py"])


def test_each_task_of_a_node_is_a_host_of_its_own() -> None:
    names = [slurm.host_name({**TASK, "SLURM_LOCALID": str(task)}) for task in range(3)]
    assert names == ["gpu03", "gpu03-1", "gpu03-2"]
    assert slurm.host_name({}) is None


def test_a_task_of_an_array_does_not_ask_for_the_whole_array() -> None:
    """The last task's id is also that of its array."""
    assert slurm.job_name(TASK) == "40123" and slurm.job_name(ARRAY) == "40120_3"
    assert slurm.job_name({}) is None


# ------------------------------------------------------------------ commands

Put = Callable[[str, str], None]


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Put:
    """Put programs in place of Slurm's: what ``scontrol`` and ``squeue`` do, as shell."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def put(scontrol: str, squeue: str) -> None:
        for name, body in (("scontrol", scontrol), ("squeue", squeue)):
            aside = tmp_path / f"{name}.new"
            aside.write_text(f"#!/bin/sh\n{body}\n")
            aside.chmod(0o755)
            aside.rename(tmp_path / name)

    return put


def says(text: str) -> str:
    return f"cat <<'END'\n{text}\nEND"


def node(state: str, more: str = "") -> str:
    return says(NODE.format(state=state, more=more))


def asked(environment: Mapping[str, str] = TASK, timeout_s: float = 60.0) -> SlurmNotice:
    return SlurmNotice(300.0, environment, CommandRunner(timeout_s))


@pytest.mark.fault
@pytest.mark.parametrize(
    ("state", "is_leaving"),
    [
        ("ALLOCATED", False), ("MIXED", False), ("IDLE*", False), ("MIXED+CLOUD", False),
        ("ALLOCATED+REBOOT_REQUESTED", False), ("ALLOCATED+DRAIN", True), ("MIXED*+DRAIN", True),
        ("DOWN+DRAIN", True), ("DRAINING@", True), ("DRAINED", True), ("ALLOCATED+FAIL", True),
    ],
)  # fmt: skip
def test_a_drain_by_an_admin_is_a_notice_without_a_time(
    state: str, is_leaving: bool, commands: Put
) -> None:
    """What a reason says is no state."""
    commands(node(state, ADMIN), "echo 1-00:00:00")
    assert asked().read() == ({"slurm drain of gpu03": None} if is_leaving else {})


@pytest.mark.fault
@pytest.mark.parametrize(
    ("left", "left_s"),
    [
        ("4:59", 299.0), ("0:07", 7.0), ("0:00", LEAST_S), ("5:00", 300.0), ("5:01", None),
        ("1:00:00", None), ("2-03:04:05", None), ("UNLIMITED", None), ("NOT_SET", None),
        ("INVALID", None), ("slurm_load_jobs: a warning\n4:59", 299.0),
    ],
)  # fmt: skip
def test_the_end_of_the_jobs_time_is_a_notice_once_it_is_near(
    left: str, left_s: float | None, commands: Put
) -> None:
    commands(node("ALLOCATED"), says(left))
    expected = {} if left_s is None else {"slurm end of job 40120_3": left_s}
    assert asked(ARRAY).read() == expected


def test_only_this_node_and_this_task_are_asked_for(tmp_path: Path, commands: Put) -> None:
    record = f'echo "$0 $*" >> {tmp_path}/asked'
    commands(f"{record}\n{node('IDLE')}", f"{record}\necho 1:00:00")
    asked(ARRAY).read()
    assert (tmp_path / "asked").read_text().replace(f"{tmp_path}/", "").splitlines() == [
        "scontrol --oneliner show node gpu03",
        "squeue --noheader --jobs 40120_3 --format=%L",
    ]


UNREACHABLE = (
    "echo 'slurm_load_node error: Unable to contact slurm controller (connect failure)' >&2; exit 1"
)


@pytest.mark.fault
@pytest.mark.parametrize(
    ("scontrol", "squeue", "problem"),
    [
        (UNREACHABLE, "echo 1:00", "exit code 1, .*Unable to contact slurm controller"),
        (says("Node gpu03 not found"), "echo 1:00", "Node gpu03 not found"),
        (node("IDLE"), "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1",
         "Invalid job id"),
        (node("IDLE"), "", "squeue .*exit code 0, ''"),
        (node("IDLE"), "echo soon", "'soon'"),
        ("head -c 300000 /dev/zero", "echo 1:00", "scontrol .*exit code 0"),
        ("kill -9 $$", "echo 1:00", "exit code -9"),
    ],
    ids=["no controller", "unknown node", "unknown job", "nothing", "no time", "much", "killed"],
)  # fmt: skip
def test_slurm_that_says_nothing_of_use_is_an_error_and_no_notice(
    scontrol: str, squeue: str, problem: str, commands: Put
) -> None:
    commands(scontrol, squeue)
    with pytest.raises(PeerError, match=problem):
        asked().read()


@pytest.mark.fault
def test_slurm_that_hangs_is_left_with_what_it_has_started(tmp_path: Path, commands: Put) -> None:
    """As scontrol does whose controller takes its call and does not answer."""
    commands(f"sleep 600 & echo $! > {tmp_path}/child; wait", "echo 1:00")
    with pytest.raises(PeerError, match=r"scontrol gave no answer within 0\.5 s"):
        asked(timeout_s=0.5).read()
    child = Path(f"/proc/{(tmp_path / 'child').read_text().strip()}/stat")
    end = time.monotonic() + 60
    while child.exists() and " Z " not in child.read_text():
        assert time.monotonic() < end, "its child lives"
        time.sleep(0.02)
    commands(node("IDLE+DRAIN"), "echo 1:00:00")
    assert asked().read() == {"slurm drain of gpu03": None}


@pytest.mark.fault
def test_missing_commands_are_said_once_and_end_nothing(
    tmp_path: Path, commands: Put, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a container without Slurm's programs. A notice stands until Slurm takes it back."""
    caplog.set_level(logging.INFO)
    told: list[str] = []
    watch = NoticeWatch(
        NoticeSource("slurm"), asked(), lambda name, left_s: told.append(name),
        lambda name: told.append(f"not {name}"), LONGEST_S,
    )  # fmt: skip
    commands(node("IDLE+DRAIN"), "echo 1:00:00")
    watch.look()
    monkeypatch.setenv("PATH", "/nowhere")
    assert [watch.look() for _ in range(3)] == [LONGEST_S] * 3
    assert caplog.text.count("gives no answer: scontrol: No such file or directory") == 1
    assert told == ["slurm drain of gpu03"]
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    commands(node("IDLE"), "echo 1:00:00")
    watch.look()
    assert told == ["slurm drain of gpu03", "not slurm drain of gpu03"]


@pytest.mark.parametrize("missing", ["SLURMD_NODENAME", "SLURM_JOB_ID"])
def test_what_is_no_job_of_slurm_has_no_notices_of_slurm(missing: str) -> None:
    environment = {name: value for name, value in TASK.items() if name != missing}
    with pytest.raises(UsageError, match="by srun or sbatch, or leave this source out"):
        SlurmNotice(300.0, environment)
