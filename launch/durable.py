"""Resuming from the durable directory: its newest whole generation becomes one of this host's
own."""

import logging
from pathlib import Path

from scalai.core.errors import LayoutError, ProofError, StoreError
from scalai.launch.generations import check_whole
from scalai.store.files import contiguous_chunks
from scalai.store.host import HostStore
from scalai.store.manifest import Generation, load_generation
from scalai.store.places import NUMBERED
from scalai.store.rows import StoredRows

log = logging.getLogger(__name__)


def newest_durable(folder: Path) -> Generation | None:
    """Return the newest generation below ``folder`` that is whole, None where there is none.

    Damaged and incomplete ones are passed over, by name in the log.
    """
    found: list[Generation] = []
    for entry in sorted(folder.glob("generation-*")) if folder.is_dir() else ():
        if NUMBERED.fullmatch(entry.name) is None:
            continue
        parts = [path for path in sorted(entry.iterdir()) if not path.name.startswith(".")]
        try:
            generation = load_generation(parts)
            check_whole(generation.hosts, exact=False)
        except (StoreError, LayoutError) as error:
            log.warning("event=passed_over directory=%s: %s", entry, error)
            continue
        found.append(generation)
    return max(found, key=lambda generation: (generation.step, generation.generation), default=None)


def adopt(store: HostStore, generation: Generation) -> None:
    """Copy a durable generation into the store, as a committed part of this host. Every piece is
    checked first.

    Raises:
        ProofError: A piece is not what its manifest says.
    """
    parts = [
        StoredRows(directory, part)
        for part, directory in zip(generation.hosts, generation.directories, strict=True)
        if directory is not None
    ]
    for part in parts:
        for damage in part.damage():
            raise ProofError(
                f"{damage}. Remove {part.directory.parent} to resume from an older generation."
            )
    store.adopt_empty(generation.hosts[0])
    for part in parts:
        pieces = part.manifest.collection
        path, begins = store.stage(pieces)
        with open(path, "r+b", buffering=0) as file:
            for row, begin in enumerate(begins.tolist()):
                file.seek(begin)
                for chunk in contiguous_chunks(part.view(row)):
                    file.write(chunk)
        store.extend(generation.generation, path, pieces, begins, of=generation)
    log.info(
        "event=resume generation=%d step=%d from=%s",
        generation.generation, generation.step, parts[0].directory.parent,
    )  # fmt: skip
