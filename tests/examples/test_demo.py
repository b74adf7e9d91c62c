"""The demonstration itself, as a person runs it."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from pydoc_data import topics

import psutil
import pytest
from demo_frameworks import FRAMEWORKS

from scalai.vfs.mounts import find_mount
from support.agents import MARK

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo.py"


HAS_FUSE = Path("/dev/fuse").exists() and shutil.which("fusermount3") is not None
STORIES = [
    *(pytest.param(("--framework", name), "scalai-demo.png", id=name) for name in FRAMEWORKS),
    pytest.param(
        ("--data-view", "mount"), "scalai-demo-ledger.svg", id="mount",
        marks=pytest.mark.skipif(not HAS_FUSE, reason="no /dev/fuse here, or no fuse3"),
    ),
]  # fmt: skip


@pytest.mark.campaign
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("story", "picture"), STORIES)
def test_every_check_of_the_demonstration_holds(
    tmp_path: Path, story: tuple[str, str], picture: str
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(topics.topics.values()))
    demo = subprocess.Popen(
        [sys.executable, str(DEMO), *story, "--data", str(text), "--out", str(tmp_path / "out")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    said, errors = demo.communicate(timeout=840)
    assert demo.returncode == 0, said + errors
    assert "✗" not in said
    # Where the fonts are not known yet, matplotlib says so.
    assert not [line for line in errors.splitlines() if "atplotlib" not in line]
    assert (tmp_path / "out" / picture).is_file()
    assert not list(Path("/dev/shm").glob(f"scalai-demo-{demo.pid}-*"))


@pytest.mark.campaign
@pytest.mark.timeout(300)
@pytest.mark.skipif(not HAS_FUSE, reason="no /dev/fuse here, or no fuse3")
def test_a_demonstration_that_is_stopped_leaves_neither_mount_nor_process(tmp_path: Path) -> None:
    demo = subprocess.Popen(
        [sys.executable, str(DEMO), "--data-view", "mount", "--out", str(tmp_path / "out")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", MARK: str(tmp_path)},
    )  # fmt: skip
    assert demo.stdout is not None
    lines = iter(demo.stdout.readline, "")
    point = next(line.split()[1] for line in lines if line.startswith("  mount "))
    next(line for line in lines if "host a starts" in line)  # it trains
    assert find_mount(Path(point)) is not None
    demo.send_signal(signal.SIGTERM)
    _, errors = demo.communicate(timeout=100)
    assert demo.returncode == 1
    assert "Stopped" in errors
    assert find_mount(Path(point)) is None
    assert not Path(point).parent.exists()
    assert not [p for p in psutil.process_iter() if _is_of(p, str(tmp_path))]


def _is_of(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get(MARK) == mark
    except psutil.Error:
        return False
