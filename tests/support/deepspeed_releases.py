"""Other releases of DeepSpeed, installed beside the present one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PIP = [sys.executable, "-m", "pip"]


def installed(release: str, folder: Path) -> Path:
    """Install a release, or skip the test where the package index cannot be reached; return what
    goes before the installed one."""
    asked = subprocess.run(
        [*PIP, "index", "versions", "deepspeed", "--retries", "1"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    if asked.returncode != 0:
        pytest.skip(f"the package index cannot be reached: {asked.stderr.strip()}")
    command = [*PIP, "install", "--quiet", "--no-deps", "--no-build-isolation"]
    command += ["--target", str(folder), f"deepspeed=={release}"]
    subprocess.run(command, check=True, env={**os.environ, "DS_BUILD_OPS": "0"}, timeout=240)
    return folder
