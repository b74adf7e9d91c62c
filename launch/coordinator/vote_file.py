"""Whom the vote on a job's coordinator asks, kept in the job's folder of the coordinator's machine
for the next coordinator there."""

import dataclasses
import json
from pathlib import Path

from scalai.core.electorate import Electorate
from scalai.core.errors import MessageError, ScalaiError
from scalai.core.witness import Known
from scalai.runtime.codec import convert
from scalai.store.secure import open_below

ELECTORATE = "coordinator.electorate.json"


def known_to_json(known: Known) -> object:
    """Return what one process knows of a vote, for ``known_of_json``."""
    return dataclasses.asdict(known)


def known_of_json(data: object) -> Known:
    """Raises ``MessageError`` where this is nothing of the kind."""
    return convert(data, Known)


def keep_electorate(folder: Path, electorate: Electorate) -> None:
    """Note an electorate; where nothing was noted before, one of nobody needs no note. Raises
    ``StoreError`` or ``OSError``."""
    if not electorate.everyone and not (folder / ELECTORATE).exists():
        return
    with open_below(folder.parent, folder.name) as job:
        job.write(ELECTORATE, json.dumps(known_to_json(Known(electorate))).encode())


def kept_electorate(folder: Path) -> Known | None:
    """Return what was noted last; None: nothing, or it is torn. Raises as ``keep_electorate``."""
    try:
        with open_below(folder.parent, folder.name) as job:
            return known_of_json(json.loads(job.read(ELECTORATE)))
    except (FileNotFoundError, ValueError, MessageError):
        return None


def forget_electorate(folder: Path) -> None:
    """The job has ended: nobody needs to be asked."""
    try:
        with open_below(folder.parent, folder.name) as job:
            job.remove(ELECTORATE)
    except (FileNotFoundError, ScalaiError, OSError):
        pass  # nothing was noted, or the next start asks them, and finds that they are gone
