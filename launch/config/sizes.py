"""Sizes in bytes, read and written for people, in powers of ten; numbers of processes."""

import argparse

from scalai.core.errors import UsageError

_UNITS = ("B", "kB", "MB", "GB", "TB")


def size_text(size_bytes: int) -> str:
    """Return a size such as ``1.20 GB``."""
    size, unit = float(size_bytes), "B"
    for unit in _UNITS:
        if size < 1000 or unit == "TB":
            break
        size /= 1000
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"


def parse_size(text: str) -> int:
    """Read ``500MB``, ``2 GB`` or a number of bytes. Raises ``UsageError`` for anything else."""
    bare = text.strip().lower().removesuffix("b")
    factor = 1
    for power, unit in enumerate(("k", "m", "g", "t"), 1):
        if bare.endswith(unit):
            bare, factor = bare[:-1], 1000**power
    try:
        size = int(float(bare) * factor)
    except ValueError:
        raise UsageError(f"{text!r} is no size. Write 500MB or 2GB.") from None
    if size <= 0:
        raise UsageError(f"{text!r} is no size of memory. Write 500MB or 2GB.")
    return size


def worker_number(text: str) -> int:
    """Read ``--workers``, for argparse."""
    if text.isdecimal() and int(text):
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no number of processes (1 or more)")
