"""How a job is refused that cannot be elastic: everything in the way at once."""

from collections.abc import Iterable

from scalai.core.errors import RefusedError


def refuse_all(faults: Iterable[str]) -> None:
    """Raise ``RefusedError`` that lists what is in the way, unless nothing is."""
    listed = sorted(set(faults))
    if listed:
        raise RefusedError(
            "this job cannot be elastic:\n  "
            + "\n  ".join(listed)
            + "\nChange this, or run without --elastic."
        )
