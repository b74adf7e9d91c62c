"""How a job is refused that cannot change its layout: everything in the way at once."""

from collections.abc import Iterable, Mapping

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


def refuse_changed_axes(before: Mapping[str, int], here: Mapping[str, int]) -> None:
    """Compare the degrees that have to stay.

    Raises:
        RefusedError: One of them changed.
    """
    for axis, size in before.items():
        if here[axis] != size:
            raise RefusedError(
                f"{axis}={size} when the state was taken and {axis}={here[axis]} now; this degree "
                f"cannot change. Start with {axis}={size}."
            )
