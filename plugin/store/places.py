"""Names in a store: places of a job's hosts and their generations."""

import os
import re
from pathlib import Path

from scalai.core.errors import UsageError

MANIFEST = "manifest.json"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,199}")
NUMBERED = re.compile(r"(generation|snapshot|dropped|fetched)-(\d+)")
"""Directories of a host with bytes: committed, being written or sealed, still read, of other hosts.
"""


def default_store_dir() -> Path:
    """Return the store directory of this user in shared memory."""
    return Path(f"/dev/shm/scalai-{os.getuid()}")


def generation_name(generation: int) -> str:
    """Return the name of a committed generation's directory."""
    return f"generation-{generation}"


def rank_file(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rank-{rank}.safetensors"


def check_name(what: str, name: str, flag: str) -> str:
    """Return the name of a job or a host, if it can name a folder; ``what`` and ``flag`` are for
    the error.

    Raises:
        UsageError: The name is no single, plain path component.
    """
    if not NAME.fullmatch(name):
        raise UsageError(
            f"{what} name {name!r} cannot name a directory. Use letters, digits and ._:- (at "
            f"most 200, a letter or digit first): {flag} NAME."
        )
    return name


def check_job(name: str) -> str:
    """Return a job's name. Raises ``UsageError`` if it is invalid."""
    return check_name("job", name, "--job")


def check_host(name: str) -> str:
    """Return a host's name. Raises ``UsageError`` if it is invalid."""
    if name.endswith((".json", ".lock")):
        raise UsageError(
            f"host name {name!r} ends as the job's own files beside the folders of its hosts do. "
            "Give it another name: --host-id NAME."
        )
    return check_name("host", name, "--host-id")


def find_generations(path: Path) -> dict[int, list[Path]]:
    """Return the directories of committed parts below ``path`` by generation, hosts in order.

    ``path`` is one part (a host's ``generation-<n>``), a host's directory, a job's directory of
    several hosts, a durable directory, or a durable ``generation-<n>`` with its hosts below. Empty
    for other paths. Reads only names.
    """
    found: dict[int, list[Path]] = {}
    for depth in range(3):
        for manifest in sorted(path.glob("*/" * depth + MANIFEST)):
            part = manifest.parent
            # The number is in the name of the part (in a store) or of its parent (durable).
            for directory in (part.absolute(), part.absolute().parent):
                match = NUMBERED.fullmatch(directory.name)
                if match:
                    break
            if match and match[1] == "generation" and not part.name.startswith("."):
                found.setdefault(int(match[2]), []).append(part)
    return dict(sorted(found.items()))
