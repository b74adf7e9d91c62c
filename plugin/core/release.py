"""Version numbers of releases."""

import re


def numbers_of(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version; empty without any."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in found[0].split(".")) if found is not None else ()
