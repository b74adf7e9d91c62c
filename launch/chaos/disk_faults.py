"""Faults of what a job keeps: hosts that go with their memory, files that change, disks that are
full. What fills a file system is small enough to fill, or it is left alone."""

import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from scalai.launch.chaos import job_processes as processes
from scalai.launch.chaos.scene import Injected, Scene
from scalai.launch.coordinator.registers import OWNER
from scalai.store.places import find_generations

MOST_FILLED = 1 << 28
"""Bytes: where more is free, others use that file system, too."""
TURNED, MOST_CUT = 16, 4096
"""Bytes of each file that change, or that are cut off at most."""
SETTLED_S, SETTLED_MOST_S = 0.5, 2.0
"""A generation is the newest one if none comes within the first; no more is waited."""
NEWER_MOST_S = 5.0
"""How long a generation is waited for that has just come."""
FILLER = ".scalai-chaos-filler"


def kill_hosts(scene: Scene, hosts: Sequence[str]) -> None:
    """Kill all processes of hosts at once, and take their memory away."""
    found = [pid for host in hosts for pid in processes.family(scene.folder, host)]
    for host in hosts:
        scene.agent(host)
    processes.end(found)
    for host in hosts:
        shutil.rmtree(scene.folder / host, ignore_errors=True)


# ------------------------------------------------------------------ room


def _mount(path: Path) -> Path:
    found = path.resolve()
    while not os.path.ismount(found):
        found = found.parent
    return found


def _why_not_filled(path: Path, what: str) -> str:
    found = os.statvfs(path)
    free = found.f_bavail * found.f_frsize
    if free > MOST_FILLED:
        return f"{what} has {free >> 20} MiB free: give the job a small file system of its own"
    return ""


def _fill(scene: Scene, path: Path) -> Injected:
    """Fill a file system, and keep it full: what the job removes would make room again."""
    filler = _mount(path) / FILLER
    scene.undo.callback(filler.unlink, missing_ok=True)

    def fill() -> str:
        for size in (1 << 20, 1 << 12, 1):
            with suppress(OSError), filler.open("ab", buffering=0) as file:
                while file.write(b"\0" * size) == size:
                    pass
        return "" if os.statvfs(path).f_bavail else f"{path} is full"

    fill()
    return Injected(fill)


def no_small_memory(scene: Scene) -> str:
    return _why_not_filled(scene.folder, "the store's file system")


def fill_memory(scene: Scene) -> Injected:
    """Fill it, and have a host drain: what the next round needs finds no room."""
    agent = scene.agent()
    found = _fill(scene, scene.folder)
    processes.send(agent, signal.SIGTERM)
    return found


def no_disk(scene: Scene) -> str:
    disk = scene.settings.durable_dir
    return "" if disk is not None and disk.is_dir() else "start the job with --durable-dir"


def no_small_disk(scene: Scene) -> str:
    disk = scene.settings.durable_dir
    if disk is None or not disk.is_dir():
        return no_disk(scene)
    return _why_not_filled(disk, "the durable directory")


def fill_disk(scene: Scene) -> Injected:
    assert scene.settings.durable_dir is not None
    return _fill(scene, scene.settings.durable_dir)


def refuse_disk(scene: Scene) -> Injected:
    """A file takes the place of the job's folder there."""
    assert scene.settings.durable_dir is not None
    job = scene.settings.durable_dir / scene.folder.name
    aside = job.with_name(f".{job.name}.chaos")
    job.rename(aside)

    def put_back() -> None:
        job.unlink(missing_ok=True)
        aside.rename(job)

    scene.undo.callback(put_back)
    job.write_text("no folder any more")
    return Injected()


def no_owner(scene: Scene) -> str:
    return no_disk(scene) or ("" if _owners(scene) else "nothing says there which run has it")


def tear_lease(scene: Scene) -> Injected:
    """Cut the entry of the owner of the job's folder there, as a power cut may; its holder mends
    it."""
    os.truncate(_owners(scene)[-1], 0)
    return Injected()


def _owners(scene: Scene) -> list[Path]:
    assert scene.settings.durable_dir is not None
    return sorted((scene.settings.durable_dir / scene.folder.name).glob(f"{OWNER}*.json"))


# ------------------------------------------------------------------ files


def _disk_generations(scene: Scene) -> dict[int, list[Path]]:
    disk = scene.settings.durable_dir
    return {} if disk is None else find_generations(disk / scene.folder.name)


def no_disk_state(scene: Scene) -> str:
    if no_disk(scene):
        return no_disk(scene)
    return "" if _disk_generations(scene) else "no generation is in the durable directory yet"


def no_older_disk_state(scene: Scene) -> str:
    if no_disk(scene):
        return no_disk(scene)
    return "" if len(_disk_generations(scene)) > 1 else "needs two generations in --durable-dir"


def damage_disk(scene: Scene) -> Injected:
    """Cut the newest generation on the disk, and have hosts die, so that it is needed."""
    for host in scene.fault.hosts:
        scene.agent(host)
    for pid in _all_workers(scene):  # nothing newer comes
        processes.send(pid, signal.SIGSTOP)
    newest = max(_disk_generations(scene).items())[1]
    for part in newest:
        for file in part.glob("*.safetensors"):
            os.truncate(file, file.stat().st_size // 2)
    kill_hosts(scene, scene.fault.hosts)
    for pid in _all_workers(scene):
        processes.send(pid, signal.SIGCONT)
    return Injected()


def _all_workers(scene: Scene) -> list[int]:
    hosts = processes.agents(scene.folder)
    return [pid for host in hosts for pid in processes.workers(scene.folder, host)]


def no_workers_here(scene: Scene) -> str:
    return "" if processes.workers(scene.folder, scene.host) else "no workers of the host run here"


def corrupt_store(scene: Scene) -> Injected:
    """Turn the first bits of what each file holds around, and have the file read."""

    def turn(opened: BinaryIO) -> Patch:
        opened.seek(0)
        at = 8 + int.from_bytes(opened.read(8), "little")  # behind the header
        opened.seek(at)
        old = opened.read(TURNED)
        return Patch(at, old, bytes(byte ^ 0xFF for byte in old))

    return _damage_store(scene, turn)


def truncate_store(scene: Scene) -> Injected:
    """Cut the end of each file off, half of it at most, and have it read."""

    def cut(opened: BinaryIO) -> Patch:
        size = opened.seek(0, os.SEEK_END)
        at = size - min(MOST_CUT, size // 2)
        opened.seek(at)
        return Patch(at, opened.read(), b"")

    return _damage_store(scene, cut)


@dataclass(frozen=True, slots=True)
class Patch:
    """What was in a file from a place on, and what is there now; nothing: the file ends there."""

    at: int
    old: bytes
    new: bytes


def _damage_store(scene: Scene, patch_of: Callable[[BinaryIO], Patch]) -> Injected:
    """Change each file of a host's newest generation while nothing newer can come, and kill a
    worker. At the end what is still as it was left is as it was before."""
    home = scene.folder / scene.host
    _await_newer(home)
    victim = scene.worker()
    found = _all_workers(scene)
    for pid in found:
        scene.undo.callback(processes.send, pid, signal.SIGCONT)
        processes.send(pid, signal.SIGSTOP)
    newest = _newest_settled(home)
    for file in newest.glob("rank-*.safetensors"):
        with file.open("r+b") as opened:
            patch = patch_of(opened)
            scene.undo.callback(_mend, file, patch)
            opened.seek(patch.at)
            opened.write(patch.new)
            if not patch.new:
                opened.truncate()
    processes.send(victim, signal.SIGKILL)
    for pid in found:
        processes.send(pid, signal.SIGCONT)
    return Injected(lambda: f"{newest.name} of {scene.host} was damaged")


def _await_newer(home: Path) -> None:
    """Wait for a generation: just behind it the workers have seldom begun to write another one,
    which those that are left would end."""
    newest, end = _newest(home), time.monotonic() + NEWER_MOST_S
    while _newest(home) == newest and time.monotonic() < end:
        time.sleep(0.005)


def _newest_settled(home: Path) -> Path:
    """Return the newest generation of a host whose workers stand still, once what they had written
    before has become one."""
    end = time.monotonic() + SETTLED_MOST_S
    newest, since = _newest(home), time.monotonic()
    while (now := time.monotonic()) < min(end, since + SETTLED_S):
        time.sleep(0.02)
        found = _newest(home)
        newest, since = found, since if found == newest else now
    return newest


def _newest(home: Path) -> Path:
    return max(home.glob("generation-*"), key=lambda path: int(path.name.rpartition("-")[2]))


def _mend(file: Path, patch: Patch) -> None:
    """Put back what was there, unless somebody has written the file since, or removed it."""
    with suppress(OSError), file.open("r+b") as opened:
        opened.seek(patch.at)
        if opened.read(len(patch.old)) == patch.new:
            opened.seek(patch.at)
            opened.write(patch.old)
