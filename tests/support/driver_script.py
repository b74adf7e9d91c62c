"""A script in the place of ``nvidia-smi``."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

Install = Callable[[str], None]


def install_into(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return a function that puts a shell script named nvidia-smi first on the search path."""

    def install(script: str) -> None:
        path = folder / "nvidia-smi"
        path.write_text("#!/bin/sh\n" + script)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin")
    return install
