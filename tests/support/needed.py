"""What the tests of a file need, looked for without an import: each process of a run reads all
files, and the frameworks would cost it seconds."""

from importlib.util import find_spec

import pytest


def need(module: str, how: str) -> None:
    """Skip the tests of the file that calls this where ``module`` is not installed. ``how``: the
    way to have it."""
    if find_spec(module) is None:
        pytest.skip(f"{module} is not installed: {how}", allow_module_level=True)
