"""One tree of errors: catch ``ScalaiError`` for all of them, or one leaf.

Every message has the finding, the expectation and the way out.
"""

import errno
from collections.abc import Iterable

from scalai.core.exit_codes import DIFFERS, FAILED, REFUSED, WRONG_USAGE


class ScalaiError(Exception):
    """A refusal or failure of Scalai. ``exit_code`` is the command's."""

    exit_code = FAILED


class UsageError(ScalaiError, ValueError):
    """Wrong flags or a wrong configuration file."""

    exit_code = WRONG_USAGE


class RefusedError(ScalaiError, ValueError):
    """Unusable input: a damaged state, an unsupported job or version."""

    exit_code = REFUSED


class LayoutError(RefusedError):
    """Shards do not make up their tensors: holes, overlaps, unequal shapes."""


class StoreError(RefusedError):
    """A Tensor Store cannot be opened, has no room or holds a damaged generation."""


class DamageError(StoreError):
    """Bytes of a generation differ from its manifest."""


class RoomError(StoreError):
    """A Tensor Store has no room for optional content."""


class ProofError(ScalaiError):
    """Two states have different fingerprints, but should be equal."""

    exit_code = DIFFERS


class MismatchError(ProofError):
    """Content from other ``hosts`` differs from their committed content."""

    def __init__(self, text: str, hosts: tuple[str, ...]) -> None:
        super().__init__(text)
        self.hosts = hosts


class MemoryShortError(ScalaiError):
    """Memory is too short for a piece of work."""


def is_memory_short(error: BaseException) -> bool:
    """Return True for errors of exhausted memory: Python's own, ours, or the kernel's (ENOMEM)."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError | MemoryShortError)


class PeerError(ScalaiError):
    """Another process of the job is gone, silent, unknown, or has answered with an error."""


class SilentError(PeerError):
    """Another process exists, or may exist, and does not answer in time."""


class AbsentError(PeerError):
    """Nobody listens at an address: the host itself refuses the connection."""


class UnprovenError(PeerError):
    """A listener has not proven its knowledge of the job's token: another program, another job's
    agent, or an attacker on the way.

    Its answers are worth no more than its silence.
    """


class VersionError(UnprovenError):
    """A process of another release listens at an address, without a common protocol version."""


class MessageError(PeerError):
    """Bytes that are no message of the expected kind, or a message that cannot be sent."""


class AnswerError(PeerError):
    """Another process has answered with an error: it lives, and refuses the request.

    ``kind`` is the name of the error's class there.
    """

    def __init__(self, text: str, kind: str = "ScalaiError") -> None:
        super().__init__(text)
        self.kind = kind


class StaleError(ScalaiError):
    """An agent outside of the job calls: it was lost, replaced or released."""


class ReplacedError(ScalaiError):
    """An agent of an earlier coordinator calls: it must join this one."""


class EndedError(UsageError):
    """An agent wants to join an ended job."""


def refuse_all(faults: Iterable[str]) -> None:
    """Raise ``RefusedError`` listing the faults, if any."""
    listed = sorted(set(faults))
    if listed:
        raise RefusedError(
            "this job cannot be elastic:\n  "
            + "\n  ".join(listed)
            + "\nChange this, or run without --elastic."
        )
