"""``scalai`` in this process."""

import pytest

from scalai.launch import cli


def run(*words: object) -> int:
    """Run ``scalai`` and return its exit code."""
    with pytest.raises(SystemExit) as ended:
        cli.main([*map(str, words)])
    return int(ended.value.code or 0)
