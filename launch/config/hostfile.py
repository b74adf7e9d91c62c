"""DeepSpeed's host files: which hosts a job has, and how many slots each.

Source: ``fetch_hostfile`` and ``parse_resource_filter`` of deepspeed/launcher/runner.py, 0.19.8.
Differs in: nothing is started on other hosts; ``scalai-run`` runs on each of them.
"""

import argparse
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from scalai.core.errors import UsageError
from scalai.launch.config.endpoint import join_endpoint
from scalai.launch.config.options import DEFAULT_MASTER_PORT

Hosts = Mapping[str, tuple[int, ...]]
"""Slots of each host, in the file's order."""

_LINE = re.compile(r"(\S+)\s+slots=(\d+)")


def expand_hostfile(argv: Sequence[str], flags: argparse.Namespace) -> tuple[list[str], Hosts]:
    """Return a command line with the flags of ``--hostfile`` before it, its own flags winning, and
    the hosts; unchanged, and none, without the flag.

    Raises:
        UsageError: The file or a filter cannot be read, or this host is not in it.
    """
    hosts = _hosts(flags)
    if hosts is None:
        return list(argv), {}
    name = own_name(hosts, flags.host_id, socket.gethostname(), flags.hostfile)
    arguments = ["--nproc-per-node", str(len(hosts[name])), "--host-id", name]
    return [*_of_job(hosts), *arguments, *argv], {name: hosts[name]}


def expand_for_coordinator(argv: Sequence[str], flags: argparse.Namespace) -> list[str]:
    """Return a command line with what ``--hostfile`` says of the whole job put before it: the
    coordinator may run on a host that the file does not name.

    Raises:
        UsageError: The file or a filter cannot be read.
    """
    hosts = _hosts(flags)
    return list(argv) if hosts is None else [*_of_job(hosts), *argv]


def _hosts(flags: argparse.Namespace) -> Hosts | None:
    """Return the hosts of the flags' file; None without a file."""
    if flags.hostfile is None:
        if flags.include or flags.exclude:
            raise UsageError("--include and --exclude filter the hosts of --hostfile; name it too.")
        return None
    try:
        text = Path(flags.hostfile).read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"--hostfile {flags.hostfile}: {why}.") from error
    return filtered(parse_hostfile(text, flags.hostfile), flags.include, flags.exclude)


def _of_job(hosts: Hosts) -> list[str]:
    """Return the flags that are the same on all hosts."""
    arguments = ["--nnodes", f"1:{len(hosts)}"]
    if len(hosts) > 1:
        arguments += ["--rdzv-endpoint", join_endpoint(next(iter(hosts)), DEFAULT_MASTER_PORT)]
    return arguments


def parse_hostfile(text: str, name: str) -> Hosts:
    """Read lines of ``host slots=N``; empty ones and those that begin with ``#`` say nothing."""
    hosts: dict[str, tuple[int, ...]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        match = _LINE.match(line)
        if match is None or not int(match[2]):
            raise UsageError(f"{name}, line {number}: {line!r} is not HOST slots=N.")
        if match[1] in hosts:
            raise UsageError(f"{name}, line {number}: {match[1]} stands there twice; keep one.")
        hosts[match[1]] = tuple(range(int(match[2])))
    if not hosts:
        raise UsageError(f"{name} names no host; write one HOST slots=N a line.")
    return hosts


def filtered(hosts: Hosts, include: str | None, exclude: str | None) -> Hosts:
    """Keep the hosts and slots of ``include``, or all but those of ``exclude``.

    Both are ``HOST[:SLOT,SLOT...]``, several of them joined by ``@``; a host without slots is
    meant whole.
    """
    if include and exclude:
        raise UsageError("--include and --exclude are both given; keep one.")
    if not include and not exclude:
        return hosts
    named: dict[str, set[int]] = {}
    for part in (include or exclude or "").split("@"):
        host, colon, slots = part.partition(":")
        known = hosts.get(host)
        chosen = slots.split(",") if colon else list(map(str, known or ()))
        if known is None or not all(s.isdecimal() and int(s) in known for s in chosen):
            raise UsageError(
                f"{part!r} names a host or a slot that the host file does not have; it has "
                + ", ".join(f"{name} slots={len(of)}" for name, of in hosts.items())
                + "."
            )
        named.setdefault(host, set()).update(map(int, chosen))
    kept = {
        host: tuple(slot for slot in of if (slot in named.get(host, ())) == bool(include))
        for host, of in hosts.items()
    }
    left = {host: slots for host, slots in kept.items() if slots}
    if not left:
        raise UsageError("no slot is left of the host file; change --include or --exclude.")
    return left


def own_name(hosts: Hosts, host_id: str | None, hostname: str, file: str) -> str:
    """Return this host's name in the host file."""
    for name in (host_id, hostname, hostname.partition(".")[0]):
        if name in hosts:
            return str(name)
    raise UsageError(
        f"this host is {host_id or hostname}, and {file} has {', '.join(hosts)}. Name it by "
        "--host-id as the file does."
    )
