"""The contract with torch's private hooks, and a host's set of workers."""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from multiprocessing.context import ForkServerProcess
from multiprocessing.synchronize import Condition, Event
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import MultiprocessContext
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from scalai.core.errors import RefusedError
from scalai.core.messages.worker_messages import Imports
from scalai.launch.agent.torch_elastic import (
    GroupPlacement,
    Outcome,
    WorkerSet,
    self_check,
    wait_until_warm,
    warm_up,
)
from scalai.launch.agent.worker_group import write_preload
from support.agents import worker_home
from support.coordinator_line import wait_until

DEADLINE_S = 120.0
SCRIPT = """
import multiprocessing, os, sys, time
folder, how = sys.argv[1:3]
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR",
         "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE", "MINE")
with open(f"{folder}/{os.environ['RANK']}.new", "w") as file:
    told = [os.environ.get(name, "-") for name in names] + [multiprocessing.get_start_method()]
    file.write("\\n".join([*told, str(os.getpid())]))
os.rename(f"{folder}/{os.environ['RANK']}.new", f"{folder}/{os.environ['RANK']}")
if how == "done":
    sys.exit(0)
if how == "fails" and os.environ["LOCAL_RANK"] == "1":
    sys.exit(7)
if how == "stubborn":
    import signal
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open(f"{folder}/{os.environ['RANK']}.ready", "w").close()
time.sleep(600)
"""


# ------------------------------------------------------------------ the contract


def test_the_installed_torch_has_the_hooks() -> None:
    self_check()


@pytest.mark.parametrize(
    "name",
    [
        "_initialize_workers",
        "_assign_worker_ranks",
        "_set_local_rank_env",
        "_monitor_workers",
    ],
)
def test_a_torch_whose_hook_differs_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def other(self: object, something: int) -> None: ...

    monkeypatch.setattr(LocalElasticAgent, name, other)
    with pytest.raises(RefusedError, match=rf"Agent\.{name} takes .*something.*install those"):
        self_check()


def test_a_torch_without_a_hook_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalElasticAgent, "_monitor_workers", None)
    with pytest.raises(RefusedError, match="_monitor_workers takes None"):
        self_check()


def test_a_torch_whose_finished_workers_wait_elsewhere_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def other(self: object) -> None: ...

    monkeypatch.setattr(MultiprocessContext, "__init__", other)
    with pytest.raises(RefusedError, match="MultiprocessContext has no _worker_finished_event"):
        self_check()


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        (Event, "_flag"),
        (Event, "_cond"),
        (Condition, "_sleeping_count"),
        (Condition, "_wait_semaphore"),
    ],
)
def test_a_python_whose_event_is_made_of_other_parts_is_refused(
    monkeypatch: pytest.MonkeyPatch, kind: Any, part: str
) -> None:
    init = kind.__init__

    def other(self: object, *arguments: object, **named: object) -> None:
        init(self, *arguments, **named)
        delattr(self, part)

    monkeypatch.setattr(kind, "__init__", other)
    with pytest.raises(RefusedError, match=rf"Event has no (_cond\.)?{part}\. .*install those"):
        self_check()


# ------------------------------------------------------------------ workers


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[WorkerSet]:
    workers = WorkerSet("job", "default", DefaultLogsSpecs(log_dir=str(tmp_path / "logs")))
    yield workers
    workers.stop(1)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture(scope="module")
def warm_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Start the fork server of warm workers. Gives the folder of what it was told."""
    order = tmp_path_factory.mktemp("warm") / "preload.json"
    with pytest.MonkeyPatch.context() as environment:  # agents of other tests inherit it
        environment.setenv("SCALAI_PRELOAD", str(order))
        environment.setenv("SCALAI_AGENT_PID", str(os.getpid()))
        warm_up(str(write_preload(order, Imports(("json",), tuple(sys.path)))))
        wait_until_warm()
        yield order.parent


@pytest.mark.fault
def test_a_server_whose_forks_cannot_use_devices_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where an import begins CUDA: torch says so in the forks."""
    text = "import torch\ntorch.cuda._is_in_bad_fork = lambda: True\n"
    (tmp_path / "begins_cuda.py").write_text(text)
    monkeypatch.setenv("SCALAI_PRELOAD", "")
    monkeypatch.setenv("SCALAI_AGENT_PID", "")
    imports = Imports(("torch", "begins_cuda"), (str(tmp_path), *sys.path))
    warm_up(str(write_preload(tmp_path / "preload.json", imports)))
    with pytest.raises(RefusedError, match="uses CUDA as it is imported, and no fork can"):
        wait_until_warm()


def place(
    workers: int = 2, *, round: int = 1, first: int = 2, outlives_signals: bool = False
) -> GroupPlacement:
    """Return a placement as the second of two hosts."""
    return GroupPlacement(
        round=round, group_rank=1, group_world_size=2, first_rank=first, local_world_size=workers,
        world_size=first + workers, master_addr="127.0.0.1", master_port=29876,
        environment={"MINE": "yes", "SCALAI_AGENT_PID": str(os.getpid())},
        outlives_signals=outlives_signals,
    )  # fmt: skip


def elastic(warm: bool) -> GroupPlacement:
    """Return a placement; only workers of elastic jobs are forked, and those outlive signals."""
    return place(outlives_signals=warm)


def sleepers(event: Any) -> int:
    """Return how many processes wait at the event that lets finished workers go."""
    return int(event._condition._sleeping_count.get_value())


def reported(folder: Path, rank: int) -> list[str]:
    """Wait for what a worker wrote."""
    wait_until((folder / str(rank)).exists, f"rank {rank} says something")
    return (folder / str(rank)).read_text().split("\n")


def outcome(workers: WorkerSet) -> Outcome:
    """Wait for the workers' end."""
    found: list[Outcome | None] = []

    def has_ended() -> bool:
        found.append(workers.poll())
        return found[-1] is not None

    wait_until(has_ended, "the workers end")
    assert found[-1] is not None
    return found[-1]


def both(function: "pytest.MarkDecorator | object") -> object:
    """Run a test with workers that are started anew, and with workers that are forked."""
    return pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])(function)


def test_forked_workers_are_counted_as_such_and_their_server_is_not(
    workers: WorkerSet, script: Path, tmp_path: Path, warm_server: Path
) -> None:
    workers.start(elastic(warm=True), [str(script), str(tmp_path), "waits"], warm=True)
    forked = [psutil.Process(pid) for pid in workers.pids().values()]
    assert [worker_home(process) for process in forked] == [warm_server, warm_server]
    (server,) = {process.parent() for process in forked}
    assert server is not None and worker_home(server) is None


@both
def test_workers_know_their_place_and_leave(
    workers: WorkerSet, script: Path, tmp_path: Path, warm_server: Path, warm: bool
) -> None:
    workers.start(place(round=3), [str(script), str(tmp_path), "done"], warm=warm)
    for local, rank in enumerate((2, 3)):
        assert reported(tmp_path, rank)[:-1] == [
            str(rank), str(local), "4", "2", "1", "127.0.0.1", "29876", "2", "True", "yes",
            multiprocessing.get_start_method(),
        ]  # fmt: skip
    assert outcome(workers) == Outcome(())
    assert workers.poll() is None, "an end is told once"


def test_a_worker_that_is_killed_when_it_has_finished_holds_up_nobody(
    workers: WorkerSet, script: Path, tmp_path: Path, warm_server: Path
) -> None:
    workers.start(place(1, outlives_signals=True), [str(script), str(tmp_path), "done"], warm=True)
    process = psutil.Process(int(reported(tmp_path, 2)[-1]))
    context: Any = workers._pcontext
    event = context._worker_finished_event
    wait_until(lambda: sleepers(event) == 1, "it waits to be let go")
    process.suspend()

    def kill() -> None:
        wait_until(lambda: event._flag.get_value() == 1, "it is let go")
        process.kill()

    killing = threading.Thread(target=kill)
    killing.start()
    assert outcome(workers).failures == ("rank 2 was killed by SIGKILL",)
    killing.join(DEADLINE_S)


@pytest.mark.fault
def test_a_forked_worker_runs_nothing_of_its_agents_main_module(
    workers: WorkerSet,
    script: Path,
    tmp_path: Path,
    warm_server: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    main = ModuleType("__main__")
    main.__file__ = str(tmp_path / "agent.py")
    (tmp_path / "agent.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    monkeypatch.setitem(sys.modules, "__main__", main)
    workers.start(place(1), [str(script), str(tmp_path), "done"], warm=True)
    assert outcome(workers) == Outcome(())
    assert (tmp_path / "2").exists() and not (tmp_path / "ran").exists()
    assert sys.modules["__main__"] is main


@both
def test_a_worker_that_fails_leaves_the_others_what_they_hold(
    workers: WorkerSet, script: Path, tmp_path: Path, warm_server: Path, warm: bool
) -> None:
    workers.start(elastic(warm), [str(script), str(tmp_path), "fails"], warm=warm)
    pid = int(reported(tmp_path, 2)[-1])
    assert outcome(workers).failures == ("rank 3 exited with 7",)
    assert psutil.pid_exists(pid) == warm, "a plain job's workers end together"
    workers.stop()
    assert not psutil.pid_exists(pid)


@pytest.mark.fault
@both
def test_workers_that_outlive_signals_are_ended_by_the_agents_own_means(
    workers: WorkerSet,
    tmp_path: Path,
    warm_server: Path,
    warm: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})\n"
        "sys.exit(7) if os.environ['LOCAL_RANK'] == '1' else time.sleep(600)\n"
    )
    workers.start(place(outlives_signals=True), [str(script)], warm=warm)
    pids = workers.pids().values()
    assert outcome(workers).failures == ("rank 3 exited with 7",)
    workers.stop()
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    assert "via SIGTERM" not in caplog.text  # for whose effect torch waits half a minute


@pytest.mark.fault
def test_compilers_that_a_worker_has_started_end_with_it(
    workers: WorkerSet, tmp_path: Path
) -> None:
    """As ninja starts them: each in a group of its own."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, subprocess, sys, time\n"
        "if os.getsid(0) != os.getpid():\n"
        "    os.setsid()\n"
        "compiler = subprocess.Popen(['sleep', '600'], process_group=0)\n"
        "path = sys.argv[1] + '/compiler' + os.environ['LOCAL_RANK']\n"
        "open(path + '.new', 'w').write(str(compiler.pid))\n"
        "os.rename(path + '.new', path)\n"
        "time.sleep(600)\n"
    )
    workers.start(place(outlives_signals=True), [str(script), str(tmp_path)], warm=False)
    files = [tmp_path / f"compiler{rank}" for rank in range(2)]
    wait_until(lambda: all(file.exists() for file in files), "they build")
    compilers = [psutil.Process(int(file.read_text())) for file in files]
    workers.stop()
    assert not psutil.wait_procs(compilers, 30)[1]


@pytest.mark.fault
@both
def test_what_a_script_has_raised_is_in_the_reason_of_its_failure(
    workers: WorkerSet, tmp_path: Path, warm_server: Path, warm: bool
) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise FileNotFoundError('no\\nsuch data')\n")
    workers.start(place(1, outlives_signals=True), [str(script)], warm=warm)
    (failure,) = outcome(workers).failures
    assert failure == "rank 2 exited with 1: FileNotFoundError: no such data"


@both
def test_a_worker_that_is_killed_is_named_with_its_signal(
    workers: WorkerSet, script: Path, tmp_path: Path, warm_server: Path, warm: bool
) -> None:
    workers.start(elastic(warm), [str(script), str(tmp_path), "stays"], warm=warm)
    pids = {rank: int(reported(tmp_path, rank)[-1]) for rank in (2, 3)}
    assert workers.pids() == {0: pids[2], 1: pids[3]}
    os.kill(pids[2], signal.SIGKILL)
    assert outcome(workers).failures == ("rank 2 was killed by SIGKILL",)
    workers.stop()
    assert workers.pids() == {}


@both
def test_stopping_ends_workers_that_do_not_listen_and_others_may_follow(
    workers: WorkerSet, script: Path, tmp_path: Path, warm_server: Path, warm: bool
) -> None:
    workers.start(place(), [str(script), str(tmp_path), "stubborn"], warm=warm)
    pids = [int(reported(tmp_path, rank)[-1]) for rank in (2, 3)]
    for rank in (2, 3):
        wait_until((tmp_path / f"{rank}.ready").exists, "they do not listen")
    workers.stop(1)
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    assert workers.poll() is None
    for rank in (2, 3):
        (tmp_path / str(rank)).unlink()
    workers.start(place(1, round=2, first=0), [str(script), str(tmp_path), "done"], warm=warm)
    assert reported(tmp_path, 0)[2] == "1"
    assert outcome(workers) == Outcome(())


@pytest.mark.fault
@both
def test_a_worker_that_cannot_be_started_leaves_none_of_the_others(
    workers: WorkerSet, script: Path, tmp_path: Path, warm_server: Path, warm: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Nobody would end it, and it would keep its device's memory."""
    owner: Any = ForkServerProcess if warm else SubprocessHandler
    name = "_Popen" if warm else "_popen"
    begin, begun = getattr(owner, name), list[Any]()

    def only_once(*arguments: Any) -> Any:
        if begun:
            raise EOFError if warm else BlockingIOError(11, "Resource temporarily unavailable")
        begun.append(begin(*arguments))
        return begun[0]

    monkeypatch.setattr(owner, name, staticmethod(only_once) if warm else only_once)
    with pytest.raises(OSError, match=r"cannot be started|temporarily unavailable"):
        workers.start(elastic(warm), [str(script), str(tmp_path), "waits"], warm=warm)
    (first,) = begun

    def has_ended() -> bool:
        try:
            return psutil.Process(first.pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    wait_until(has_ended, "the one that was started has ended")
    assert first.wait(DEADLINE_S) == -signal.SIGKILL
    assert workers.poll() is None and workers.pids() == {}


def test_a_torch_whose_agent_takes_no_time_to_shut_down_ends_workers_in_that_time(
    workers: WorkerSet, script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As before torch 2.12."""
    shut_down = LocalElasticAgent._shutdown

    def older(self: LocalElasticAgent, death_sig: signal.Signals = signal.SIGTERM) -> None:
        shut_down(self, death_sig)

    monkeypatch.setattr(LocalElasticAgent, "_shutdown", older)
    self_check()
    workers.start(place(), [str(script), str(tmp_path), "stubborn"], warm=False)
    pids = [int(reported(tmp_path, rank)[-1]) for rank in (2, 3)]
    for rank in (2, 3):
        wait_until((tmp_path / f"{rank}.ready").exists, "they do not listen")
    workers.stop(1)
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


def test_stopping_nothing_is_nothing(workers: WorkerSet) -> None:
    workers.stop()
    assert workers.poll() is None and workers.pids() == {}
