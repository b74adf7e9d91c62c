"""What a conversion leaves behind it: no open file, nothing of what it replaced, no traceback."""

import contextlib
import os
import warnings
from pathlib import Path

import pytest

from scalai.converters.checkpoint import WriteOptions
from scalai.converters.layouts import layout_named
from scalai.converters.streaming import Gatherer
from scalai.converters.work import plan_work
from scalai.launch import cli
from support.checkpoints import write


def run(*arguments: object) -> int:
    """Run ``scalai`` and return its exit code."""
    with pytest.raises(SystemExit) as ended:
        cli.main([*map(str, arguments)])
    return int(ended.value.code or 0)


def test_a_link_that_names_itself_is_refused_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "one")
    os.symlink("loop", tmp_path / "loop")
    assert run("reshard", tmp_path / "one", tmp_path / "loop", "--tp", "2") == 2
    assert "is a link that leads nowhere" in capsys.readouterr().err


def test_a_file_that_was_replaced_leaves_nothing(tmp_path: Path) -> None:
    write(tmp_path / "one")
    (tmp_path / "there").write_text("a file")
    assert run("reshard", tmp_path / "one", tmp_path / "there", "--tp", "2", "--overwrite") == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "there"]


def test_files_that_were_read_are_closed_with_their_reader(tmp_path: Path) -> None:
    source = write(tmp_path / "one")
    target = layout_named("torch_dist").lay_out(source, WriteOptions({"tp": 2}))
    work = plan_work(source, target, 1 << 20)
    with warnings.catch_warnings(record=True) as reported:
        warnings.simplefilter("always")
        with Gatherer(work, source.directory) as gatherer:
            for task in work.tasks:
                for unit in task.units:
                    gatherer.gather(unit)
            assert open_files(source.directory)
            reader = gatherer.files.opened(source.placed.files[0].path)
        assert len(open_files(source.directory)) == 1  # somebody reads it
        assert os.pread(reader.descriptor, 2, 0) == b"PK"
        del reader
        assert not open_files(source.directory)
    assert not reported


def open_files(directory: Path) -> list[str]:
    """Return the files below a directory that this process has open."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return [path for path in found if path.startswith(str(directory))]
