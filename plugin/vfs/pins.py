"""Open generations: their bytes stay until the end of all readers.

In a store, hard links keep the files (``store/pinned.py``); elsewhere open descriptors do: a
durable directory never writes a file anew. A pin ends with the close of its last file. It ends
earlier, and reads fail from then on with the reason,

* when the store needs the room of a dropped generation;
* ``KEEP_S`` after the drop of the generation: a forgotten reader must not hold memory.
"""

import errno
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from scalai.core.errors import StoreError
from scalai.store.files import read_at
from scalai.store.generation import UnitedGeneration
from scalai.store.lock import LOCK
from scalai.store.pinned import PinFolder, is_same_file

KEEP_S = 600.0
"""Seconds for which an open generation stays readable after its drop."""

log = logging.getLogger(__name__)


class Pin:
    """A generation with kept files. Made by ``Pins.acquire``; each holder releases it once."""

    def __init__(self, pins: "Pins", generation: UnitedGeneration) -> None:
        self._pins, self.generation = pins, generation
        self._descriptors: dict[tuple[int, int], int] = {}
        self._links: dict[tuple[int, int], Path] = {}
        self._kept: list[tuple[Path, os.stat_result]] = []
        self._pid = os.getpid()
        self.holders = 0
        self.dropped_at: float | None = None
        self.ended: str | None = None
        try:
            self._hold()
        except BaseException:
            self.close()
            raise

    def _hold(self) -> None:
        number = self.generation.generation
        parts = zip(self.generation.hosts, self.generation.directories, strict=True)
        for part, (manifest, directory) in enumerate(parts):
            assert directory is not None, "it was read from there"
            is_in_store = (directory.parent / LOCK).is_file()
            for file, stored in enumerate(manifest.files):
                path = directory / stored.name
                if is_in_store and not path.is_symlink():
                    link = self._pins.folder(directory.parent).pin(directory, number, stored.name)
                    self._links[part, file] = link
                    status = link.lstat()
                else:
                    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                    self._descriptors[part, file] = descriptor
                    status = os.fstat(descriptor)
                self._kept.append((path, status))

    @property
    def is_own(self) -> bool:
        """This process made it; a fork inherits pins of its parent."""
        return os.getpid() == self._pid

    @property
    def is_dropped(self) -> bool:
        """The generation is gone from its directory; another one may have its number there."""
        return not all(is_same_file(status, path) for path, status in self._kept)

    def read(self, part: int, file: int, begin: int, size: int) -> bytearray:
        """Bytes of a file of a part, exactly ``size``. Raises ``OSError``."""
        data = bytearray(size)
        if self.ended is not None:
            raise OSError(errno.EIO, self.ended)
        link = self._links.get((part, file))
        if link is None:
            read_at(self._descriptors[part, file], memoryview(data), begin)
            return data
        # Opened for each read: a descriptor would keep memory that the store needs.
        try:
            descriptor = os.open(link, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise OSError(errno.EIO, self._expired("the store needed the room")) from None
        try:
            read_at(descriptor, memoryview(data), begin)
        finally:
            os.close(descriptor)
        return data

    def _expired(self, why: str) -> str:
        return (
            f"generation {self.generation.generation} was dropped while it was read, and its pin "
            f"has expired: {why}. Open the file again, on a newer generation."
        )

    def expire(self) -> None:
        """End it for its age."""
        self.ended = self._expired(f"it was kept for {self._pins.keep_s:.0f} s")
        log.warning("event=pin_expired generation=%d: %s", self.generation.generation, self.ended)
        self.close()

    def close(self) -> None:
        """Release the files; a second call does nothing."""
        for link in self._links.values() if self.is_own else ():
            link.unlink(missing_ok=True)
            with suppress(OSError):
                link.parent.rmdir()
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def release(self) -> None:
        """Release one holder."""
        self._pins.release(self)


class Pins:
    """The open generations of one process. Methods may be called from several threads.

    Args:
        keep_s: See ``KEEP_S``.
        clock: Seconds, ascending.
    """

    def __init__(self, keep_s: float = KEEP_S, clock: Callable[[], float] = time.monotonic) -> None:
        self.keep_s, self._clock = keep_s, clock
        self._mutex = threading.RLock()
        self._held: list[Pin] = []
        self._folders: dict[tuple[int, Path], PinFolder] = {}

    def folder(self, host_directory: Path) -> PinFolder:
        """Folder of this process's pins in a host's directory."""
        key = os.getpid(), host_directory
        with self._mutex:
            if key not in self._folders:
                self._folders[key] = PinFolder(host_directory)
            return self._folders[key]

    def acquire(self, generation: UnitedGeneration) -> Pin:
        """Pin of a generation, with one holder more.

        Raises:
            OSError: It went meanwhile, or cannot be kept.
        """
        with self._mutex:
            for pin in self._held:
                if pin.generation is generation and pin.ended is None and pin.is_own:
                    break
            else:
                try:
                    pin = Pin(self, generation)
                except StoreError as error:
                    raise OSError(errno.EIO, str(error)) from error
                self._held.append(pin)
            pin.holders += 1
            return pin

    def release(self, pin: Pin) -> None:
        """Take one holder away; the last one ends the pin."""
        with self._mutex:
            pin.holders -= 1
            if not pin.holders:
                pin.close()
                self._held.remove(pin)

    def sweep(self) -> None:
        """End the pins of generations dropped ``keep_s`` ago. Call it now and then."""
        now = self._clock()
        with self._mutex:
            for pin in self._held:
                if pin.ended is not None or not pin.is_dropped:
                    continue
                if pin.dropped_at is None:
                    pin.dropped_at = now
                elif now - pin.dropped_at >= self.keep_s:
                    pin.expire()

    def close(self) -> None:
        """End all pins."""
        with self._mutex:
            for pin in self._held:
                pin.close()
            while self._folders:
                self._folders.popitem()[1].close()
