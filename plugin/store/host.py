"""The Tensor Store of one host: generations of one job in a directory owned by one agent.

``<store_dir>/<job>/<host>/`` holds ``generation-<n>`` (committed), ``snapshot-<k>`` (being written;
sealed once it has a manifest), ``dropped-<n>`` (still being read), ``fetched-<k>`` (bytes of other
hosts), ``recycled`` and the lock. A rename of one directory commits; committed files are never
written again. ``held.py`` has the committed part; this module writes.
"""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from scalai.core.errors import RoomError, StoreError
from scalai.core.jsonable import Json
from scalai.core.messages.worker_messages import RankSnapshot, WriteOrder
from scalai.core.tensors.collection import Collection
from scalai.core.tensors.fingerprint import CommitStatement
from scalai.store.atomic import sync_directory, sync_file
from scalai.store.directory import HostDirectory, Room
from scalai.store.files import contiguous_chunks, write_at
from scalai.store.held import HeldGenerations
from scalai.store.manifest import (
    HostManifest,
    read_own_manifest,
    release_manifests,
    reserve_manifests,
    write_manifest,
)
from scalai.store.parts import Staged, attached_hosts, unchanged
from scalai.store.places import MANIFEST, default_store_dir, generation_name
from scalai.store.snapshot import SnapshotSlot, share_out

log = logging.getLogger(__name__)


class HostStore(HeldGenerations):
    """The open store of one host. Thread-safe; closing releases the lock.

    Opening adopts an earlier owner's committed generations and sealed snapshots, and removes torn
    snapshots.

    Raises:
        StoreError: Another live process has it open, or the directory belongs to another user.
    """

    def __init__(
        self,
        job: str,
        host: str,
        store_dir: Path | None = None,
        budget_bytes: int | None = None,
    ) -> None:
        root = default_store_dir() if store_dir is None else Path(store_dir)
        super().__init__(job, host, HostDirectory(root, job, host))
        self._budget_bytes = budget_bytes
        self._sealed: dict[Path, HostManifest] = {}
        self._unsealed: set[Path] = set()
        self._needed = 0
        """Bytes of this host's last snapshot."""
        self.damaged_snapshots: dict[str, str] = {}
        """Errors of unusable sealed snapshots, by folder name. The folders stay."""
        self._adopt()

    def close(self) -> None:
        """Release the lock. Committed and sealed states stay for the next owner."""
        self._folders.close()

    def __enter__(self) -> "HostStore":
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def sealed(self) -> list[tuple[SnapshotSlot, HostManifest]]:
        """Return the sealed, uncommitted snapshots, lowest step first."""
        with self._mutex:
            found = sorted(self._sealed.items(), key=lambda item: (item[1].step, item[0].name))
        return [
            (SnapshotSlot.sealed(directory, manifest), manifest) for directory, manifest in found
        ]

    def reserve(self, held: Mapping[int, Collection]) -> SnapshotSlot:
        """Make the files for the next snapshot: distinct pieces once, replicas share the work,
        pages faulted in.

        Blocks for seconds a GB for new pages; call it in a thread beside the training. Gives up an
        earlier round's unfinished snapshot and waits for its end.

        Args:
            held: Collection of each rank of this host, by global rank.

        Raises:
            StoreError: There is no room for two generations of these pieces (the message has the
                sizes), or it was given up.
        """
        shares = share_out(held)
        needed = self._needed = sum(share.layout.size_bytes for share in shares)
        with self._folders.makings.begin(is_snapshot=True) as making:
            with self._mutex:
                kept = (sum(f.size_bytes for f in m.files) for m in self._committed.values())
                others = max(0, max(kept, default=0) - needed)
                self._folders.make_room(needed, others, self._budget_bytes, self._is_giving_back)
                directory = self._folders.new("snapshot")
                self._unsealed.add(directory)
            snapshot = SnapshotSlot.reserved(directory, held, shares)
            try:
                reserve_manifests(directory, snapshot.manifest_bytes)
                for share in shares:
                    self._folders.make_file(directory / share.file, share.layout, making)
                making.check()
            except (OSError, StoreError):
                self.discard(snapshot)
                raise
        return snapshot

    def room(self) -> Room:
        """Return the bytes in use, reusable and free."""
        return self._folders.room()

    def most_bytes(self) -> int:
        """Return this store's capacity for generations in bytes, present ones included."""
        room, limit = self.room(), self._budget_bytes
        most = room.in_use + room.reusable + room.free
        return most if limit is None else min(most, limit)

    def check_spare(self, size_bytes: int) -> None:
        """Raise ``RoomError`` if so many bytes for other hosts would take the room of this host's
        next snapshot.

        Ends pins of dropped generations to make room.
        """
        with self._mutex:
            has_room = bool(self._unsealed) or len(self._committed) > 1  # one will go
            own = 0 if has_room else self._needed
            left = self._left()
            if size_bytes + own > left and self._folders.expire_dropped():
                left = self._left()
        if size_bytes + own > left:
            raise RoomError(
                f"replicas of {size_bytes} bytes, beside {own} for this host's next snapshot, do "
                f"not fit into the {left} that are left of {self.directory}. Give it more "
                "(--store-budget-gb, --shm-size), or train without replicas (--replicas 0)."
            )

    def _left(self) -> int:
        room, limit = self.room(), self._budget_bytes
        left = room.free + room.reusable
        return left if limit is None else min(left, limit - room.in_use)

    def copy_unchanged(
        self,
        generation: int,
        staged: Staged,
        stated: Mapping[int, int],
        check: Callable[[], None],
    ) -> dict[int, int]:
        """Copy pieces with the same content from this host's other generations, to avoid a
        transfer. Blocks.

        A copy has bytes of its own, so neither generation depends on the other's files.
        Fingerprints are computed from the copied bytes; differing pieces are fetched.

        Args:
            generation: Number of the pieces' generation.
            staged: Wanted pieces and their file.
            stated: Fingerprint by row, stated by a host with exactly this piece.
            check: Raises if the copy is no longer needed.

        Returns:
            Fingerprints of the copied rows by row, each equal to the stated one.

        Raises:
            OSError: The file cannot be written.
        """
        found: dict[int, int] = {}
        for older in sorted(self.generations(), reverse=True):
            left = {row: value for row, value in stated.items() if row not in found}
            if older != generation and left:
                try:
                    found |= self._copy_from(older, staged, left, check)
                except StoreError as error:  # it was dropped, or one of its files has gone
                    check()
                    log.warning("event=not_copied generation=%d: %s", older, error)
        return found

    def _copy_from(
        self,
        older: int,
        staged: Staged,
        stated: Mapping[int, int],
        check: Callable[[], None],
    ) -> dict[int, int]:
        manifest = self.manifest(older)
        # Attached files lie on a disk: it may be slow or hang.
        if attached_hosts(manifest):
            return {}
        with self.open_rows(older) as rows:
            sources = unchanged(rows.manifest, staged.pieces, stated)
            if not sources:
                return {}
            descriptor = os.open(staged.path, os.O_WRONLY)
            try:
                for row, source in sources.items():
                    check()
                    begin = int(staged.begins[row])
                    for chunk in contiguous_chunks(rows.view(source)):
                        write_at(descriptor, chunk, begin)
                        begin += len(chunk)
            finally:
                os.close(descriptor)
        copied = np.array(list(sources), dtype=np.int64)
        prints = staged.fingerprints(copied).tolist()
        found = dict(zip(copied.tolist(), prints, strict=True))
        damaged = [row for row, value in found.items() if value != stated[row]]
        if damaged:
            log.warning(
                "event=damaged generation=%d host=%s: %d pieces are not what they were, among them "
                "of %r; they are fetched",
                older, self.host, len(damaged), staged.pieces.box(damaged[0])[0].name,
            )  # fmt: skip
        return {row: value for row, value in found.items() if value == stated[row]}

    def stop_reserving(self) -> None:
        """Give up the files still being made: their round has ended."""
        self._folders.makings.give_up()

    def _is_giving_back(self) -> bool:
        """Return True if room will soon be given back: by an ended round's snapshot or a dropped
        generation still being read.
        """
        with self._mutex:
            self._give_up_dropped_archive()
            return bool(self._unsealed) or bool(set(self._readers) - set(self._committed))

    def seal(
        self,
        snapshot: SnapshotSlot,
        *,
        step: int,
        about: Mapping[str, Json],
        parts: Mapping[int, RankSnapshot],
        taken_over: Sequence[tuple[WriteOrder, Sequence[int]]] = (),
    ) -> HostManifest:
        """Write the manifest of a written snapshot and bring its files to disk. It can be committed
        from now on.

        Args:
            snapshot: Result of ``reserve``.
            step: Optimizer steps done.
            about: consumed_samples, degrees, world_size, framework, versions, time.
            parts: Reports of completely written ranks, by global rank. The rows of other ranks are
                left out.
            taken_over: Completed orders of ``SnapshotSlot.take_over`` with their fingerprints.

        Returns:
            The manifest, ``UNNUMBERED`` until the commit.

        Raises:
            StoreError: A report does not fit its order.
        """
        manifest = snapshot.manifest(self.host, step, about, parts, taken_over)
        kept = {stored.name for stored in manifest.files}
        for stored in snapshot.files:
            if stored.name in kept:
                sync_file(snapshot.directory / stored.name)
        with self._mutex:
            for stored in snapshot.files:
                if stored.name not in kept:
                    self._folders.recycle_file(snapshot.directory / stored.name)
            write_manifest(snapshot.directory, manifest)
            self._unsealed.discard(snapshot.directory)
            self._sealed[snapshot.directory] = manifest
        return manifest

    def commit(
        self, snapshot: SnapshotSlot, generation: int, committed: CommitStatement | None = None
    ) -> HostManifest:
        """Make a sealed snapshot the generation of this number; one rename decides.

        Args:
            committed: Coordinator's statement about the whole generation.

        Raises:
            StoreError: The snapshot is not sealed, the number is taken, or there is no room for the
                manifest; in the last case it stays sealed for a later commit.
        """
        with self._mutex:
            directory, target = snapshot.directory, self.directory / generation_name(generation)
            if directory not in self._sealed:
                raise StoreError(
                    f"{directory} is not sealed (sealed: {len(self._sealed)} snapshots, committed: "
                    f"{self.generations()}). Snapshot and seal it first."
                )
            if target.exists():
                raise StoreError(
                    f"{target} exists already. Numbers are never used twice: ask the coordinator "
                    "for a new one."
                )
            manifest = replace(self._sealed[directory], generation=generation, committed=committed)
            try:
                write_manifest(directory, manifest)
                release_manifests(directory)
                os.rename(directory, target)
            except OSError as error:
                raise StoreError(
                    f"{directory} cannot be committed as generation {generation} "
                    f"({error.strerror}); it stays sealed. Make room in {self.directory}."
                ) from error
            sync_directory(self.directory)
            del self._sealed[directory]
            self._committed[generation] = manifest
        log.info(
            "event=commit generation=%d step=%d host=%s bytes=%d pieces=%d",
            generation, manifest.step, self.host, manifest.size_bytes, len(manifest.collection),
        )  # fmt: skip
        return manifest

    def discard(self, snapshot: SnapshotSlot) -> None:
        """Give up a reserved or sealed snapshot; its files are reused."""
        with self._mutex:
            self._sealed.pop(snapshot.directory, None)
            self._unsealed.discard(snapshot.directory)
            self._folders.recycle(snapshot.directory)

    def set_damaged_aside(self) -> None:
        """Rename unusable sealed snapshots, so that later owners skip them. The job goes on without
        them.
        """
        with self._mutex:
            for name in self.damaged_snapshots:
                if (self.directory / name).is_dir():
                    try:
                        os.rename(self.directory / name, self.directory / f"damaged-{name}")
                    except OSError as error:  # an earlier one has that name: nothing is lost
                        log.warning("event=left snapshot=%s: %s", name, error)

    def remove(self) -> None:
        """Close the store and remove its content, and the job's directory after the last host."""
        self._folders.remove()
        with self._mutex:
            for table in (self._committed, self._found, self._sealed, self._unsealed):
                table.clear()

    def _adopt(self) -> None:
        for kind, number, path in self._folders.adopt():
            if kind == "generation":
                self._adopt_generation(number, path)
            elif kind != "snapshot" or not self._adopt_sealed(path):
                self._folders.recycle(path)

    def _adopt_sealed(self, directory: Path) -> bool:
        """Take a sealed snapshot over; False for an unsealed one."""
        if not (directory / MANIFEST).exists():
            return False
        try:
            self._sealed[directory] = read_own_manifest(directory, self.host)
        except StoreError as error:
            self.damaged_snapshots[directory.name] = str(error)
            log.warning("event=damaged snapshot=%s host=%s: %s", directory.name, self.host, error)
        return True
