"""A host's workers: how they start, what is seen of them, and what is left when they are killed."""

import errno
import logging
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from fcntl import F_DUPFD, fcntl
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import psutil
import pytest
from torch.utils.cpp_extension import _get_build_directory

from scalai.core.errors import PeerError, RefusedError
from scalai.core.host.actions import StartGroup
from scalai.core.messages.shared import JsonText
from scalai.core.messages.worker_messages import (
    AtBrink,
    Hello,
    Imports,
    RankFinished,
    Welcome,
    WorkerRequest,
)
from scalai.launch.agent import torch_elastic, worker_group
from scalai.launch.agent.extension_locks import (
    LOCK,
    PATIENCE_S,
    Lock,
    WorkersLocks,
    extensions_root,
    find_locks,
)
from scalai.launch.agent.progress import KNOWN, Progress, ProgressWatch
from scalai.launch.agent.torch_elastic import GroupPlacement
from scalai.launch.agent.worker_group import (
    NCCL_ERRORS,
    THREADS,
    THREADS_BY_DEFAULT,
    WorkerCalls,
    WorkerGroups,
    offer,
    room_beside,
)
from scalai.launch.config.flags import parse_options
from scalai.launch.config.job_spec import JobSpec
from scalai.runtime.agent_folder import call_agent
from scalai.runtime.processes import private_bytes
from scalai.vfs.fuse import NAMES_S
from support.stopping import stop
from support.wire_words import workers as wanted

DEADLINE_S = 60.0
CORES = len(os.sched_getaffinity(0))
GPT = "pretrain_gpt.py --micro-batch-size 1 --num-attention-heads 4 --num-layers 4"


# ------------------------------------------------------------------ forked, or cold


class Workers:
    """Notes how its processes would be started."""

    def __init__(self) -> None:
        self.warm: list[bool] = []
        self.places: list[GroupPlacement] = []

    def pids(self) -> dict[int, int]:
        return {}

    def poll(self) -> None:
        return None

    def start(self, place: GroupPlacement, arguments: Any, *, warm: bool) -> None:
        self.warm.append(warm)
        self.places.append(place)


Starter = Callable[..., tuple[WorkerGroups, Workers]]


@pytest.fixture
def groups(tmp_path: Path) -> Starter:
    """Return groups of workers of a job, and how they were started."""
    tmp_path.chmod(0o700)

    def made(*flags: str, script: str = "script.py") -> tuple[WorkerGroups, Workers]:
        noted: Any = Workers()
        given = ["--nproc-per-node", "1", *flags, *script.split()]
        return WorkerGroups(JobSpec.read(parse_options(given)), tmp_path, lambda: noted), noted

    return made


@pytest.mark.fault
def test_workers_are_forked_once_the_server_has_imported(
    groups: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = list[str]()
    monkeypatch.setattr(worker_group, "warm_up", started.append)
    monkeypatch.setattr(worker_group, "wait_until_warm", lambda: None)
    made, workers = groups()
    made.start(wanted())
    for is_last in (False, True):
        made.warm_up(Imports((), ()), is_last=is_last)
        made.start(wanted(2))
    made.wait_until_warm()
    made.start(wanted(3))
    assert workers.warm == [False, False, False, True] and len(started) == 1


def test_a_server_whose_forks_cannot_use_devices_is_done_without(
    groups: Starter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> None:
        raise RefusedError("no fork can use CUDA")

    monkeypatch.setattr(worker_group, "warm_up", lambda order: None)
    monkeypatch.setattr(worker_group, "wait_until_warm", refuse)
    made, workers = groups()
    made.warm_up(Imports((), ()), is_last=True)
    made.wait_until_warm()
    made.start(wanted())
    assert workers.warm == [False] and "event=cold" in caplog.text


@pytest.mark.parametrize("given", [None, *NCCL_ERRORS])
def test_workers_of_an_elastic_job_outlive_a_collective_that_fails(
    groups: Starter, given: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless a person has said what torch does then."""
    for name in NCCL_ERRORS:
        monkeypatch.delenv(name, raising=False)
    if given is not None:
        monkeypatch.setenv(given, "1")
    config = tmp_path / "elastic.toml"
    config.write_text('[degrees]\n1 = "tp1"\n')
    found = []
    for flags in (("--elastic", str(config)), ()):
        made, workers = groups(*flags)
        made.start(wanted())
        found.append(workers.places[0].environment)
    assert found[0].get(NCCL_ERRORS[0]) == ("0" if given is None else None)
    assert NCCL_ERRORS[0] not in found[1], "nobody writes the state of a plain job"


@pytest.mark.fault
def test_forks_see_the_devices_that_their_agent_sees_now(
    groups: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    made, workers = groups()
    for number, devices in enumerate([None, "GPU-aa,GPU-bb", "GPU-bb"], 1):
        if devices is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
        made.start(wanted(number))
    found = [place.environment.get("CUDA_VISIBLE_DEVICES") for place in workers.places]
    assert found == [None, "GPU-aa,GPU-bb", "GPU-bb"]


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, [None, str(CORES)]),
        ({THREADS: "1", THREADS_BY_DEFAULT: "1"}, [None, str(CORES)]),
        ({THREADS: "3"}, [None, None]),
    ],
    ids=["nobody says", "as torchrun", "a person says"],
)
def test_workers_with_state_in_host_memory_have_its_cores(
    groups: Starter,
    environment: dict[str, str],
    found: list[str | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in (THREADS, THREADS_BY_DEFAULT):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    made, workers = groups()
    made.start(wanted())
    made.start(replace(wanted(2), offload="optimizer"))
    assert [place.environment.get(THREADS) for place in workers.places] == found


@pytest.mark.parametrize(("script", "tells"), [("script.py", True), (GPT, False)])
def test_a_job_that_builds_no_extension_tells_of_no_others_build(
    groups: Starter, monkeypatch: pytest.MonkeyPatch, script: str, tells: bool
) -> None:
    told: list[bool] = []
    monkeypatch.setattr(WorkersLocks, "tell_of_waits", lambda locks: told.append(True))
    made, _ = groups(script=script)
    made.start(wanted()).poll()
    assert bool(told) == tells


# ------------------------------------------------------------------ their calls


WELCOME = Welcome(
    {"tp": 1}, 2, 0, True, True, None, False, JsonText.of({"large": 1 << 100}), JsonText.of({})
)


def answer(future: "Future[Any]", request: WorkerRequest) -> None:
    if isinstance(request, RankFinished):
        future.set_exception(PeerError("this round of workers has ended."))
    else:
        future.set_result(WELCOME)


@pytest.mark.fault
def test_names_of_any_length_leave_a_socket_that_is_found_and_who_goes_away_is_noticed(
    tmp_path: Path,
) -> None:
    folder = tmp_path / ("job-" * 40) / ("host-" * 40) / "agent"
    folder.mkdir(mode=0o700, parents=True)
    assert len(str(folder / "agent.sock")) > 107
    gone: queue.Queue[tuple[int, int]] = queue.Queue()
    calls = WorkerCalls(folder, lambda work: work(), answer, lambda *who: gone.put(who))
    silent, channel = call_agent(str(folder)), call_agent(str(folder))
    welcome = channel.call(Hello(rank=3, round=7))
    assert welcome == WELCOME and welcome.facts.value() == {"large": 1 << 100}
    with pytest.raises(PeerError, match="this round of workers has ended"):
        channel.call(RankFinished(3, 7, 41))
    silent.close()
    channel.close()
    assert gone.get(timeout=DEADLINE_S) == (7, 3)
    calls.close()
    assert gone.empty(), "who has said nothing is nobody"
    assert not (folder / "agent.sock").exists()
    with pytest.raises(PeerError):
        call_agent(str(folder))


# ------------------------------------------------------------------ their progress


STALL_S = 60.0


class Training:
    """Ranks 2 and 3, whose round and steps the test sets; a clock that it moves."""

    def __init__(self) -> None:
        self.steps, self.now, self.is_within = {2: 41, 3: 41}, 1000.0, False
        self.round: Any = SimpleNamespace(
            number=1, ranks=range(2, 4), stepped={2, 3}, finished=set(), lost=set(),
            is_draining=False,
        )  # fmt: skip
        self.group: Any = SimpleNamespace(
            steps=lambda: dict(self.steps), pids=dict, are_within_steps=lambda: self.is_within
        )
        present: Any = self
        stacks: Any = SimpleNamespace(ask=lambda pids: None, where=((2, "here"),))
        self.watch = ProgressWatch("a", present, stacks, STALL_S, clock=lambda: self.now)

    def shown(self, wait_s: float = 1.0) -> tuple[list[int], int] | None:
        self.now += wait_s
        self.watch.watch()
        stalled = self.watch.stalled
        return None if stalled is None else (list(stalled.ranks), stalled.step)


@pytest.fixture
def stalled() -> Training:
    made = Training()
    assert made.shown() is None
    assert made.shown(STALL_S + 1) == ([2, 3], 41)
    return made


@pytest.mark.fault
@pytest.mark.parametrize("is_draining", [False, True])
def test_who_goes_on_is_shown_no_longer(stalled: Training, *, is_draining: bool) -> None:
    """On the way to a stop, too: who stands at it does not stand still."""
    stalled.round.is_draining = is_draining
    assert stalled.shown() == ([2, 3], 41)
    stalled.steps[3] = 42
    assert stalled.shown() == ([2], 41)
    stalled.steps[2] = 42
    assert stalled.shown() is None


@pytest.mark.fault
@pytest.mark.parametrize("is_draining", [False, True])
def test_who_is_gone_is_shown_no_longer(stalled: Training, *, is_draining: bool) -> None:
    stalled.round.is_draining = is_draining
    stalled.round.lost = {3}
    assert stalled.shown() == ([2], 41)
    stalled.round = None
    assert stalled.shown() is None


@pytest.mark.fault
def test_it_is_shown_whether_they_are_within_a_step_and_where_they_stand(stalled: Training) -> None:
    stalled.is_within = True
    stalled.shown()
    found = stalled.watch.stalled
    assert found is not None and found.is_within and found.where == ((2, "here"),)
    assert found.usual_s == 0.0, "no step of the round is known"


@pytest.mark.fault
def test_what_is_usual_is_known_after_some_steps_and_few_long_ones_change_nothing() -> None:
    progress, now = Progress(), 0.0
    progress.stalled_s({0: 0}, now)
    for step in range(1, 30):
        now += 400.0 if step in (1, 20) else 2.0 + 0.01 * (step % 3)
        progress.stalled_s({0: step}, now)
        assert (progress.usual_s > 0) == (step >= KNOWN)
    assert 2.0 <= progress.usual_s < 2.2 and progress.longest_s == 400.0
    progress.stalled_s({1: 30}, now)
    assert progress.usual_s == 0.0, "another round has other ranks"


@pytest.mark.fault
def test_how_far_all_are_is_seen_by_whoever_asks() -> None:
    training = Training()
    assert training.watch.seen is None
    training.steps[2] = 42
    training.shown()
    assert training.watch.seen == (1, 41)
    training.round.stepped = set()
    training.shown()
    assert training.watch.seen is None, "none has stepped in this round"
    training.round = None
    training.shown()
    assert training.watch.seen is None


# ------------------------------------------------------------------ workers on standby


MEGABYTES = 200
GONE = 2**22 + 1


@pytest.fixture
def worker() -> Iterator[int]:
    """Give a process that has some memory of its own."""
    script = f"block = bytearray(b'1') * ({MEGABYTES} << 20); print(1, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.kill()


def test_the_room_for_further_workers_is_measured(worker: int) -> None:
    action = StartGroup(wanted(2, 0, 3), is_standby=True, on_devices=True, brink=AtBrink(0, 0))
    room = room_beside([worker, os.getpid(), GONE], action, [7 << 30, 6 << 30])
    assert MEGABYTES << 20 <= private_bytes(worker) < (MEGABYTES + 50) << 20
    # This process allocates between two looks.
    assert abs(room.used - max(map(private_bytes, [worker, os.getpid()]))) < 16 << 20
    assert room.workers == 3 and room.device_free == 3 << 30, "two of them share a device"
    assert room.on_devices and room.brink and 0 < room.free <= psutil.virtual_memory().total
    nothing = room_beside([GONE], action, [])
    assert nothing.used == 0 and nothing.device_free is None


def test_what_is_on_standby_goes_first_when_memory_runs_out_with_what_it_has_started() -> None:
    script = "import os; from support.waiting import stay; os.fork(); "
    script += "os.write(1, b'%d\\n' % os.getpid()); stay()"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        pids = [int(process.stdout.readline()) for _ in range(2)]
        assert process.pid in pids
        adjustments = [Path(f"/proc/{pid}/oom_score_adj") for pid in pids]
        before = [path.read_text() for path in adjustments]
        offer([process.pid, GONE], is_standby=True)
        assert [path.read_text().strip() for path in adjustments] == ["1000", "1000"]
        offer([process.pid], is_standby=False)
        assert [path.read_text() for path in adjustments] == before != ["1000\n"] * 2
        os.killpg(process.pid, signal.SIGKILL)


# ------------------------------------------------------------------ killed workers


@pytest.mark.fault
@pytest.mark.parametrize(
    ("ends_s", "is_over"),
    [(0.3, False), (60.0, False), (60.0, True)],
    ids=["it ends", "it does not", "its agent ends"],
)
def test_a_killed_worker_whose_memory_the_kernel_still_holds_is_waited_for(
    ends_s: float, is_over: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where its device hangs; for ever it is not."""
    monkeypatch.setattr(torch_elastic, "GONE_REPORT_S", 0.1)
    monkeypatch.setattr(torch_elastic, "GONE_S", 30.0 if is_over else 1.5)
    began = time.monotonic()
    with subprocess.Popen(["sleep", str(ends_s)]) as process:
        with torch_elastic.awaited_ends([process.pid, 1 << 22], lambda: is_over):
            pass
        has_ended = process.poll() is not None
        process.kill()
    assert has_ended == (ends_s < 1) and time.monotonic() - began < 25
    assert (f"event=stuck pids={process.pid}" in caplog.text) == (not has_ended)


HOLD = """
import os, sys
from support.waiting import stay
os.open(sys.argv[1], os.O_CREAT | os.O_EXCL)
print("held", flush=True)
stay()
"""


@contextmanager
def holder(lock: Path) -> Iterator[subprocess.Popen[str]]:
    """Give a process that holds a lock as torch's FileBaton does."""
    lock.parent.mkdir(exist_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(lock)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate(timeout=DEADLINE_S)


@pytest.mark.fault
def test_what_a_killed_worker_held_is_removed_and_nothing_else(tmp_path: Path) -> None:
    mine, others, far, taken = (tmp_path / name / LOCK for name in ("m", "others", "far", "taken"))
    far.parent.mkdir()
    far.touch()  # another host builds there: no process of this one holds it
    locks = WorkersLocks(tmp_path)
    with holder(others), holder(mine) as worker, holder(taken) as second:
        locks.look([worker.pid, second.pid])
        for each in (worker, second):
            each.kill()
            os.waitid(os.P_PID, each.pid, os.WEXITED | os.WNOWAIT)
        locks.look([worker.pid])  # it is dead, and nobody has waited for it
        taken.unlink()
        with holder(taken):  # another process has taken it since
            locks.remove_left()
            found = [lock.exists() for lock in (mine, others, far, taken)]
    assert found == [False, True, True, True]


@pytest.mark.fault
def test_a_lock_is_seen_beside_files_that_come_and_go(tmp_path: Path) -> None:
    """Its holder closes another file after its files were listed, and before they are looked at."""
    over = threading.Event()

    def come_and_go() -> None:
        while not over.is_set():
            for descriptor in [os.open("/dev/null", os.O_RDONLY) for _ in range(50)]:
                os.close(descriptor)

    (tmp_path / "op").mkdir()
    busy = threading.Thread(target=come_and_go, daemon=True)
    busy.start()
    try:
        with open(tmp_path / "op" / LOCK, "w") as held:
            descriptor = fcntl(held.fileno(), F_DUPFD, 500)  # behind those that are closed
        found = [lock.pid for _ in range(30) for lock in find_locks(tmp_path)]
        assert len(found) == 30 and all(found)
    finally:
        over.set()
        busy.join(DEADLINE_S)
    os.close(descriptor)


@pytest.mark.fault
@pytest.mark.skipif(
    not Path("/dev/fuse").exists() or shutil.which("fusermount3") is None,
    reason="no /dev/fuse here, or no fuse3",
)
def test_what_others_read_from_a_silent_file_system_holds_nobody_up(tmp_path: Path) -> None:
    """A process of this host has a file open on a mount whose server has stopped."""
    scalai, point = Path(sys.executable).with_name("scalai"), tmp_path / "point"
    point.mkdir()
    (tmp_path / "x.jsonl").write_text("{}\n")
    command = [str(scalai), "mount", "job", str(point), f"--source=x={tmp_path / 'x.jsonl'}"]
    told = subprocess.run(
        [*command, f"--log={tmp_path / 'log'}"], stdout=subprocess.PIPE, text=True, check=True,
        timeout=DEADLINE_S,
    )  # fmt: skip
    found = re.search(r"by process (\d+)", told.stdout)
    assert found is not None
    killed = tmp_path / "extensions" / "killed" / LOCK
    killed.parent.mkdir(parents=True)
    killed.touch()
    seen: list[Lock] = []
    looking = threading.Thread(
        target=lambda: seen.extend(find_locks(killed.parents[1])), daemon=True
    )
    server = int(found[1])
    try:
        descriptor = os.open(point / "dataset" / "x" / "source" / "x.jsonl", os.O_RDONLY)
        stop(server)
        time.sleep(1.5 * NAMES_S)  # until the kernel would ask for the names again
        looking.start()
        looking.join(DEADLINE_S)
        has_ended = not looking.is_alive()
        os.kill(server, signal.SIGKILL)  # it frees whoever waits for it
        with suppress(OSError):  # ENOTCONN: its server is gone
            os.close(descriptor)
        assert has_ended
        assert [(lock.path, lock.pid) for lock in seen] == [(killed, None)]
    finally:
        with suppress(ProcessLookupError):
            os.kill(server, signal.SIGKILL)
        subprocess.run([scalai, "unmount", "--lazy", point], check=True, timeout=DEADLINE_S)


@pytest.mark.fault
def test_a_lock_that_its_file_system_does_not_give_up_is_left_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The workers' end is not broken off by it, nor does a healthy round fail."""

    def stale(path: Path, *arguments: object, **named: object) -> NoReturn:
        raise OSError(errno.ESTALE, "Stale file handle")

    def stale_lock(path: Path, *arguments: object, **named: object) -> os.stat_result:
        return stale(path) if path.name == LOCK else os.stat(path)

    path = tmp_path / "fused" / LOCK
    path.parent.mkdir()
    locks = WorkersLocks(tmp_path)
    with holder(path) as process:
        locks.look([process.pid])
        process.kill()
        process.wait(60)
        with monkeypatch.context() as patched:
            patched.setattr(Path, "unlink", stale)
            locks.remove_left()
    assert path.exists() and "Stale file handle" in caplog.text
    for its_stat in (stale, stale_lock):
        with monkeypatch.context() as patched:
            patched.setattr(Path, "stat", its_stat)
            assert list(find_locks(tmp_path)) == []


@pytest.mark.fault
@pytest.mark.parametrize("variable", ["TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME", "HOME"])
def test_locks_are_looked_for_where_torch_builds(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for other in ("TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    built = Path(_get_build_directory("op", verbose=False), "lock")
    assert extensions_root() in (built.parents[1], built.parents[2])


@pytest.mark.fault
def test_a_long_wait_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "op").mkdir()
    (tmp_path / "op" / "lock").touch()
    now = 0.0
    locks = WorkersLocks(tmp_path, lambda: now)
    with caplog.at_level(logging.INFO):
        locks.tell_of_waits()
        assert not caplog.messages
        now = PATIENCE_S
        locks.tell_of_waits()
        locks.tell_of_waits()
    (logged,) = caplog.messages
    assert f"{tmp_path}/op/lock no process of this host holds it" in logged
