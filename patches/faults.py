"""How a state is refused that was taken with other degrees than it can be put back with."""

from collections.abc import Mapping

from scalai.core.errors import RefusedError


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
