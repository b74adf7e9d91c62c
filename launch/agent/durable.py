"""The durable directory of a job: an agent's look at the start, its records at the end.

``<durable_dir>/<job>/generation-<n>/<host>/`` are saved parts; ``finished.json`` marks the end of
the job; ``ledger-<host>.json`` lists its consumed samples. An agent attaches visible parts before
it joins; the coordinator decides.
"""

import json
import logging
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from scalai.core.errors import LayoutError, RefusedError, StoreError
from scalai.core.jsonable import Json
from scalai.core.messages.shared import JsonText
from scalai.store.atomic import make_folder, rename_durably, replace_file, write_new
from scalai.store.host import HostStore
from scalai.store.manifest import HostManifest, read_saved_manifest
from scalai.store.places import NUMBERED, generation_name
from scalai.store.secure import DURABLE, Folder, open_below

FINISHED = "finished.json"
FINAL_LEDGER = "ledger-"
"""Prefix of a finished job's ledgers, one for each host with drawn samples."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class SeenOnDisk:
    """Content of a job's durable directory: parts by generation, and damage with the reason."""

    parts: dict[int, list[tuple[Path, HostManifest]]] = field(default_factory=dict)
    damaged: dict[int, str] = field(default_factory=dict)

    def forget(self, number: int) -> None:
        self.parts.pop(number, None)
        self.damaged.pop(number, None)


def look(folder: Path) -> SeenOnDisk:
    """Read the manifests of all parts below ``<durable_dir>/<job>``.

    Parts removed meanwhile by a running job count as absent; parts of another user, or writable by
    one, as damaged. Raises ``StoreError``: the directory itself is unreadable, or another user's.
    """
    seen = SeenOnDisk()
    try:
        with open_below(folder.parent, folder.name, flag=DURABLE) as job:
            for entry in sorted(folder.glob("generation-*")):
                match = NUMBERED.fullmatch(entry.name)
                if match is None or not entry.is_dir():
                    continue
                with suppress(FileNotFoundError):
                    _look_into(job, entry, int(match[2]), seen)
                if not entry.is_dir():
                    seen.forget(int(match[2]))
    except FileNotFoundError:
        return seen
    except OSError as error:
        raise StoreError(
            f"{error.filename} cannot be read ({error.strerror}), and may hold the job's state. "
            "Repair it, or name another --durable-dir."
        ) from error
    return seen


def numbers(folder: Path) -> list[int]:
    """Return the generations' numbers below ``<durable_dir>/<job>``, readable or not."""
    found = (NUMBERED.fullmatch(entry.name) for entry in folder.glob("generation-*"))
    return sorted(int(match[2]) for match in found if match is not None)


def _look_into(job: Folder, entry: Path, number: int, seen: SeenOnDisk) -> None:
    try:
        with job.below(entry.name) as generation:
            for path in sorted(entry.iterdir()):
                if not path.name.startswith("."):
                    _read(generation, path, number, seen)
    except StoreError as error:
        seen.damaged[number] = str(error)


def _read(generation: Folder, path: Path, number: int, seen: SeenOnDisk) -> None:
    try:
        with generation.below(path.name) as part:
            part.check_files()
        manifest = read_saved_manifest(path, number)
    except StoreError as error:
        seen.damaged[number] = str(error)
    else:
        seen.parts.setdefault(number, []).append((path, manifest))


def attach_durable(store: HostStore, folder: Path) -> dict[int, str]:
    """Attach all parts in ``<durable_dir>/<job>`` to this host's store, by links.

    Returns:
        Unusable generations, with the reason.
    """
    seen = look(folder)
    for number, parts in sorted(seen.parts.items()):
        try:
            store.attach(parts)
        except (StoreError, LayoutError) as error:
            if (folder / generation_name(number)).is_dir():
                seen.damaged[number] = str(error)
    for number, reason in sorted(seen.damaged.items()):
        log.warning("event=damaged generation=%d directory=%s: %s", number, folder, reason)
    return seen.damaged


def check_writable(folder: Path) -> None:
    """Write and remove a file, to detect an unwritable directory at the start.

    Raises ``StoreError``: not writable, or others may change its content.
    """
    probe = folder / f".probe-{os.getpid()}-{time.monotonic_ns()}"
    try:
        make_folder(folder)
        write_new(probe, b"scalai")
        probe.unlink()
    except OSError as error:
        with suppress(OSError):
            probe.unlink(missing_ok=True)
        raise StoreError(
            f"--durable-dir {folder} cannot be written ({error.strerror}), so that the state could "
            "not be saved there. Name another one, or leave it out."
        ) from error
    open_below(folder, flag=DURABLE).close()


def write_finished(folder: Path, step: int, generation: int | None) -> None:
    """Mark the job's end in ``<durable_dir>/<job>``. Raises ``OSError``."""
    make_folder(folder)
    record = {"step": step, "generation": generation, "at": _now("%Y-%m-%dT%H:%M:%SZ")}
    # Shared: the agents of all hosts write it.
    replace_file(folder / FINISHED, json.dumps(record).encode(), mode=0o600, is_shared=True)


def write_ledger(folder: Path, host: str, ledger: JsonText) -> None:
    """Keep the job's final ledger in ``<durable_dir>/<job>``. Raises ``OSError``."""
    make_folder(folder)
    replace_file(folder / f"{FINAL_LEDGER}{host}.json", ledger.text.encode(), mode=0o600)


def refuse_finished(folder: Path) -> None:
    """Raise ``RefusedError`` if this directory's job has finished; ``StoreError`` if others may
    write to it."""
    path = folder / FINISHED
    try:
        with open_below(folder.parent, folder.name, flag=DURABLE) as job:
            text = job.read(FINISHED)
        record: Mapping[str, Json] = json.loads(text)
        found = f"step {record['step']} on {record['at']}"
    except FileNotFoundError:
        return
    except StoreError:
        raise
    except (OSError, ValueError, KeyError, TypeError):
        found = f"an unknown step ({path} cannot be read)"
    raise RefusedError(
        f"job {folder.name!r} finished at {found}; begin anew with --fresh, or with scalai clean "
        f"--job {folder.name} --durable-dir {folder.parent} --force."
    )


def set_aside(folder: Path) -> Path | None:
    """Rename ``<durable_dir>/<job>`` for a new beginning; never removes it.

    Returns the new name; None: there was nothing.

    Raises:
        StoreError: It cannot be renamed.
    """
    number, stamp = 1, _now("%Y%m%dT%H%M%SZ")
    target = folder.with_name(f"{folder.name}.set-aside-{stamp}")
    while target.exists():
        number += 1
        target = folder.with_name(f"{folder.name}.set-aside-{stamp}-{number}")
    try:
        rename_durably(folder, target)
    except FileNotFoundError:
        return None  # there is none, or another host was faster
    except OSError as error:
        raise StoreError(
            f"{folder} cannot be renamed to {target.name} ({error.strerror}), as --fresh does to "
            "it. Move it away by hand."
        ) from error
    return target


def _now(form: str) -> str:
    return time.strftime(form, time.gmtime())
