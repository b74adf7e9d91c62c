"""What an elastic job finds on this host: versions, memory, devices, network, the job itself."""

import os
import platform
import shutil
import socket
import stat
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from scalai.core.errors import RefusedError, ScalaiError, StoreError
from scalai.launch.agent.extension_locks import extensions_root, find_locks
from scalai.launch.agent.torch_elastic import self_check
from scalai.launch.commands.check_elastic import check_elastic
from scalai.launch.commands.mount import fuse_server
from scalai.launch.config.endpoint import TOKEN_VARIABLE, split_endpoint
from scalai.launch.config.flags import build_parser, parse_options
from scalai.launch.config.frameworks import frameworks
from scalai.launch.config.hostfile import expand_hostfile
from scalai.launch.config.job_spec import JobSpec
from scalai.launch.config.options import DEFAULT_MASTER_PORT
from scalai.launch.config.sizes import size_text
from scalai.store.places import default_store_dir
from scalai.store.secure import Folder

SMALL_STORE = 1 << 30
"""Less shared memory than this is what a container has by default, and holds no model."""

OLD_LOCK_S = 300.0
"""A build whose lock is older than this, and whose process is not found, was killed."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. ``is_fatal``: an elastic job cannot be run so."""

    name: str
    text: str
    is_fatal: bool = False


def examine(store_dir: Path | None, job_arguments: Sequence[str]) -> Iterator[Finding]:
    """Yield what there is to say, in the order of the report.

    Args:
        store_dir: Where stores will be; None: in /dev/shm.
        job_arguments: A command line of ``scalai-run``, which is checked as well; empty: none.
    """
    yield from _versions()
    yield from _memory(store_dir)
    yield from _devices()
    yield from _network()
    yield from _extensions()
    yield _mounts()
    if job_arguments:
        yield from _job(job_arguments)


def _versions() -> Iterator[Finding]:
    version, is_known = platform.python_version(), sys.version_info >= (3, 11)
    yield Finding(
        "python", version if is_known else f"{version}: needs 3.11 or newer", not is_known
    )
    try:
        self_check()
        yield Finding("torch", torch.__version__)
    except ScalaiError as error:
        yield Finding("torch", str(error), is_fatal=True)
    try:
        found = frameworks()
    except RefusedError as error:
        yield Finding("frameworks", str(error), is_fatal=True)
        return
    for name, of in found.items():
        text = f"{of['version'] or '-'}, {'hooked' if of['is_hooked'] else 'not hooked'}: "
        yield Finding(name, text + of["note"], bool(of["version"]) and not of["is_hooked"])
    if not any(of["version"] for of in found.values()):
        why = "none: only loops of one's own with scalai.elastic() are elastic"
        yield Finding("frameworks", why)


def _memory(store_dir: Path | None) -> Iterator[Finding]:
    folder = store_dir or default_store_dir()
    there = next(part for part in (folder, *folder.parents) if part.exists())
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".scalai-doctor-", dir=there))
    except OSError as error:
        text = f"no folder can be made in {there} ({error.strerror}); name another by --store-dir"
        yield Finding("shared memory", text, is_fatal=True)
        return
    try:
        if there == folder:
            Folder.open(folder, may_be_shared=True).close()
    except StoreError as error:
        yield Finding("shared memory", str(error), is_fatal=True)
        return
    free = shutil.disk_usage(there).free
    text = f"{size_text(free)} free in {there}"
    if there != folder and store_dir is not None:
        text += f" ({folder} is not there yet, and will be made)"
    text += "; a store takes twice the host's part of the state"
    above = there.parent.stat() if there == folder else there.stat()
    if above.st_mode & stat.S_IWOTH and not above.st_mode & stat.S_ISVTX:
        text += ". Others may take the store away: the folder above it lacks the sticky bit"
    if free < SMALL_STORE:
        text += ". In Docker: --shm-size; else --store-dir"
    yield Finding("shared memory", text)


def _devices() -> Iterator[Finding]:
    if torch.cuda.is_available():
        names = {torch.cuda.get_device_name(at) for at in range(torch.cuda.device_count())}
        yield Finding("devices", f"{torch.cuda.device_count()} x {', '.join(sorted(names))}")
    else:
        yield Finding("devices", f"no CUDA; {os.cpu_count()} processors: CPU emulation with gloo")


def _number_of(host: str) -> str:
    """Return the address of a name, of either kind."""
    return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])


def _network() -> Iterator[Finding]:
    host = socket.gethostname()
    try:
        yield Finding("host name", f"{host} is {_number_of(host)}")
    except OSError as error:
        yield Finding("host name", f"{host}: {error}; name the interface by --local-addr")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", DEFAULT_MASTER_PORT))
            text = f"{DEFAULT_MASTER_PORT}, a coordinator's default, is free"
        except OSError:
            text = f"{DEFAULT_MASTER_PORT} is in use; name another one by --coordinator HOST:PORT"
    yield Finding("port", text)
    is_set = TOKEN_VARIABLE in os.environ
    yield Finding("token", f"{TOKEN_VARIABLE} is {'set' if is_set else 'not set: one host only'}")


def _mounts() -> Finding:
    try:
        fuse_server()
        return Finding("mount", "FUSE is there")
    except RefusedError as error:
        return Finding("mount", f"not by scalai mount: {error}")


def _extensions() -> Iterator[Finding]:
    root = extensions_root()
    locks = list(find_locks(root))
    for lock in locks:
        text = f"{lock.path}, {lock.age_s / 60:.0f} min old: "
        if lock.pid is not None:
            yield Finding("extensions", f"{text}process {lock.pid} builds")
        elif lock.age_s < OLD_LOCK_S:
            yield Finding("extensions", f"{text}a build, or one that was killed")
        else:
            text += "a build that was killed left it, and all who want the extension wait for it. "
            text += "Unless another host builds there, remove it"
            yield Finding("extensions", text, is_fatal=True)
    if not locks:
        yield Finding("extensions", f"no lock in {root}")


def _job(argv: Sequence[str]) -> Iterator[Finding]:
    try:
        expanded, _ = expand_hostfile(argv, build_parser().parse_args(list(argv)))
        spec = JobSpec.read(parse_options(expanded))
        if not spec.is_elastic:
            why = 'not elastic: no --elastic, and no DeepSpeed configuration with a block "scalai"'
            yield Finding("job", why, is_fatal=True)
            return
        slots = spec.options.nproc_per_node
        count = int(slots) if slots.isdecimal() else max(1, torch.cuda.device_count())
        report = check_elastic(spec.options, spec.config, count, spec.deepspeed)
        yield Finding("job", f"elastic\n{report}")
    except ScalaiError as error:
        yield Finding("job", str(error), is_fatal=True)
        return
    endpoint = spec.options.coordinator
    if endpoint is not None:
        host, _ = split_endpoint(endpoint)
        try:
            yield Finding("coordinator", f"{endpoint} is {_number_of(host)}")
        except OSError as error:
            yield Finding("coordinator", f"{endpoint}: {error}", is_fatal=True)
