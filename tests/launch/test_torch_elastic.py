"""The contract with torch's private hooks, and a host's set of workers."""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing.context import ForkServerProcess
from multiprocessing.synchronize import Condition, Event
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import MultiprocessContext, SubprocessContext
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from scalai.core.errors import RefusedError
from scalai.core.messages.worker_messages import Imports
from scalai.launch.agent.torch_elastic import (
    GroupPlacement,
    WorkerSet,
    WorkersOutcome,
    self_check,
    wait_until_warm,
    warm_up,
)
from scalai.launch.agent.worker_group import write_preload
from support.agents import worker_home
from support.waiting import wait_until

DEADLINE_S = 120.0
LATER = "colorsys"
"""A module that nothing else imports."""
SCRIPT = """
import multiprocessing, os, sys, time
folder, how = sys.argv[1:3]
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR",
         "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE", "MINE")
if how == "stubborn":
    import signal
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open(f"{folder}/{os.environ['RANK']}.new", "w") as file:
    told = [os.environ.get(name, "-") for name in names] + [multiprocessing.get_start_method()]
    file.write("\\n".join([*told, str(os.getpid())]))
os.rename(f"{folder}/{os.environ['RANK']}.new", f"{folder}/{os.environ['RANK']}")
if how == "done":
    sys.exit(0)
if how == "fails" and os.environ["LOCAL_RANK"] == "1":
    sys.exit(7)
time.sleep(600)
"""


# ------------------------------------------------------------------ the contract


def test_the_installed_torch_has_the_hooks() -> None:
    self_check()


def other(self: object, something: int) -> None: ...


@pytest.mark.parametrize(
    ("owner", "name", "hook", "why"),
    [
        (LocalElasticAgent, "_initialize_workers", other, r"takes .*something.*install those"),
        (LocalElasticAgent, "_assign_worker_ranks", other, r"takes .*something.*install those"),
        (LocalElasticAgent, "_set_local_rank_env", other, r"takes .*something.*install those"),
        (LocalElasticAgent, "_monitor_workers", other, r"takes .*something.*install those"),
        (LocalElasticAgent, "_monitor_workers", None, "takes None"),
        (SubprocessContext, "_close", other, "does not take"),
        (MultiprocessContext, "__init__", other, "has no _worker_finished_event"),
    ],
)
def test_a_torch_whose_hook_differs_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, hook: object, why: str
) -> None:
    monkeypatch.setattr(owner, name, hook)
    place = owner.__name__ if name == "__init__" else rf"{owner.__name__}\.{name}"
    with pytest.raises(RefusedError, match=f"{place} {why}"):
        self_check()


@pytest.mark.parametrize(
    ("kind", "part"),
    [(Event, "_flag"), (Event, "_cond"), (Condition, "_sleeping_count"),
     (Condition, "_wait_semaphore")],
)  # fmt: skip
def test_a_python_whose_event_is_made_of_other_parts_is_refused(
    monkeypatch: pytest.MonkeyPatch, kind: Any, part: str
) -> None:
    init = kind.__init__

    def lacking(self: object, *arguments: object, **named: object) -> None:
        init(self, *arguments, **named)
        delattr(self, part)

    monkeypatch.setattr(kind, "__init__", lacking)
    with pytest.raises(RefusedError, match=rf"Event has no (_cond\.)?{part}\. .*install those"):
        self_check()


# ------------------------------------------------------------------ workers


@pytest.fixture(scope="module")
def warm_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Start the fork server of warm workers. Gives the folder of what it was told."""
    order = tmp_path_factory.mktemp("warm") / "preload.json"
    with pytest.MonkeyPatch.context() as environment:  # agents of other tests inherit it
        environment.setenv("SCALAI_PRELOAD", str(order))
        environment.setenv("SCALAI_AGENT_PID", str(os.getpid()))
        imports = Imports(("json",), tuple(sys.path))
        warm_up(str(write_preload(order, imports, is_last=False)))
        # It may have read the first order by now, or not.
        write_preload(order, replace(imports, modules=("json", LATER)), is_last=True)
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


@dataclass(frozen=True)
class Host:
    """A set of workers, and the folder that they get as first argument."""

    workers: WorkerSet
    folder: Path

    def start(
        self, placed: GroupPlacement, how: str = "", *, warm: bool, script: str = SCRIPT
    ) -> None:
        path = self.folder / "script.py"
        path.write_text(script)
        self.workers.start(placed, [str(path), str(self.folder), how], warm=warm)

    def told(self, rank: int) -> list[str]:
        """Wait for what a worker wrote."""
        wait_until((self.folder / str(rank)).exists, f"rank {rank} says something")
        return (self.folder / str(rank)).read_text().split("\n")

    def pid(self, rank: int) -> int:
        return int(self.told(rank)[-1])

    def outcome(self) -> WorkersOutcome:
        """Wait for the workers' end."""
        found: list[WorkersOutcome | None] = []

        def has_ended() -> bool:
            found.append(self.workers.poll())
            return found[-1] is not None

        wait_until(has_ended, "the workers end")
        assert found[-1] is not None
        return found[-1]

    def stop_the_stubborn(self, warm: bool) -> None:
        """Start workers that ignore SIGTERM, and stop them."""
        self.start(place(), "stubborn", warm=warm)
        pids = [self.pid(rank) for rank in (2, 3)]
        self.workers.stop(1)
        assert not [pid for pid in pids if psutil.pid_exists(pid)]


@pytest.fixture
def host(tmp_path: Path, warm_server: Path) -> Iterator[Host]:
    logs = DefaultLogsSpecs(log_dir=str(tmp_path / "logs"))
    made = Host(WorkerSet("job", "default", logs), tmp_path)
    yield made
    made.workers.stop(1)


both = pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
"""With workers that are started anew, and with workers that are forked."""


def test_forked_workers_are_counted_as_such_and_their_server_is_not(
    host: Host, warm_server: Path
) -> None:
    host.start(elastic(warm=True), "waits", warm=True)
    forked = [psutil.Process(pid) for pid in host.workers.pids().values()]
    assert [worker_home(process) for process in forked] == [warm_server, warm_server]
    (server,) = {process.parent() for process in forked}
    assert server is not None and worker_home(server) is None


def test_a_server_imports_what_a_worker_has_imported_later(host: Host) -> None:
    script = f"import sys; sys.exit(0 if {LATER!r} in sys.modules else 7)"
    host.start(place(1), warm=True, script=script)
    assert host.outcome() == WorkersOutcome(())


@both
def test_workers_know_their_place_and_leave(host: Host, warm: bool) -> None:
    host.start(place(round=3), "done", warm=warm)
    for local, rank in enumerate((2, 3)):
        assert host.told(rank)[:-1] == [
            str(rank), str(local), "4", "2", "1", "127.0.0.1", "29876", "2", "True", "yes",
            multiprocessing.get_start_method(),
        ]  # fmt: skip
    assert host.outcome() == WorkersOutcome(())
    assert host.workers.poll() is None, "an end is told once"


def sleepers(event: Any) -> int:
    """Return how many processes wait at the event that lets finished workers go."""
    return int(event._condition._sleeping_count.get_value())


def test_a_worker_that_is_killed_when_it_has_finished_holds_up_nobody(host: Host) -> None:
    host.start(place(1, outlives_signals=True), "done", warm=True)
    process = psutil.Process(host.pid(2))
    context: Any = host.workers._pcontext
    event = context._worker_finished_event
    wait_until(lambda: sleepers(event) == 1, "it waits to be let go")
    process.suspend()

    def kill() -> None:
        wait_until(lambda: event._flag.get_value() == 1, "it is let go")
        process.kill()

    killing = threading.Thread(target=kill)
    killing.start()
    assert host.outcome().failures == ("rank 2 was killed by SIGKILL",)
    killing.join(DEADLINE_S)


@pytest.mark.fault
def test_a_forked_worker_runs_nothing_of_its_agents_main_module(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = ModuleType("__main__")
    main.__file__ = str(host.folder / "agent.py")
    (host.folder / "agent.py").write_text(f"open({str(host.folder / 'ran')!r}, 'w').close()\n")
    monkeypatch.setitem(sys.modules, "__main__", main)
    host.start(place(1), "done", warm=True)
    assert host.outcome() == WorkersOutcome(())
    assert (host.folder / "2").exists() and not (host.folder / "ran").exists()
    assert sys.modules["__main__"] is main


@both
def test_a_worker_that_fails_leaves_the_others_what_they_hold(host: Host, warm: bool) -> None:
    host.start(elastic(warm), "fails", warm=warm)
    pid = host.pid(2)
    assert host.outcome().failures == ("rank 3 exited with 7",)
    assert psutil.pid_exists(pid) == warm, "a plain job's workers end together"
    host.workers.stop()
    assert not psutil.pid_exists(pid)


@pytest.mark.fault
@both
def test_workers_that_outlive_signals_are_ended_by_the_agents_own_means(
    host: Host, warm: bool, caplog: pytest.LogCaptureFixture
) -> None:
    script = (
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})\n"
        "sys.exit(7) if os.environ['LOCAL_RANK'] == '1' else time.sleep(600)\n"
    )
    host.start(place(outlives_signals=True), warm=warm, script=script)
    pids = host.workers.pids().values()
    assert host.outcome().failures == ("rank 3 exited with 7",)
    host.workers.stop()
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    assert "via SIGTERM" not in caplog.text  # for whose effect torch waits half a minute


@pytest.mark.fault
def test_compilers_that_a_worker_has_started_end_with_it(host: Host) -> None:
    """As ninja starts them: each in a group of its own."""
    script = (
        "import os, subprocess, sys, time\n"
        "if os.getsid(0) != os.getpid():\n"
        "    os.setsid()\n"
        "compiler = subprocess.Popen(['sleep', '600'], process_group=0)\n"
        "path = sys.argv[1] + '/compiler' + os.environ['LOCAL_RANK']\n"
        "open(path + '.new', 'w').write(str(compiler.pid))\n"
        "os.rename(path + '.new', path)\n"
        "time.sleep(600)\n"
    )
    host.start(place(outlives_signals=True), warm=False, script=script)
    files = [host.folder / f"compiler{rank}" for rank in range(2)]
    wait_until(lambda: all(file.exists() for file in files), "they build")
    compilers = [psutil.Process(int(file.read_text())) for file in files]
    host.workers.stop()
    assert not psutil.wait_procs(compilers, 30)[1]


@pytest.mark.fault
@both
def test_what_a_script_has_raised_is_in_the_reason_of_its_failure(host: Host, warm: bool) -> None:
    script = "raise FileNotFoundError('no\\nsuch data')\n"
    host.start(place(1, outlives_signals=True), warm=warm, script=script)
    (failure,) = host.outcome().failures
    assert failure == "rank 2: FileNotFoundError: no such data"


@both
def test_a_worker_that_is_killed_is_named_with_its_signal(host: Host, warm: bool) -> None:
    host.start(elastic(warm), "stays", warm=warm)
    pids = {rank: host.pid(rank) for rank in (2, 3)}
    assert host.workers.pids() == {0: pids[2], 1: pids[3]}
    os.kill(pids[2], signal.SIGKILL)
    assert host.outcome().failures == ("rank 2 was killed by SIGKILL",)
    host.workers.stop()
    assert host.workers.pids() == {}


@both
def test_stopping_ends_workers_that_do_not_listen_and_others_may_follow(
    host: Host, warm: bool
) -> None:
    host.stop_the_stubborn(warm)
    assert host.workers.poll() is None
    host.start(place(1, round=2, first=0), "done", warm=warm)
    assert host.told(0)[2] == "1"
    assert host.outcome() == WorkersOutcome(())


@pytest.mark.fault
@both
def test_a_worker_that_cannot_be_started_leaves_none_of_the_others(
    host: Host, warm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        host.start(elastic(warm), "waits", warm=warm)
    (first,) = begun
    assert first.wait(DEADLINE_S) == -signal.SIGKILL
    assert host.workers.poll() is None and host.workers.pids() == {}


def test_a_torch_whose_agent_takes_no_time_to_shut_down_ends_workers_in_that_time(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As before torch 2.12."""
    shut_down = LocalElasticAgent._shutdown

    def older(self: LocalElasticAgent, death_sig: signal.Signals = signal.SIGTERM) -> None:
        shut_down(self, death_sig)

    monkeypatch.setattr(LocalElasticAgent, "_shutdown", older)
    self_check()
    host.stop_the_stubborn(warm=False)


def test_stopping_nothing_is_nothing(host: Host) -> None:
    host.workers.stop()
    assert host.workers.poll() is None and host.workers.pids() == {}
