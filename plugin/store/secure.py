"""Folders and files with a check of their owner.

A store lies in a place writable by others (``/dev/shm``), under a guessable name. So each level
from the root down is opened by the descriptor of the level above, without following links, and must
belong to this user and be closed to writing by others, before anything in it is read, made, cut or
locked. A root may also be a shared folder with the sticky bit, such as ``/dev/shm`` itself; then
this user must own the level below it.

Levels above a root are not checked: a writer there can remove a store, but not replace it by files
of this user.

A durable directory gets the same checks. A file server may map this user to another number (NFS
with ``root_squash``): the owner of a new file of this process counts as this user.
"""

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from scalai.core.errors import StoreError

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
STORE, DURABLE = "--store-dir", "--durable-dir"
"""Flags for the choice of another root."""


class Folder:
    """An open folder owned by this user and closed to writing by others.

    ``descriptor`` stays valid until it is closed, despite renames. Errors recommend ``flag`` for
    another root.
    """

    def __init__(self, path: Path, descriptor: int, flag: str = STORE) -> None:
        self.path = path
        self.descriptor = descriptor
        self.flag = flag

    @classmethod
    def open(
        cls, path: Path, *, make: bool = False, may_be_shared: bool = False, flag: str = STORE
    ) -> "Folder":
        """Open a folder by its path.

        Args:
            make: Make it and its parents if missing, for this user alone.
            may_be_shared: Others may own it or write to it, if it has the sticky bit.

        Raises:
            FileNotFoundError: It is not there.
            StoreError: It is not this user's, or cannot be opened or made.
        """
        with _refusing(path, flag):
            if make:
                path.parent.mkdir(parents=True, exist_ok=True)
        return cls._open(path, path, None, flag, make=make, may_be_shared=may_be_shared)

    @classmethod
    def _open(
        cls, path: Path, name: str | Path, above: int | None, flag: str, *, make: bool,
        may_be_shared: bool,
    ) -> "Folder":  # fmt: skip
        with _refusing(path, flag):
            if make:
                try:
                    os.mkdir(name, 0o700, dir_fd=above)
                except FileExistsError:
                    pass  # its owner is checked below
            descriptor = os.open(name, _FOLDER, dir_fd=above)
        try:
            _check_folder(path, descriptor, flag, may_be_shared=may_be_shared)
        except StoreError:
            os.close(descriptor)
            raise
        return cls(path, descriptor, flag)

    def below(self, name: str, *, make: bool = False) -> "Folder":
        """Open a folder in this one; arguments and errors as of ``open``."""
        return self._open(
            self.path / name, name, self.descriptor, self.flag, make=make, may_be_shared=False
        )

    def open_file(self, name: str, flags: int) -> int:
        """Return a descriptor of a file in this folder; a new one is for this user alone.

        Args:
            flags: As of ``os.open``, without ``O_TRUNC``: the owner is checked first.

        Raises:
            FileNotFoundError: It is not there.
            StoreError: It is a link, no plain file or another user's, or cannot be opened or made.
        """
        assert not flags & os.O_TRUNC, "cut it once it is open"
        path = self.path / name
        with _refusing(path, self.flag):
            # Without O_NONBLOCK the open of a pipe would wait.
            flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
            descriptor = os.open(name, flags, 0o600, dir_fd=self.descriptor)
        try:
            self._check_file(path, os.fstat(descriptor))
        except StoreError:
            os.close(descriptor)
            raise
        return descriptor

    def check_files(self) -> None:
        """Raise ``StoreError`` unless each entry is a plain file of this user, closed to writing by
        others.
        """
        for name in os.listdir(self.descriptor):
            with suppress(FileNotFoundError):  # it was removed meanwhile
                status = os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
                self._check_file(self.path / name, status)

    def _check_file(self, path: Path, status: os.stat_result) -> None:
        if not stat.S_ISREG(status.st_mode) or not _is_own(status.st_uid, self.descriptor):
            raise StoreError(
                f"{path} is no plain file of user {os.geteuid()} (its owner is user "
                f"{status.st_uid}). Remove it, or choose another {self.flag}."
            )
        if status.st_mode & _WRITABLE_BY_OTHERS:
            raise StoreError(
                f"{path} may be written to by other users (its mode is "
                f"{stat.S_IMODE(status.st_mode):03o}). If its content is yours, chmod go-w {path}; "
                f"else remove it, or choose another {self.flag}."
            )

    def read(self, name: str) -> bytes:
        """Return the content of a file in this folder. Raises as ``open_file`` does."""
        descriptor = self.open_file(name, os.O_RDONLY)
        with os.fdopen(descriptor, "rb") as file, _refusing(self.path, self.flag):
            return file.read()

    def write(self, name: str, content: bytes, *, is_durable: bool = False) -> None:
        """Write a file aside and rename it into place, for this user alone.

        ``is_durable``: it survives a power cut once this returns. Raises ``StoreError`` on failure;
        the old content stays.
        """
        aside = f".{name}.{os.getpid()}"
        self.remove(aside)
        with _refusing(self.path / name, self.flag):
            try:
                descriptor = self.open_file(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
                with os.fdopen(descriptor, "wb") as file:
                    file.write(content)
                    if is_durable:
                        file.flush()
                        os.fsync(descriptor)
                os.rename(aside, name, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)
            except OSError:
                self.remove(aside)
                raise
            if is_durable:
                os.fsync(self.descriptor)

    def remove(self, name: str) -> None:
        """Remove a file in this folder, if it is there."""
        with _refusing(self.path / name, self.flag):
            try:
                os.unlink(name, dir_fd=self.descriptor)
            except FileNotFoundError:
                pass

    def reach(self, name: str) -> str:
        """Return a short path to ``name``, valid in this process while the folder is open: sockets
        have room for 107 bytes.
        """
        return f"/proc/self/fd/{self.descriptor}/{name}"

    def close(self) -> None:
        """Close it; a second call does nothing."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __enter__(self) -> "Folder":
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def open_below(root: Path, *names: str, make: bool = False, flag: str = STORE) -> Folder:
    """Open ``<root>/<names>`` of a store, each level checked; ``make`` missing ones.

    Raises:
        FileNotFoundError: A level is not there.
        StoreError: A level is not this user's, or cannot be opened or made; names it.
    """
    tries = 3 if make else 1  # the end of another job may just be removing its empty folder
    while True:
        tries -= 1
        try:
            folder = Folder.open(root, make=make, may_be_shared=True, flag=flag)
            for name in names:
                with folder:
                    folder = folder.below(name, make=make)
            return folder
        except FileNotFoundError:
            if not tries:
                raise


def _check_folder(path: Path, descriptor: int, flag: str, *, may_be_shared: bool) -> None:
    status, user = os.fstat(descriptor), os.geteuid()
    is_writable = bool(status.st_mode & _WRITABLE_BY_OTHERS)
    if may_be_shared and (status.st_uid == 0 or _is_own(status.st_uid, descriptor)):
        # Others can add to it, but not rename or remove this user's entries.
        is_writable = is_writable and not status.st_mode & stat.S_ISVTX
    elif not _is_own(status.st_uid, descriptor):
        below = ", a folder of your own below it for example" if may_be_shared else ""
        raise StoreError(
            f"{path} belongs to user {status.st_uid}, this is user {user}. Choose another "
            f"{flag}{below}, or remove that folder if it should not be there."
        )
    if is_writable:
        raise StoreError(
            f"{path} may be written to by other users (its mode is "
            f"{stat.S_IMODE(status.st_mode):03o}). Look through what is in it, then: chmod go-w "
            f"{path}; or choose a folder below it as {flag}."
        )


def _is_own(owner: int, folder: int) -> bool:
    """True if ``owner`` is this user, by the numbers of this open folder's file system."""
    if owner == os.geteuid():
        return True
    name = f".probe-{secrets.token_hex(8)}"
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        probe = os.open(name, flags, 0o600, dir_fd=folder)
    except OSError:
        return False  # nobody else may write there, or this process may not
    try:
        return os.fstat(probe).st_uid == owner
    finally:
        os.close(probe)
        os.unlink(name, dir_fd=folder)


@contextmanager
def _refusing(path: Path, flag: str) -> Iterator[None]:
    """Turn ``OSError`` into a ``StoreError`` naming ``path``; ``FileNotFoundError`` stays."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        why = error.strerror or str(error)
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            why = "it is a symbolic link, or not what it should be"
        raise StoreError(f"{path} cannot be used ({why}). Choose another {flag}.") from error
