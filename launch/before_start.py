"""What a person can repair, looked at before anything of a job starts."""

import importlib.util
import os
import shlex
import shutil
import socket
import sys

from scalai.core.errors import UsageError
from scalai.launch.agent.durable import check_writable, refuse_finished
from scalai.launch.commands.check_elastic import check_start
from scalai.launch.config.endpoint import split_endpoint
from scalai.launch.config.job_spec import JobSpec
from scalai.launch.coordinator.discovery import job_directory
from scalai.launch.coordinator.registers import registers_of
from scalai.launch.program import named
from scalai.launch.slow_files import said

FOR_ELASTIC_JOBS = {
    "store.durable_dir": "--durable-dir",
    "store.durable_every_s": "--durable-every",
    "store.replicas": "--replicas",
    "store.snapshot_every": "--snapshot-every",
}
"""Flags about a state, by their keys: a job that is not elastic has none."""


def check_words(spec: JobSpec) -> None:
    """Check what the command line names, without a look at a disk that may hang.

    Raises:
        UsageError: The script, an address or a register cannot be what is named.
    """
    options = spec.options
    if options.script is not None:
        (_check_module if options.is_module else _check_script)(options.script)
    if options.coordinator is not None:
        split_endpoint(options.coordinator)
    if options.local_addr is not None:
        _check_own(options.local_addr)
    _check_health_check(spec.config.probe.health_check)
    registers_of(spec)


def _check_health_check(command: str | None) -> None:
    """A host whose check cannot run would wait for ever."""
    if command is not None and shutil.which(program := shlex.split(command)[0]) is None:
        raise UsageError(
            f"--health-check {command}: there is no executable {program!r} (in {os.getcwd()} or "
            "PATH)."
        )


def _check_script(script: str) -> None:
    """The workers would fail a minute later."""
    if not os.path.exists(script):
        raise UsageError(f"there is no script {script!r} (in {os.getcwd()}).")
    if os.path.isdir(script) and not os.path.exists(os.path.join(script, "__main__.py")):
        raise UsageError(f"{script} is a folder without a __main__.py; name the script in it.")


def _check_module(name: str) -> None:
    top = name.partition(".")[0]  # a look further would import it
    sys.path.insert(0, os.getcwd())
    try:
        is_known = top in sys.modules or importlib.util.find_spec(top) is not None
    finally:
        sys.path.pop(0)
    if not is_known:
        raise UsageError(f"-m {name}: there is no module {top!r} (in {os.getcwd()} or installed).")


def _check_own(address: str) -> None:
    try:
        family, kind, _, _, found = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(found)
    except OSError as error:
        raise UsageError(
            f"--local-addr {address} is no address of this host ({error.strerror or error})."
        ) from error


def check_folders(spec: JobSpec) -> None:
    """Check the folders of the job on this host, and make them.

    Raises:
        RefusedError: One cannot be made or written, or the job has finished.
    """
    if spec.durable_dir is not None and spec.is_elastic:
        with said(f"--durable-dir {spec.durable_dir}"):
            check_writable(spec.durable_dir)
            if not spec.is_fresh:
                refuse_finished(spec.durable_dir / spec.job)
    with named("--store-dir", spec.config.store.dir):
        job_directory(spec)


def check_job(spec: JobSpec, slots: int) -> str | None:
    """Check what the job is to do. Returns a warning, if there is something to say.

    Args:
        slots: Workers of this host.

    Raises:
        RefusedError: Its degrees, sizes or replicas cannot be had.
    """
    if spec.is_elastic:
        check_start(spec, slots if spec.max_hosts == 1 else None)
        return None
    idle = [flag for key, flag in FOR_ELASTIC_JOBS.items() if key in spec.config.origin]
    if not idle:
        return None
    return (
        f"event=not_elastic {', '.join(idle)} without effect: the job has no state, because there "
        'is no --elastic, and no DeepSpeed configuration with a block "scalai"'
    )
