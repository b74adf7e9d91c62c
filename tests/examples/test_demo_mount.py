"""The demonstration of the files of a mount: where it fails it says why, and leaves nothing."""

import re
import subprocess
import sys
from pathlib import Path

import demo_mount
import pytest
from demo_hosts import DemoError

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_where_nothing_can_be_mounted_it_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    """In a process of its own, because it adopts orphans from then on."""
    script = f"""
import sys
sys.path.insert(0, {str(EXAMPLES)!r})
import demo, demo_mount
def refuse(command, job, point, *others):
    raise demo_mount.DemoError(f"/dev/fuse is not there: {{point}}")
demo_mount.scalai = refuse
sys.argv = ["demo.py", "--data-view", "mount", "--out", {str(tmp_path / "out")!r}]
sys.exit(demo.main())
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=100
    )
    told = re.search("The demonstration failed: /dev/fuse is not there: (.*)", done.stderr)
    assert done.returncode == 1
    assert told, done.stderr
    assert not Path(told[1]).parent.exists()


def test_a_mount_that_is_refused_gives_the_commands_own_words(tmp_path: Path) -> None:
    (tmp_path / "point").mkdir()
    (tmp_path / "point" / "file").touch()
    source = tmp_path / "corpus.jsonl"
    source.write_text("{}\n")
    with pytest.raises(DemoError, match="is not empty: a mount would hide that"):
        demo_mount.mount(source, tmp_path / "point", tmp_path, tmp_path / "log")


def test_a_text_without_a_paragraph_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("\n\n \n")
    with pytest.raises(DemoError, match="has no text"):
        demo_mount.write_corpus(tmp_path / "text", tmp_path / "corpus.jsonl")


@pytest.mark.parametrize(
    ("said", "is_kept"),
    [
        ("proven: no sample was skipped, and none was seen twice", True),
        ("proven from step 3 on: no sample was skipped, and none was seen twice", False),
        ("BROKEN: samples were skipped", False),
    ],
)
def test_the_verdict_is_what_the_command_says_of_all_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, is_kept: bool
) -> None:
    monkeypatch.setattr(demo_mount, "scalai", lambda *_, **__: f"consumed\n{said}\n")
    check = demo_mount.check_ledger(tmp_path)
    assert (check.is_kept, check.found) == (is_kept, said)
