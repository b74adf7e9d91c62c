"""Names in a store: where a job's hosts and their generations lie."""

import os
import re
from pathlib import Path

from scalai.core.errors import UsageError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,199}")
NUMBERED = re.compile(r"(generation|deposit|dropped|fetched)-(\d+)")
"""Directories of a host that hold bytes: committed, being written or sealed, still read, of other
hosts."""


def default_store_dir() -> Path:
    """Return the store directory of this user in shared memory."""
    return Path(f"/dev/shm/scalai-{os.getuid()}")


def generation_name(generation: int) -> str:
    """Return the name of a committed generation's directory."""
    return f"generation-{generation}"


def rank_file(rank: int) -> str:
    """Return the name of the file that a rank writes."""
    return f"rank-{rank}.safetensors"


def host_directory(store_dir: Path, job: str, host: str) -> Path:
    """Return the directory of a host in a store.

    Raises:
        UsageError: A name that is no single, plain path component.
    """
    for what, name in (("job", job), ("host", host)):
        if not NAME.fullmatch(name):
            raise UsageError(
                f"{what} name {name!r} cannot name a directory. Use letters, digits and ._:- (at "
                "most 200, a letter or digit first)."
            )
    return store_dir / job / host
