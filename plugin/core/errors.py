"""One tree of errors: catch ``ScalaiError`` for all of them, or one leaf.

Every message says what was found, what was expected and the way out.
"""

import errno
from collections.abc import Iterable


class ScalaiError(Exception):
    """Anything that Scalai refuses or fails at. ``exit_code`` is what a command ends with."""

    exit_code = 1


class UsageError(ScalaiError, ValueError):
    """Wrong flags or a wrong configuration file."""

    exit_code = 2


class RefusedError(ScalaiError, ValueError):
    """Input that cannot be used: a damaged state, an unsupported job or version."""

    exit_code = 3


class LayoutError(RefusedError):
    """Shards that do not make up their tensors: holes, overlaps, unequal shapes."""


class StoreError(RefusedError):
    """A Tensor Store that cannot be opened, has no room or holds a damaged generation."""


class DamageError(StoreError):
    """Bytes of a generation are not what its manifest says."""


class RoomError(StoreError):
    """A Tensor Store has no room for what is not needed at once."""


class ProofError(ScalaiError):
    """Two states that should be equal have different fingerprints."""

    exit_code = 4


class MismatchError(ProofError):
    """What other ``hosts`` have given is not what they had committed."""

    def __init__(self, text: str, hosts: tuple[str, ...]) -> None:
        super().__init__(text)
        self.hosts = hosts


class MemoryShortError(ScalaiError):
    """There is less memory than a piece of work takes."""


def is_memory_short(error: BaseException) -> bool:
    """Whether an error says that memory ran out: Python's own, ours, or the kernel's (ENOMEM)."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError | MemoryShortError)


class PeerError(ScalaiError):
    """Another process of the job is gone, silent, unknown, or has answered with an error."""


class SilentError(PeerError):
    """Another process is there, or may be, and does not answer in time."""


class AbsentError(PeerError):
    """Nobody listens at an address: the host itself refuses the connection."""


class UnprovenError(PeerError):
    """Who listens at an address has not proven that it knows the job's token: another program, an
    agent of another job, or somebody on the way. What it says is worth no more than its silence."""


class VersionError(UnprovenError):
    """A process of another release listens at an address: it speaks no version of the protocol
    that this one does."""


class MessageError(PeerError):
    """Bytes that are no message of the kind that is expected, or a message that cannot be sent."""


class AnswerError(PeerError):
    """Another process has answered with an error: it lives, and refuses what it was asked for.

    ``kind`` is the name of the error's class there.
    """

    def __init__(self, text: str, kind: str = "ScalaiError") -> None:
        super().__init__(text)
        self.kind = kind


class StaleError(ScalaiError):
    """An agent that is not in the job (any more) calls: it was lost, replaced or released."""


class ReplacedError(ScalaiError):
    """An agent calls that another coordinator had taken in, which is gone: it joins this one."""


class EndedError(UsageError):
    """A job has ended that an agent wants to join."""


def refuse_all(faults: Iterable[str]) -> None:
    """Raise ``RefusedError`` that lists what is in the way, unless nothing is."""
    listed = sorted(set(faults))
    if listed:
        raise RefusedError(
            "this job cannot be elastic:\n  "
            + "\n  ".join(listed)
            + "\nChange this, or run without --elastic."
        )
