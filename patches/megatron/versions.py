"""Which versions of megatron-core are known to work."""

import re

from scalai.core.errors import RefusedError

OLDEST, NEWEST = (0, 14), (0, 19)
"""Both included. The names that the hooks and the adapter rely on are the same in all of them."""

ALLOW_UNKNOWN_VERSION = "SCALAI_ALLOW_UNKNOWN_VERSION"
"""Environment variable: 1 to go on with a version that was never tried."""


def check_version(version: str, *, allow_unknown: bool) -> str | None:
    """Accept a version of megatron-core, or say why not.

    Args:
        version: ``megatron.core.__version__``, such as ``0.16.1`` or ``0.19.0rc0``.
        allow_unknown: Go on with a version that was never tried.

    Returns:
        A warning for the log, or None where the version is known.

    Raises:
        RefusedError: The version is unknown, and unknown ones are not allowed.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is not None and OLDEST <= (int(found[1]), int(found[2])) <= NEWEST:
        return None
    known = f"{_dotted(OLDEST)} to {_dotted(NEWEST)}"
    if allow_unknown:
        return f"megatron-core {version} was never tried, {known} were; going on as allowed"
    raise RefusedError(
        f"megatron-core {version} was never tried; {known} were. Install one of them, or set "
        f"{ALLOW_UNKNOWN_VERSION}=1 to go on anyway: fingerprints still prove every move of the "
        "state, but other faults may stay unseen."
    )


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
