"""A host's parts of committed generations: reading, growth by fetched or attached pieces, proof,
end.
"""

import logging
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from scalai.core.errors import StoreError
from scalai.core.jsonable import Json
from scalai.core.tensors.collection import Collection
from scalai.core.tensors.coverage import DamagedPiece, still_damaged
from scalai.store.archive import HiddenCopy, copy_part, write_hidden
from scalai.store.atomic import rename_durably
from scalai.store.directory import HostDirectory
from scalai.store.files import lay_out
from scalai.store.manifest import (
    HostManifest,
    StoredFile,
    read_own_manifest,
    write_manifest,
)
from scalai.store.parts import (
    FETCHED,
    Extras,
    Staged,
    StoredRows,
    attached_hosts,
    attachment,
    empty_part,
    extended,
    proven_only,
    with_files,
    without_rows,
)
from scalai.store.places import MANIFEST, generation_name

log = logging.getLogger(__name__)


class HeldGenerations:
    """A host's parts of committed generations. Thread-safe. This process owns ``folders``."""

    def __init__(self, job: str, host: str, folders: HostDirectory) -> None:
        self.job, self.host = job, host
        self._folders = folders
        self.directory = folders.path
        self._mutex = folders.mutex
        self._committed: dict[int, HostManifest] = {}
        self._readers: dict[int, int] = {}
        self._archive: HiddenCopy | None = None
        self._spoilt: set[Path] = set()
        """Files on another disk with damage. They are not attached again."""
        self.damaged: dict[int, str] = {}
        """Reason of damage by committed generation. The files stay; the numbers are never used
        again."""
        self._found: dict[int, tuple[DamagedPiece, ...]] = {}
        """Damage found by ``examine``, by generation."""

    def generations(self) -> list[int]:
        """Return the committed generations, oldest first."""
        with self._mutex:
            return sorted(self._committed)

    def manifest(self, generation: int) -> HostManifest:
        """Return the manifest of a committed generation. Raises ``StoreError`` if there is none."""
        with self._mutex:
            if generation not in self._committed:
                raise self._unknown(generation)
            return self._committed[generation]

    def is_attached(self, generation: int) -> bool:
        """Return True if files of a generation lie on another disk."""
        with self._mutex:
            own = self._committed.get(generation)
            return own is not None and bool(attached_hosts(own))

    def generation_directory(self, generation: int) -> Path:
        """Return a committed generation's directory. Raises ``StoreError`` if there is none."""
        with self._mutex:
            if generation not in self._committed:
                raise self._unknown(generation)
            return self.directory / generation_name(generation)

    def _unknown(self, generation: int) -> StoreError:
        reason = self.damaged.get(generation)
        found = f"is damaged: {reason}" if reason else "is not committed here"
        return StoreError(
            f"generation {generation} of job {self.job!r} {found} (host {self.host!r} has "
            f"{self.generations()}). Use one of those."
        )

    @contextmanager
    def open_rows(self, generation: int, *, is_examined: bool = False) -> Iterator[StoredRows]:
        """Give the pieces of a committed generation.

        Their files stay unchanged during the block, even after a drop. ``is_examined`` accepts
        unreadable files.

        Raises:
            StoreError: It is not committed here. DamageError: A file cannot be read.
        """
        with self._mutex:
            directory, manifest = self.generation_directory(generation), self.manifest(generation)
            rows = StoredRows(directory, manifest, is_examined=is_examined)
            self._readers[generation] = self._readers.get(generation, 0) + 1
        try:
            rows.map_attached()
            yield rows
        finally:
            with self._mutex:
                self._readers[generation] -= 1
                is_last = self._readers[generation] == 0
                if is_last:
                    del self._readers[generation]
                dropped = self.directory / f"dropped-{generation}"
                if is_last and dropped.is_dir():
                    self._folders.recycle(dropped)

    def examine(self, generation: int) -> list[str]:
        """Compare a committed generation with its manifest.

        This process no longer counts damaged pieces as held; files and manifest stay on disk, so
        the next owner counts them again. ``damage_found`` repeats the lines.

        Returns:
            A line for each damaged piece.

        Raises:
            StoreError: It is not committed here, or no longer.
        """
        with self.open_rows(generation, is_examined=True) as rows:
            found = dict(rows.damage())
            read = rows.manifest
        if not found:
            return []
        names = [stored.name for stored in read.files]
        places = {(names[read.file[row]], int(read.begin[row])) for row in found}
        with self._mutex:
            directory, own = self.generation_directory(generation), self.manifest(generation)
            names = [stored.name for stored in own.files]  # it may have grown meanwhile
            rows_of = zip(own.file.tolist(), own.begin.tolist(), strict=True)
            damaged = [
                n for n, (file, begin) in enumerate(rows_of) if (names[file], begin) in places
            ]
            links = [directory / name for name, _ in places if (directory / name).is_symlink()]
            self._spoilt |= {Path(os.readlink(link)) for link in links}
            self._committed[generation] = without_rows(own, damaged)
            pieces = [(read.collection.box(row), line) for row, line in found.items()]
            self._found[generation] = (
                *self._found.get(generation, ()),
                *(DamagedPiece(tensor.name, box, line) for (tensor, box), line in pieces),
            )
        return list(found.values())

    def damage_found(self) -> dict[int, list[str]]:
        """Return a line by generation for each damaged piece, unless this host holds it whole
        again.
        """
        with self._mutex:
            left = {
                number: still_damaged(found, self._committed[number].collection)
                for number, found in sorted(self._found.items())
            }
        return {n: [piece.reason for piece in pieces] for n, pieces in left.items() if pieces}

    def drop(self, generation: int) -> None:
        """End a committed generation. Its files are reused after the last reader.

        Processes with mapped files would see them change: make workers let go first.
        """
        with self._mutex:
            self._end(generation)
            shutil.rmtree(self.directory / f"damaged-{generation}", ignore_errors=True)
        log.info("event=drop generation=%d host=%s", generation, self.host)

    def _end(self, generation: int) -> None:
        directory = self.generation_directory(generation)
        dropped = self.directory / f"dropped-{generation}"
        os.rename(directory, dropped)
        del self._committed[generation]
        self._found.pop(generation, None)
        if generation not in self._readers:
            self._folders.recycle(dropped)

    def stage(self, pieces: Collection) -> Staged:
        """Make a file for pieces of other hosts, its pages faulted in. Raises ``StoreError`` if
        there is no room.
        """
        layout = lay_out(pieces, {"format": "scalai"})
        with self._folders.makings.begin(is_snapshot=False) as making:
            path = self._folders.new(FETCHED) / "pieces.safetensors"
            try:
                self._folders.make_file(path, layout, making)
            except (OSError, StoreError):
                self._folders.recycle(path.parent)
                raise
        return Staged(path, pieces, layout.begin)

    def unstage(self, staged: Staged) -> None:
        """Give back a file of ``stage``."""
        self._folders.recycle(staged.path.parent)

    def adopt_empty(self, like: HostManifest) -> None:
        """Take an empty part of a generation, so that ``extend`` can fill it.

        ``like`` is any part of it, possibly empty. Does nothing if this host has a part.
        """
        with self._mutex:
            if like.generation in self._committed:
                return
            self._take_part(self._folders.new("snapshot"), empty_part(like, self.host))

    def attach(self, parts: Sequence[tuple[Path, HostManifest]]) -> HostManifest:
        """Make a generation on a disk this host's part of it, by links: nothing is copied.

        The directories are only read, now and later. An existing part gets only its missing pieces.

        Args:
            parts: Directory and manifest of all visible parts of one generation.

        Raises:
            StoreError: They are of different states, or differ from this host's state; or there is
                no room for links and manifest. LayoutError: Their tensors differ.
        """
        try:
            # Before the mutex is held: that file system may hang.
            return self._attach([(path.resolve(), part) for path, part in parts])
        except OSError as error:
            raise StoreError(
                f"{parts[0][0].parent} cannot be attached in {self.directory} ({error.strerror}). "
                "Make room there, or choose another --store-dir."
            ) from error

    def _attach(self, parts: Sequence[tuple[Path, HostManifest]]) -> HostManifest:
        with self._mutex:
            own = self._committed.get(parts[0][1].generation)
            attached = attachment(self.host, [self._unspoilt(*part) for part in parts], own)
            if own is not None and not attached.links:
                return own
            manifest = attached.manifest
            is_new = own is None
            directory = (
                self._folders.new("snapshot")
                if is_new
                else self.generation_directory(manifest.generation)
            )
            for name, target in attached.links.items():
                link = directory / name
                if link.is_symlink():
                    link.unlink()  # left by an earlier owner without a manifest
                os.symlink(target, link)
            if is_new:
                self._take_part(directory, manifest)
            else:
                write_manifest(directory, manifest)
                self._committed[manifest.generation] = manifest
        log.info(
            "event=attached generation=%d step=%d host=%s from=%s files=%d",
            manifest.generation, manifest.step, self.host, parts[0][0].parent, len(attached.links),
        )  # fmt: skip
        return manifest

    def _unspoilt(self, directory: Path, part: HostManifest) -> tuple[Path, HostManifest]:
        files = [directory / stored.name for stored in part.files]
        kept = [number for number, path in enumerate(files) if path not in self._spoilt]
        return directory, part if len(kept) == len(files) else with_files(part, kept)

    def detach(self) -> None:
        """Give up generations with attached files only; the files stay on their disk.

        A damaged generation set aside for an attached one is put back: a person may still repair
        it.
        """
        with self._mutex:
            for number, manifest in list(self._committed.items()):
                folder = self.generation_directory(number)
                if manifest.files and all((folder / f.name).is_symlink() for f in manifest.files):
                    self._end(number)
                    aside = self.directory / f"damaged-{number}"
                    held = aside.iterdir() if aside.is_dir() else ()
                    if all(path.is_symlink() or path.name == MANIFEST for path in held):
                        shutil.rmtree(aside, ignore_errors=True)  # it was attached itself
                    else:
                        os.rename(aside, folder)
                        self.damaged[number] = "it was damaged when the job began"

    def _take_part(self, directory: Path, manifest: HostManifest) -> None:
        """Make a folder this host's part of a generation; set a damaged one of its number aside."""
        number = manifest.generation
        target = self.directory / generation_name(number)
        if self.damaged.pop(number, None) is not None and target.is_dir():
            os.rename(target, self.directory / f"damaged-{number}")
        write_manifest(directory, manifest)
        rename_durably(directory, target)
        self._committed[number] = manifest

    def extend(
        self,
        generation: int,
        staged: Staged,
        extras: Extras | None = None,
        fingerprints: npt.NDArray[np.uint64] | None = None,
    ) -> HostManifest:
        """Add a filled file of ``stage`` to a committed part, so that its pieces outlive their
        source hosts.

        The file is moved in under a new name; then one rename replaces the manifest.

        Args:
            generation: Number, committed here or passed to ``adopt_empty``.
            staged: Filled file. It becomes the last of the manifest's files.
            extras: Values for pieces of other hosts.
            fingerprints: Fingerprint of each piece, [rows]; None: computed here.

        Raises:
            StoreError: The generation is not committed here.
        """
        path, pieces = staged.path, staged.pieces
        if fingerprints is None:
            fingerprints = staged.fingerprints(np.arange(len(pieces)))
        with self._mutex:
            directory, own = self.generation_directory(generation), self.manifest(generation)
            name = _free_name(directory, path.parent.name)
            file = StoredFile(name, path.stat().st_size)
            grown = extended(own, file, pieces, staged.begins, fingerprints, extras)
            # A file without a manifest does no harm if this process ends here.
            os.rename(path, directory / file.name)
            try:
                write_manifest(directory, grown)
            except OSError:
                os.rename(directory / file.name, path)  # its room can be given back
                raise
            path.parent.rmdir()
            self._committed[generation] = grown
        return grown

    def add_states(self, generation: int, states: Mapping[str, Json]) -> HostManifest:
        """Keep states of ranks, by coordinate, with this host's part of a generation.

        Raises:
            StoreError: The generation is not committed here, or there is no room.
        """
        with self._mutex:
            own = self.manifest(generation)
            grown = replace(own, rank_state={**own.rank_state, **states})
            try:
                self._replace(generation, grown)
            except OSError as error:
                raise StoreError(
                    f"{self.directory} has no room for the states of {len(states)} ranks "
                    f"({error.strerror})."
                ) from error
        return grown

    def prove(self, generation: int) -> None:
        """Mark fetched pieces as proven, after a proof of the whole state."""
        with self._mutex:
            own = self._committed.get(generation)
            if own is not None and own.unproven:
                self._replace(generation, replace(own, unproven=()))

    def forget_unproven(self, generation: int) -> HostManifest | None:
        """Take unproven files out of this host's part; drop a part without other files.

        The files are removed, not reused: somebody may still read them.

        Returns:
            The manifest left, or None.
        """
        with self._mutex:
            own = self._committed.get(generation)
            if own is None or not own.unproven:
                return own
            kept = proven_only(own)
            if not kept.files:
                self.drop(generation)
                return None
            self._replace(generation, kept)
            for number in own.unproven:
                (self.generation_directory(generation) / own.files[number].name).unlink()
        return kept

    def _replace(self, generation: int, manifest: HostManifest) -> None:
        write_manifest(self.generation_directory(generation), manifest)
        self._committed[generation] = manifest

    def copy_to(self, generation: int, directory: Path) -> Path:
        """Copy the missing files of a committed generation to ``<directory>/generation-<n>/<host>``
        (``copy_part``).
        """
        with self.open_rows(generation) as rows:
            return copy_part(rows, directory)

    def archive(self, generation: int, directory: Path, *, own_only: bool) -> int:
        """Check all pieces of a committed generation, then copy it by ``write_hidden``; one copy at
        a time.

        A drop may happen meanwhile. Returns the bytes written.

        Raises:
            StoreError: It was given up. DamageError: A piece differs from its fingerprint.
        """
        with self.open_rows(generation) as rows:
            with self._mutex:
                archive = self._archive = HiddenCopy(generation)
            try:
                for row in range(len(rows.manifest.collection)):
                    archive.check()
                    rows.check(row)
                return write_hidden(rows, directory, own_only=own_only, check=archive.check)
            finally:
                with self._mutex:
                    self._archive = None

    def give_up_archive(self, reason: str) -> None:
        """End the running copy, if any."""
        with self._mutex:
            if self._archive is not None:
                self._archive.give_up(reason)

    def _give_up_dropped_archive(self) -> None:
        """Give up the copy of a dropped generation: a snapshot needs its room."""
        with self._mutex:
            if self._archive is not None and self._archive.generation not in self._committed:
                self.give_up_archive(
                    "a snapshot needed the room of the generation that was copied: the store has "
                    "too little for a third one meanwhile. Give it more (--store-budget-gb, "
                    "--shm-size), or take snapshots less often."
                )

    def _adopt_generation(self, number: int, path: Path) -> None:
        try:
            self._committed[number] = read_own_manifest(path, self.host, number)
        except StoreError as error:
            self.damaged[number] = str(error)
            log.warning("event=damaged generation=%d host=%s: %s", number, self.host, error)


def _free_name(directory: Path, stem: str) -> str:
    """Numbers of folders begin again with each owner of a store."""
    name, number = f"{stem}.safetensors", 2
    while os.path.lexists(directory / name):
        name, number = f"{stem}.{number}.safetensors", number + 1
    return name
