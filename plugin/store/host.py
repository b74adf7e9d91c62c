"""The Tensor Store of one host: generations of one job in a directory that one agent owns.

``<store_dir>/<job>/<host>/`` holds ``generation-<n>`` (committed), ``deposit-<k>`` (being written,
or sealed when it has a manifest), ``dropped-<n>`` (still read by someone), ``fetched-<k>`` (bytes
of other hosts), ``recycled`` and the lock. A rename of one directory commits; nothing committed is
written to again."""

import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from scalai.core.collection import Collection, Columns
from scalai.core.errors import StoreError
from scalai.store.budget import check_budget
from scalai.store.deposit import Deposit, share_out
from scalai.store.directory import HostDirectory
from scalai.store.durable import copy_part
from scalai.store.extension import empty_part, extended, fingerprints_of
from scalai.store.files import lay_out
from scalai.store.manifest import (
    Generation,
    HostManifest,
    StoredFile,
    read_manifest,
    sync_directory,
    write_manifest,
)
from scalai.store.orders import RankDeposit, WriteOrder
from scalai.store.places import MANIFEST, default_store_dir, generation_name, host_directory
from scalai.store.rows import StoredRows

Json = Any

log = logging.getLogger(__name__)


class HostStore:
    """The open store of one host. Methods may be called from several threads; closing ends the
    lock.

    Opening adopts what an earlier owner left: committed generations, sealed deposits; it removes
    torn ones.

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
        self._budget_bytes = budget_bytes
        root = default_store_dir() if store_dir is None else Path(store_dir)
        self.job, self.host = job, host
        self._folders = HostDirectory(host_directory(root, job, host))
        self.directory = self._folders.path
        self._mutex = threading.RLock()
        self._committed: dict[int, HostManifest] = {}
        self._sealed: dict[Path, HostManifest] = {}
        self._readers: dict[int, int] = {}
        self.damaged: dict[int, str] = {}
        """Committed generations that cannot be used, with the reason. They are left as they are."""
        self._adopt()

    def close(self) -> None:
        """Give the lock up. What is committed or sealed stays for the next owner."""
        self._folders.close()

    def __enter__(self) -> "HostStore":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def generations(self) -> list[int]:
        """Return the committed generations, oldest first."""
        with self._mutex:
            return sorted(self._committed)

    def sealed(self) -> list[tuple[Deposit, HostManifest]]:
        """Return the deposits that are sealed and not committed, lowest step first."""
        with self._mutex:
            found = sorted(self._sealed.items(), key=lambda item: (item[1].step, item[0].name))
        return [(Deposit.sealed(directory, manifest), manifest) for directory, manifest in found]

    def manifest(self, generation: int) -> HostManifest:
        """Return the manifest of a committed generation. Raises ``StoreError`` where there is
        none."""
        with self._mutex:
            if generation not in self._committed:
                raise self._unknown(generation)
            return self._committed[generation]

    def generation_directory(self, generation: int) -> Path:
        """Return where a committed generation lies. Raises ``StoreError`` where there is none."""
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

    def reserve(self, held: Mapping[int, Collection]) -> Deposit:
        """Make the files for the next deposit: distinct pieces once, replicas sharing the work,
        pages faulted in.

        Blocks for seconds a GB where pages are new; meant for a thread beside the training.

        Args:
            held: What each rank of this host vouches for, by global rank.

        Raises:
            StoreError: There is no room for two generations of these pieces; names the sizes.
        """
        shares = share_out(held)
        self._check_budget(sum(share.layout.size_bytes for share in shares))
        directory = self._folders.new("deposit")
        try:
            for share in shares:
                self._folders.make_file(directory / share.file, share.layout)
        except (OSError, StoreError):
            self._folders.recycle(directory)
            raise
        return Deposit.reserved(directory, held, shares)

    def seal(
        self,
        deposit: Deposit,
        *,
        step: int,
        about: Mapping[str, Json],
        parts: Mapping[int, RankDeposit],
        taken_over: Sequence[tuple[WriteOrder, Sequence[int]]] = (),
    ) -> HostManifest:
        """State what was deposited and bring it to disk. It can be committed from now on.

        Args:
            deposit: What ``reserve`` returned.
            step: Optimizer steps done.
            about: consumed_samples, degrees, world_size, framework, versions, time.
            parts: The reports of the ranks that wrote all their rows, by global rank. The rows of
                ranks that are missing here are left out.
            taken_over: Orders of ``Deposit.take_over`` that were carried out, with the fingerprints
                of their rows.

        Returns:
            The manifest; its generation is ``UNNUMBERED`` until it is committed.

        Raises:
            StoreError: A report does not fit its order.
        """
        manifest = deposit.manifest(self.host, step, about, parts, taken_over)
        kept = {stored.name for stored in manifest.files}
        for stored in deposit.files:
            if stored.name in kept:
                _sync_file(deposit.directory / stored.name)
            else:
                self._folders.recycle_file(deposit.directory / stored.name)
        write_manifest(deposit.directory, manifest)
        with self._mutex:
            self._sealed[deposit.directory] = manifest
        return manifest

    def commit(self, deposit: Deposit, generation: int) -> HostManifest:
        """Make a sealed deposit the generation of this number; one rename decides.

        Raises:
            StoreError: The deposit is not sealed, or the number is taken.
        """
        with self._mutex:
            directory, target = deposit.directory, self.directory / generation_name(generation)
            if directory not in self._sealed:
                raise StoreError(
                    f"{directory} is not sealed (sealed: {len(self._sealed)} deposits, committed: "
                    f"{self.generations()}). Deposit and seal it first."
                )
            if target.exists():
                raise StoreError(
                    f"{target} exists already. Numbers are never used twice: ask the coordinator "
                    "for a new one."
                )
            manifest = replace(self._sealed[directory], generation=generation)
            write_manifest(directory, manifest)
            os.rename(directory, target)
            sync_directory(self.directory)
            del self._sealed[directory]
            self._committed[generation] = manifest
        log.info(
            "event=commit generation=%d step=%d host=%s bytes=%d pieces=%d",
            generation, manifest.step, self.host, manifest.size_bytes, len(manifest.collection),
        )  # fmt: skip
        return manifest

    def discard(self, deposit: Deposit) -> None:
        """Give up a reserved or sealed deposit; its files are reused."""
        with self._mutex:
            self._sealed.pop(deposit.directory, None)
        self._folders.recycle(deposit.directory)

    @contextmanager
    def open_rows(self, generation: int) -> Iterator[StoredRows]:
        """Give the pieces of a committed generation; their files stay as they are while the block
        runs, also if the generation is dropped meanwhile.

        Raises:
            StoreError: It is not committed here.
        """
        with self._mutex:
            rows = StoredRows(self.generation_directory(generation), self.manifest(generation))
            self._readers[generation] = self._readers.get(generation, 0) + 1
        try:
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

    def drop(self, generation: int) -> None:
        """End a committed generation; its files are reused once nobody reads them.

        Processes that still map the files would see them change: tell workers to let go first.
        """
        with self._mutex:
            directory = self.generation_directory(generation)
            dropped = self.directory / f"dropped-{generation}"
            os.rename(directory, dropped)
            del self._committed[generation]
            is_read = generation in self._readers
        log.info("event=drop generation=%d host=%s", generation, self.host)
        if not is_read:
            self._folders.recycle(dropped)

    def stage(self, pieces: Collection) -> tuple[Path, Columns]:
        """Make a file for pieces of other hosts, its pages faulted in.

        Returns the file and the byte offset of each piece, [rows]. Raises ``StoreError`` where
        there is no room."""
        layout = lay_out(pieces, {"format": "scalai"})
        path = self._folders.new("fetched") / "pieces.safetensors"
        try:
            self._folders.make_file(path, layout)
        except (OSError, StoreError):
            self._folders.recycle(path.parent)
            raise
        return path, layout.begin

    def unstage(self, path: Path) -> None:
        """Give back a file of ``stage``."""
        self._folders.recycle(path.parent)

    def adopt_empty(self, like: HostManifest) -> None:
        """Take part in a generation of which this host has nothing yet, so that it can be extended.

        ``like`` is any part of it. Does nothing where this host has a part already.
        """
        with self._mutex:
            if like.generation in self._committed:
                return
            directory = self._folders.new("deposit")
            empty = empty_part(like, self.host)
            write_manifest(directory, empty)
            os.rename(directory, self.directory / generation_name(like.generation))
            sync_directory(self.directory)
            self._committed[like.generation] = empty

    def extend(
        self,
        generation: int,
        path: Path,
        pieces: Collection,
        begins: Columns,
        of: Generation | None = None,
    ) -> HostManifest:
        """Make what was fetched into a file of ``stage`` more of a committed part of this host.

        So it outlives the hosts that it came from. The file is moved in under a new name, then the
        manifest is replaced by one rename.

        Args:
            generation: It is committed here, or ``adopt_empty`` was called.
            path: The file of ``stage``, filled. It becomes the last of the manifest's files.
            pieces: What it holds.
            begins: Where each piece lies in it, in bytes, [rows].
            of: All parts of the generation: the scalars and rank states of all hosts are kept too.

        Raises:
            StoreError: The generation is not committed here.
        """
        fingerprints = fingerprints_of(path, pieces, begins)
        with self._mutex:
            directory, own = self.generation_directory(generation), self.manifest(generation)
            file = StoredFile(f"{path.parent.name}.safetensors", path.stat().st_size)
            grown = extended(own, file, pieces, begins, fingerprints, of)
            # A file that no manifest names yet does no harm if this ends here.
            os.rename(path, directory / file.name)
            path.parent.rmdir()
            write_manifest(directory, grown)
            self._committed[generation] = grown
        return grown

    def copy_to(self, generation: int, directory: Path) -> Path:
        """Copy a committed generation to ``<directory>/generation-<n>/<host>``; see
        ``copy_part``."""
        with self.open_rows(generation) as rows:
            return copy_part(rows, directory)

    def clear_pool(self) -> None:
        """Remove the files that wait for reuse."""
        self._folders.trim(0)

    def remove(self) -> None:
        """Close the store and remove all that it holds; the job's directory too if it is the last
        host's."""
        with self._mutex:
            self._folders.remove()
            self._committed.clear()
            self._sealed.clear()

    def _adopt(self) -> None:
        """Take over what an earlier owner left."""
        for kind, number, path in self._folders.adopt():
            if kind == "generation":
                try:
                    self._committed[number] = read_manifest(path)
                except StoreError as error:
                    self.damaged[number] = str(error)
                    log.warning("event=damaged generation=%d host=%s: %s", number, self.host, error)
            elif kind != "deposit" or not self._adopt_sealed(path):
                self._folders.recycle(path)

    def _adopt_sealed(self, directory: Path) -> bool:
        """Take a deposit over if it is sealed; False for a torn one."""
        if not (directory / MANIFEST).exists():
            return False
        try:
            manifest = read_manifest(directory)
        except StoreError as error:
            log.warning("event=torn directory=%s: %s", directory, error)
            return False
        self._sealed[directory] = manifest
        return True

    def _check_budget(self, needed: int) -> None:
        """Raise ``StoreError`` unless two generations of ``needed`` bytes fit, beside what others
        have in use."""
        room = self._folders.room()
        log.info(
            "event=reserve host=%s distinct_bytes=%d budget_bytes=%d in_use_bytes=%d "
            "reusable_bytes=%d free_bytes=%d",
            self.host, needed, 2 * needed, room.in_use, room.reusable, room.free,
        )  # fmt: skip
        self._folders.trim(
            check_budget(needed, room, self._budget_bytes, self.host, self.directory)
        )


def _sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
