"""``scalai clean``: remove leftovers of killed jobs in shared memory, and a job's saved state."""

import argparse
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scalai.core.errors import PeerError, StoreError, UsageError
from scalai.core.jsonable import Json
from scalai.launch.agent.durable import FINAL_LEDGER, FINISHED
from scalai.launch.agent.leftovers import Leftover, find_leftovers, find_saved, sizes
from scalai.launch.config.endpoint import read_card
from scalai.launch.coordinator.leases import await_ownership
from scalai.launch.coordinator.registers import OWNER, FolderRegister
from scalai.store.lock import LOCK, StoreLock, find_owner
from scalai.store.places import NUMBERED, check_job, default_store_dir
from scalai.store.secure import DURABLE, open_below

_MARKS = (FINISHED, FINAL_LEDGER, OWNER, "probe-", "retired-")
"""How the names of a job's files in its durable directory begin, beside generations."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command's parser."""
    parser = subparsers.add_parser(
        "clean",
        help="remove what killed jobs left in the store",
        description="Remove the directories of jobs whose agents are gone. A job with a live agent "
        "is left alone, and one that could still be resumed as well, without --force.",
    )
    parser.add_argument(
        "--store-dir", type=Path, help="folder of the stores (default: in /dev/shm)"
    )
    parser.add_argument("--job", help="this job only; an error if an agent of it is alive")
    parser.add_argument(
        "--durable-dir", type=Path, metavar="DIR",
        help="remove the job's durable states and its mark of completion too; needs --job",
    )  # fmt: skip
    parser.add_argument("--force", action="store_true", help="remove states of resumable jobs too")
    parser.add_argument("--dry-run", action="store_true", help="print the removals only")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Remove, or print the plan.

    Raises:
        StoreError: The named job is alive, or resumable without --force.
        RefusedError: A live run of it owns the saved state.
        UsageError: There is no such job, or a directory has unexpected content.
    """
    root = args.store_dir or default_store_dir()
    if args.job is None:
        if args.durable_dir is not None:
            raise UsageError("--durable-dir needs --job: say whose state is to be removed.")
        each_job = (_clean(job, args) for job in _jobs(root))
    else:
        each_job = (each for each in _clean_named(root / check_job(args.job), args))
    done = list[_Cleaned]()
    for each in each_job:
        done.append(each)
        if not args.json:
            each.show(is_dry=args.dry_run)
    freed = sum(each.size_bytes for each in done if not each.why_left)
    if args.json:
        entries = [each.to_json() for each in done]
        print(json.dumps({"dry_run": args.dry_run, "freed_bytes": freed, "entries": entries}))
        return 0
    print(f"{'would free' if args.dry_run else 'freed'} {freed} bytes in {root}")
    return 0


@dataclass(frozen=True, slots=True)
class _Cleaned:
    """A directory removed, or left for a reason, and the states in it."""

    path: Path
    size_bytes: int
    found: Sequence[Leftover]
    why_left: str = ""

    def to_json(self) -> dict[str, Json]:
        return {
            "path": str(self.path), "size_bytes": self.size_bytes, "why_left": self.why_left,
            "states": [{"path": str(each.path), "text": each.text} for each in self.found],
        }  # fmt: skip

    def show(self, *, is_dry: bool) -> None:
        if self.why_left:
            print(f"left      {self.path}  {self.why_left}")
        else:
            what = "would remove" if is_dry else "remove"
            print(f"{what}  {self.path}  {self.size_bytes} bytes")
        for each in self.found:
            print(f"            {each.path.parent.name}/{each.path.name}: {each.text}")


def _clean(job: Path, args: argparse.Namespace) -> _Cleaned:
    """Remove one of all jobs, or leave it and print the reason."""
    reason = _alive(job)
    found = _leftovers(job)
    if not reason and any(each.is_resumable for each in found) and not args.force:
        reason = f"could be resumed; --job {job.name} --force removes it"
    if reason:
        return _Cleaned(job, 0, found, reason)
    return _remove(job, found, is_dry=args.dry_run)


def _clean_named(job: Path, args: argparse.Namespace) -> list[_Cleaned]:
    """Remove one job and its saved state, after checks of everything."""
    saved = None if args.durable_dir is None else args.durable_dir / job.name
    has_saved = saved is not None and saved.is_dir()
    if not job.is_dir() and not has_saved:
        names = [other.name for other in _jobs(job.parent)]
        where = job.parent if saved is None else f"{job.parent} and {saved.parent}"
        there = f"but {', '.join(names)}. Name one of them" if names else "nor another one"
        raise UsageError(f"{where} holds no job {job.name!r}, {there}.")
    found: list[Leftover] = []
    if job.is_dir():
        alive = _alive(_checked(job))
        if alive:
            raise StoreError(f"job {job.name!r} is alive: {alive}. Stop it first.")
        found = _leftovers(job)
    kept = [] if saved is None or not has_saved else find_saved(_checked_saved(saved))
    if saved is not None and has_saved and not args.dry_run:
        await_ownership(FolderRegister(saved.parent, saved.name, DURABLE), saved.parent)
    lost = [each for each in (*found, *kept) if each.is_resumable]
    if lost and not args.force and not args.dry_run:
        lines = "".join(f"\n  {each.path}: {each.text}" for each in lost)
        raise StoreError(
            f"job {job.name!r} could be resumed from what would be removed:{lines}\n"
            "Remove it all the same by --force."
        )
    done = [_remove(job, found, is_dry=args.dry_run)] if job.is_dir() else []
    if saved is not None and has_saved:
        done.append(_remove_saved(saved, kept, is_dry=args.dry_run))
    return done


def _jobs(root: Path) -> list[Path]:
    """List the job directories of a store. Raises ``UsageError`` for other content."""
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
        open_below(job.parent, job.name).close()  # whose it is, before anything in it is read
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


def _checked_saved(folder: Path) -> Path:
    """Return ``<durable_dir>/<job>`` if all its content is a job's: a wrong ``--durable-dir``
    removes nothing."""
    for path in sorted(folder.iterdir()):
        match = NUMBERED.fullmatch(path.name)
        is_part = match is not None and match[1] == "generation" and path.is_dir()
        is_mark = path.name.lstrip(".").startswith(_MARKS)
        if path.is_symlink() or not (is_part or is_mark):
            raise UsageError(
                f"{folder} is not what a job has saved: {path} is neither a generation nor "
                f"{FINISHED}. Name the --durable-dir that the job had, or move that away."
            )
    return folder


def _hosts(job: Path) -> list[str]:
    return [path.parent.name for path in sorted(job.glob(f"*/{LOCK}"))]


def _alive(job: Path) -> str:
    """Return the live agent or coordinator of a job; empty: none."""
    for name in _hosts(job):
        with open_below(job.parent, job.name, name) as host:
            owner = find_owner(host)
        if owner is not None:
            return f"host {name} is in use by process {owner.pid}"
    try:
        return "its coordinator answers" if read_card(job) is not None else ""
    except PeerError as error:
        return str(error)


def _leftovers(job: Path) -> list[Leftover]:
    return [each for name in _hosts(job) for each in find_leftovers(job / name)]


def _remove(job: Path, found: Sequence[Leftover], *, is_dry: bool) -> _Cleaned:
    """Remove a dead job's directory."""
    done = _Cleaned(job, sum(sizes(job)), found)
    if is_dry:
        return done
    # Held until all is gone, so that no agent starts in what is being removed.
    locks = []
    try:
        for name in _hosts(job):
            with open_below(job.parent, job.name, name) as host:
                locks.append(StoreLock.acquire(host))
        shutil.rmtree(job)
    finally:
        for lock in locks:
            lock.release()
    return done


def _remove_saved(folder: Path, found: Sequence[Leftover], *, is_dry: bool) -> _Cleaned:
    """Remove a job's saved state, renamed first: nobody finds half of it."""
    done = _Cleaned(folder, sum(sizes(folder)), found)
    if is_dry:
        return done
    aside = folder.with_name(f".{folder.name}.removed-{os.getpid()}")
    os.rename(folder, aside)
    shutil.rmtree(aside)
    return done
