"""``scalai mount`` and ``scalai unmount``: the tree of a job as a file system."""

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalai.core.dataset.table import DatasetTable
from scalai.core.errors import RefusedError, UsageError
from scalai.launch.config.elastic_config import load_config
from scalai.launch.config.job_spec import own_batch
from scalai.launch.config.removed import add_removed_flags
from scalai.launch.logs import configure
from scalai.vfs.mounts import absolute, find_mount, prepare, unmount

if TYPE_CHECKING:
    from scalai.vfs.tree import Tree

START_S = 120.0
"""Deadline of the start of the serving process, seconds: 60 for a URL's server, 60 for the rest."""
_WITHOUT = "The same tree is read without a mount as scalai://JOB/… by fsspec."

log = logging.getLogger("scalai.mount")


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add both commands."""
    mount = subparsers.add_parser(
        "mount", help="show a job's model, generations and data sets as files",
        description="Mount the tree of a job, for this user and for reading. A process of its own "
        "serves it.",
    )  # fmt: skip
    mount.add_argument(
        "what", metavar="JOB|PATH",
        help="a job of this machine; or the directory of a host or a job in a store, or a durable "
        "one. With --source or --elastic also a job without a state",
    )  # fmt: skip
    mount.add_argument("point", type=Path, metavar="POINT", help="an empty folder of yours")
    mount.add_argument(
        "--source", action="append", default=[], metavar="NAME=PATH|URL",
        help="a data set: a file, a folder, or a prefix of .bin and .idx; again for further ones",
    )  # fmt: skip
    mount.add_argument(
        "--shuffle", action="append", default=[], metavar="NAME=SEED",
        help="its samples come in the order of scalai.Shuffled with this seed; otherwise as they "
        "lie",
    )  # fmt: skip
    mount.add_argument(
        "--global-batch-size", type=int, metavar="N",
        help="samples of a step: gives each data set the folders dp-R-of-D (default: the job's)",
    )  # fmt: skip
    mount.add_argument(
        "--elastic", metavar="FILE",
        help="file with a [dataset] (sources, record_tokens, rampup_batch_size, ...), such as that "
        "of a job without a state",
    )  # fmt: skip
    mount.add_argument("--store-dir", type=Path, help="folder of the stores (default: in /dev/shm)")
    mount.add_argument("--log", type=Path, metavar="FILE", help="log of the process")
    mount.add_argument("--foreground", action="store_true", help="serve in this process")
    mount.add_argument("--json", action="store_true", help="one JSON object")
    mount.set_defaults(run=_mount)
    add_removed_flags(mount)
    gone = subparsers.add_parser("unmount", help="end a mount", description="End a mount.")
    gone.add_argument("point", type=Path, metavar="POINT", help="folder of the mount")
    gone.add_argument("--lazy", action="store_true", help="end it in spite of open files")
    gone.add_argument("--json", action="store_true", help="one JSON object")
    gone.set_defaults(run=_unmount)


def _unmount(args: argparse.Namespace) -> int:
    unmount(absolute(args.point), is_lazy=args.lazy)
    if args.json:
        print(json.dumps({"point": str(absolute(args.point))}))
    return 0


def _mount(args: argparse.Namespace) -> int:
    point = absolute(args.point)
    prepare(point)
    tree = shown_tree(args)
    serve = fuse_server()
    if args.foreground:
        configure("mount")
        log.info("event=mount what=%s point=%s", args.what, point)
        serve(tree, str(point), args.what)
        return 0
    tree.close()
    process, path = _start(args, point)
    if args.json:
        served = {"what": args.what, "point": str(point), "process": process, "log": str(path)}
        print(json.dumps({**served, "notes": list(said_of(tree))}))
        return 0
    print(f"{args.what} is mounted at {point} by process {process}; its log is {path}")
    print("\n".join(said_of(tree)))
    return 0


def said_of(tree: "Tree") -> Iterator[str]:
    """Yield the data sets and the global batch in words, with their origin."""
    for name, url in tree.table.sources.items():
        if name in tree.left_out:
            why = f"{tree.left_out[name]} Say where it lies here: --source {name}=PATH"
            yield f"data set {name} is left out: {why}"
            continue
        is_the_jobs = tree.told.sources.get(name) == url
        yield f"data set {name}: {url}{' (of the job)' * is_the_jobs}"
    is_the_jobs = tree.told.batches is not None and tree.told.batches == tree.table.batches
    if tree.table.batches is not None:
        yield f"global batch: {tree.table.batch_text}{' (of the job)' * is_the_jobs}"
    elif tree.table.sources:
        yield "no views of replicas: the job does not say its global batch; --global-batch-size N"


def shown_tree(args: argparse.Namespace) -> "Tree":
    """Tree of these flags. Raises ``ScalaiError``."""
    from scalai.vfs.tree import Tree, find_job

    sources = {name: _anywhere(url) for name, url in _pairs("--source", args.source)}
    if len(sources) < len(args.source):
        raise UsageError(f"--source names a data set twice: {args.source}.")
    seeds = _numbers("--shuffle", args.shuffle)
    flags = DatasetTable(sources, shuffle=seeds, global_batch_size=args.global_batch_size)
    given = flags.over(_of_file(args.elastic))
    return Tree(find_job(args.what, args.store_dir, may_be_new=bool(given.sources)), given)


def _of_file(path: str | None) -> DatasetTable:
    """Data sets and batch of an elastic configuration."""
    config = load_config(path)
    return config.dataset.over(own_batch((), config.model.global_batch_size))


def _anywhere(url: str) -> str:
    """A source with an absolute path: other processes have other folders."""
    return url if "://" in url or url.startswith("~/") else str(Path(url).absolute())


def _pairs(flag: str, given: Sequence[str]) -> list[tuple[str, str]]:
    pairs = [each.partition("=") for each in given]
    wrong = [each for each, (name, _, value) in zip(given, pairs, strict=True)
             if not (name and value)]  # fmt: skip
    if wrong:
        raise UsageError(f"{flag} {wrong[0]}: expected NAME=VALUE.")
    return [(name, value) for name, _, value in pairs]


def _numbers(flag: str, given: Sequence[str]) -> dict[str, int]:
    """Numbers of a flag by data set."""
    found = {}
    for name, text in _pairs(flag, given):
        if not (text.isascii() and text.isdigit() and len(text) < 20):
            raise UsageError(f"{flag} {name}={text}: expected a whole number.")
        found[name] = int(text)
    return found


def fuse_server() -> Any:
    """Server of a mount. Raises ``RefusedError`` on a machine without FUSE."""
    if not Path("/dev/fuse").exists():
        raise RefusedError(
            "/dev/fuse is not there: the kernel or the container gives no FUSE (docker run "
            f"--device /dev/fuse --cap-add SYS_ADMIN). {_WITHOUT}"
        )
    try:
        from scalai.vfs.fuse import serve
    except OSError as error:
        raise RefusedError(
            f"libfuse 3 is not installed ({error}): apt-get install fuse3. {_WITHOUT}"
        ) from error
    return serve


def _start(args: argparse.Namespace, point: Path) -> tuple[int, Path]:
    """Start the serving process, and wait for the mount. Returns its number and its log."""
    path = args.log
    if path is None:
        number, name = tempfile.mkstemp(prefix="scalai-mount-", suffix=".log")
        os.close(number)
        path = Path(name)
    command = [sys.executable, "-m", "scalai.launch.cli", *sys.argv[1:], "--foreground"]
    with open(path, "ab") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
        )
    end = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < end:
        if find_mount(point) is not None:
            return process.pid, path
        time.sleep(0.05)
    process.kill()
    process.wait(10)
    lines = path.read_text(errors="replace").strip().splitlines()
    why = lines[-1] if lines else "it gave no reason"
    raise RefusedError(f"{point} could not be mounted: {why} ({path})")
