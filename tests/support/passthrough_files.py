"""A file system in user space that shows a folder.

``python -m support.passthrough_files FOLDER POINT`` serves it until it is unmounted.
"""

import os
import sys
from collections.abc import Callable
from typing import Any

import mfusepy


def told(call: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a call of the system's returns; its error is that of this file system."""
    try:
        return call(*arguments)
    except OSError as error:
        raise mfusepy.FuseOSError(error.errno) from error


class Passthrough(mfusepy.Operations):
    """Calls by path, as mfusepy names them; files are descriptors."""

    use_ns = True

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def getattr(self, path: str, fh: int | None = None) -> dict[str, int]:
        found = told(os.lstat, self._folder + path)
        names = ("st_mode", "st_nlink", "st_size", "st_uid", "st_gid")
        times = {f"st_{each}time": getattr(found, f"st_{each}time_ns") for each in "amc"}
        return {name: getattr(found, name) for name in names} | times

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *told(os.listdir, self._folder + path)]

    def mkdir(self, path: str, mode: int) -> None:
        told(os.mkdir, self._folder + path, mode)

    def rmdir(self, path: str) -> None:
        told(os.rmdir, self._folder + path)

    def unlink(self, path: str) -> None:
        told(os.unlink, self._folder + path)

    def rename(self, old: str, new: str) -> None:
        told(os.rename, self._folder + old, self._folder + new)

    def link(self, target: str, source: str) -> None:
        told(os.link, self._folder + source, self._folder + target)

    def symlink(self, target: str, source: str) -> None:
        told(os.symlink, source, self._folder + target)

    def readlink(self, path: str) -> str:
        return str(told(os.readlink, self._folder + path))

    def chmod(self, path: str, mode: int) -> None:
        told(os.chmod, self._folder + path, mode)

    def chown(self, path: str, uid: int, gid: int) -> None:
        told(os.chown, self._folder + path, uid, gid)

    def utimens(self, path: str, times: tuple[int, int]) -> None:
        told(lambda: os.utime(self._folder + path, ns=times))

    def truncate(self, path: str, length: int, fh: int | None = None) -> None:
        told(os.truncate, self._folder + path, length)

    def open(self, path: str, flags: int) -> int:
        return int(told(os.open, self._folder + path, flags))

    def create(self, path: str, mode: int, fi: object = None) -> int:
        return int(told(os.open, self._folder + path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, mode))

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return bytes(told(os.pread, fh, size, offset))

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        return int(told(os.pwrite, fh, data, offset))

    def fsync(self, path: str, datasync: int, fh: int) -> None:
        told(os.fsync, fh)

    def release(self, path: str, fh: int) -> None:
        told(os.close, fh)

    def statfs(self, path: str) -> dict[str, int]:
        found = told(os.statvfs, self._folder)
        return {name: getattr(found, name) for name in dir(found) if name.startswith("f_")}


if __name__ == "__main__":
    mfusepy.FUSE(Passthrough(sys.argv[1]), sys.argv[2], foreground=True)
