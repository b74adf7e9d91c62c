"""Leftovers of a dead job: the state a removal would lose, and its age."""

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from scalai.core.errors import StoreError
from scalai.core.job.outlook import age_text
from scalai.launch.config.sizes import size_text
from scalai.store.lock import LOCK, find_owner
from scalai.store.manifest import HostManifest, read_manifest
from scalai.store.places import MANIFEST, NUMBERED
from scalai.store.secure import open_below

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Leftover:
    """A host's part of a generation, or a sealed snapshot without a commit.

    ``text`` describes it. ``is_resumable``: a job can resume from it, alone or with other hosts'
    parts.
    """

    path: Path
    text: str
    is_resumable: bool


def find_leftovers(host: Path) -> list[Leftover]:
    """List a host's directory of a store: generations, then sealed snapshots.

    Leaves out files torn by the agent's death: they hold no state.
    """
    # Damaged parts set aside for an attached generation may still be repaired.
    aside = sorted(host.glob("damaged-*"))
    numbered = [(NUMBERED.fullmatch(path.name), path) for path in sorted(host.iterdir())]
    parts = [path for match, path in numbered if match is not None and match[1] == "generation"]
    snapshots = [
        path
        for match, path in numbered
        if match is not None and match[1] == "snapshot" and (path / MANIFEST).exists()
    ]
    return [
        *(_leftover(path, "generation") for path in (*parts, *aside)),
        *(_leftover(path, "snapshot") for path in snapshots),
    ]


def left_by_others(own: Path) -> dict[int, str]:
    """Describe generations left on this machine by other hosts' dead agents, by number.

    They may be this machine's own under an earlier name: a container's changes at each start.

    Args:
        own: Directory of a host's store.
    """
    reasons: dict[int, str] = {}
    for lock in sorted(own.parent.glob(f"*/{LOCK}")):
        host = lock.parent
        try:
            with open_below(own.parent.parent, own.parent.name, host.name) as folder:
                if host.name == own.name or find_owner(folder) is not None:
                    continue
            for each in find_leftovers(host):
                match = NUMBERED.fullmatch(each.path.name)
                if match is not None and match[1] == "generation" and each.is_resumable:
                    reasons[int(match[2])] = (
                        f"{each.path} holds {each.text}, and no agent of host {host.name!r} runs "
                        f"here. Start one (--host-id {host.name})"
                    )
        except (StoreError, OSError) as error:  # it appears, disappears, or is another user's
            log.warning("event=not_looked_at directory=%s: %s", host, error)
    return reasons


def find_saved(folder: Path) -> list[Leftover]:
    """List the parts of generations in ``<durable_dir>/<job>``, by name."""
    return [
        _leftover(part, "generation")
        for generation in sorted(folder.glob("generation-*"))
        for part in sorted(generation.iterdir())
        if not part.name.startswith(".")
    ]


def _leftover(path: Path, kind: str) -> Leftover:
    try:
        manifest = read_manifest(path)
    except StoreError as error:
        # It may still be repaired, or a renamed file moved back.
        return Leftover(path, f"damaged: {error}", is_resumable=True)
    what = f"generation {manifest.generation}" if kind == "generation" else "a sealed snapshot"
    text = f"{what} of host {manifest.host}, step {manifest.step}, {_age(path, manifest)} old, "
    text += size_text(manifest.size_bytes)
    if _is_attached(path, manifest):
        return Leftover(path, f"{text}, in the durable directory", is_resumable=False)
    # Step 0 holds no training.
    return Leftover(path, text, is_resumable=manifest.step > 0)


def _age(path: Path, manifest: HostManifest) -> str:
    made = manifest.about.get("time", (path / MANIFEST).stat().st_mtime)
    return age_text(time.time() - float(made))


def _is_attached(path: Path, manifest: HostManifest) -> bool:
    files = [path / stored.name for stored in manifest.files]
    return bool(files) and all(file.is_symlink() for file in files)


def sizes(folder: Path) -> Iterator[int]:
    """Yield the bytes of each file below a folder, links excluded."""
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            yield path.stat().st_size
