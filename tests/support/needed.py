"""What the tests of a file need, looked for without an import: each process of a run reads all
files, and the frameworks would cost it seconds."""

from importlib.util import find_spec

import pytest


def need(module: str, how: str, *, of_file: bool = True) -> None:
    """Skip the tests of the file that calls this, or the calling test, where ``module`` is not
    installed. ``how``: the way to have it."""
    if find_spec(module) is None:
        pytest.skip(f"{module} is not installed: {how}", allow_module_level=of_file)
