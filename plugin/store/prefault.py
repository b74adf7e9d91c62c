"""Touch pages before they are needed: the first touch is what is slow about memory, not the
copy."""

import ctypes
import mmap
import os

MADV_POPULATE_READ = 22
MADV_POPULATE_WRITE = 23
"""Linux 5.14 and later; Python's mmap does not name them."""

_STEP_BYTES = 64 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def advise(buffer: mmap.mmap, low: int, high: int, advice: int) -> bool:
    """Apply ``advice`` to bytes ``[low, high)`` of a writable mapping, widened to whole pages;
    False if the kernel refuses.

    Through ctypes because, unlike ``mmap.madvise``, that lets other threads run meanwhile.
    """
    low -= low % mmap.PAGESIZE
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    while low < high:
        step = min(_STEP_BYTES, high - low)
        if _libc.madvise(address + low, step, advice) != 0:
            return False
        low += step
    return True


def prefault(descriptor: int, low: int, high: int) -> None:
    """Touch bytes ``[low, high)`` of a file whose room is already allocated, for writing."""
    if low >= high:
        return
    mapping = mmap.mmap(descriptor, high)
    try:
        if not advise(mapping, low, high, MADV_POPULATE_WRITE):
            zeros = bytes(1 << 20)
            for start in range(low, high, len(zeros)):
                os.pwrite(descriptor, zeros[: high - start], start)
    finally:
        mapping.close()
