"""A bound for the memory that one piece of work may take."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def bounded_memory(size_bytes: int) -> Iterator[None]:
    """Let this process take so much more memory at most, where the system can say what it has.

    A few bytes of a pickle can ask for any amount (a memo index, a ``bytearray``): a MemoryError
    is better than the end of the machine.
    """
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            used = next(int(line.split()[1]) << 10 for line in file if line.startswith("VmData"))
    except (OSError, StopIteration):
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limits = [used + size_bytes, *(limit for limit in (soft, hard) if limit >= 0)]
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def short_text(where: object, error: MemoryError) -> str:
    """Say that reading took more memory than there is: which of two causes it has does not show."""
    return (
        f"memory ran out while {where} was read ({str(error) or 'MemoryError'}). Let the command "
        "have more (`ulimit -d -v`, the limit of this container); where it has enough, a size in "
        "this file is damaged: use another checkpoint."
    )
