"""``scalai clean``: remove what killed jobs left in shared memory."""

import argparse
import shutil
from collections.abc import Iterator
from pathlib import Path

from scalai.core.errors import StoreError, UsageError
from scalai.launch.card import read_card
from scalai.store.lock import LOCK, StoreLock, find_owner
from scalai.store.places import NAME, default_store_dir


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command's parser."""
    parser = subparsers.add_parser(
        "clean",
        help="remove what killed jobs left in the store",
        description="Remove the directories of jobs whose agents are gone. A job with a live agent "
        "is left alone.",
    )
    parser.add_argument("--store-dir", type=Path, help=f"default: {default_store_dir()}")
    parser.add_argument("--job", help="this job only; an error if an agent of it is alive")
    parser.add_argument("--dry-run", action="store_true", help="only print what would be removed")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Remove, or print what would be.

    Raises:
        StoreError: The named job is alive.
        UsageError: There is no such job, or the directory is no store.
    """
    root = args.store_dir or default_store_dir()
    if args.job is not None and not NAME.fullmatch(args.job):
        raise UsageError(f"{args.job!r} is no job's name.")
    jobs = [root / args.job] if args.job is not None else _jobs(root)
    if args.job is not None and not jobs[0].is_dir():
        names = [job.name for job in _jobs(root)]
        raise UsageError(f"{root} holds no job {args.job!r}, but {names}. Name one of them.")
    freed = 0
    for job in map(_checked, jobs):
        alive = _alive(job)
        if alive and args.job is not None:
            raise StoreError(f"job {job.name!r} is alive: {alive}. Stop it first.")
        if alive:
            print(f"left      {job}  {alive}")
            continue
        freed += _remove(job, is_dry=args.dry_run)
    print(f"{'would free' if args.dry_run else 'freed'} {freed} bytes in {root}")
    return 0


def _jobs(root: Path) -> list[Path]:
    """List the job directories of a store. Raises ``UsageError`` where something else is there."""
    if not root.is_dir():
        return []
    return [_checked(path) for path in sorted(root.iterdir())]


def _checked(job: Path) -> Path:
    """Return ``job`` if all below it is a host's directory or a coordinator's file.

    So a wrong ``--store-dir`` removes nothing.
    """
    if job.is_symlink() or not job.is_dir():
        strangers = [job]
    else:
        strangers = [
            path
            for path in sorted(job.iterdir())
            if not (path / LOCK).is_file() and not path.name.lstrip(".").startswith("coordinator.")
        ]
    if strangers:
        raise UsageError(
            f"{job.parent} is no store: {strangers[0]} is neither a host's directory nor a "
            "coordinator's file. Name a store's directory, or remove that."
        )
    return job


def _hosts(job: Path) -> list[Path]:
    return [path.parent for path in sorted(job.glob(f"*/{LOCK}"))]


def _alive(job: Path) -> str:
    """Say which agent or coordinator of a job is alive; empty where none is."""
    for host in _hosts(job):
        owner = find_owner(host)
        if owner is not None:
            return f"host {host.name} is in use by process {owner.pid}"
    return "its coordinator answers" if read_card(job) is not None else ""


def _remove(job: Path, *, is_dry: bool) -> int:
    """Remove a dead job's directory; returns the bytes of its files."""
    size = sum(_sizes(job))
    print(f"{'would remove' if is_dry else 'remove'}  {job}  {size} bytes")
    if is_dry:
        return size
    # Held until all is gone, so that no agent starts in what is being removed.
    locks = [StoreLock.acquire(host) for host in _hosts(job)]
    try:
        shutil.rmtree(job)
    finally:
        for lock in locks:
            lock.release()
    return size


def _sizes(job: Path) -> Iterator[int]:
    for path in job.rglob("*"):
        if path.is_file() and not path.is_symlink():
            yield path.stat().st_size
