"""The demonstration itself, as a person runs it."""

import os
import subprocess
import sys
from pathlib import Path
from pydoc_data import topics

import pytest
from demo_frameworks import FRAMEWORKS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.campaign
@pytest.mark.timeout(900)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_check_of_the_demonstration_holds(tmp_path: Path, framework: str) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(topics.topics.values()))
    before = set(os.listdir("/dev/shm"))
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "demo.py"), "--framework", framework,
         "--data", str(text), "--out", str(tmp_path / "out")],
        capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=840,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "✗" not in done.stdout
    # Where the fonts are not known yet, matplotlib says so.
    assert not [line for line in done.stderr.splitlines() if "atplotlib" not in line]
    assert (tmp_path / "out" / "scalai-demo.png").is_file()
    left = {name for name in set(os.listdir("/dev/shm")) - before if name.startswith("scalai-demo")}
    assert not left
