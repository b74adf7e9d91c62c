"""What the numbers of a release are."""

import re


def numbers_of(version: str) -> tuple[int, ...]:
    """Return the numbers that a version begins with, none where it begins with something else."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in found[0].split(".")) if found is not None else ()
