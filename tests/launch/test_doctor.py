"""``scalai doctor`` names what is in an elastic job's way, and its exit code says whether."""

import json
import os
from pathlib import Path

import pytest
from torch.utils.file_baton import FileBaton

from scalai.launch.cli import main

pytestmark = pytest.mark.fault


def doctor(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[object, str]:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *argv])
    return ended.value.code, capsys.readouterr().out


def test_a_host_that_can_run_a_job_is_told_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"train_batch_size": 12, "scalai": {}}))
    flags = ["--nproc-per-node", "4", "train.py", "--deepspeed_config", str(config)]
    code, report = doctor(capsys, "--store-dir", str(tmp_path), "--", *flags)
    assert code == 0, report
    assert f"free in {tmp_path}" in report
    assert "deepspeed" in report and ", hooked: tried" in report
    assert "4  TP1·PP1·DP4" in report
    assert "mount  " in report


def test_what_is_in_the_way_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, report = doctor(capsys, "--", "train.py", "--deepspeed")
    assert code == 3
    assert "no  job            not elastic: no --elastic, and no DeepSpeed configuration" in report
    packages = tmp_path / "deepspeed-0.9.0.dist-info"
    packages.mkdir()
    (packages / "METADATA").write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.9.0\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code, report = doctor(capsys)
    assert code == 3
    assert "no  deepspeed      0.9.0, not hooked: deepspeed 0.9.0 was never tried" in report


def test_a_lock_that_a_killed_build_left_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build that was killed, one that runs, and one that may: torch's own locks."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    batons = {}
    for name in ("killed", "running", "young"):
        (tmp_path / name).mkdir()
        batons[name] = FileBaton(str(tmp_path / name / "lock"))
        assert batons[name].try_acquire()
    for name in ("killed", "young"):
        descriptor = batons[name].fd
        assert descriptor is not None
        os.close(descriptor)
    for name in ("killed", "running"):
        os.utime(tmp_path / name / "lock", (0, 0))
    code, report = doctor(capsys)
    assert code == 3
    lines = [line for line in report.splitlines() if " extensions " in line]
    assert [line.split()[0] for line in lines] == ["no", "ok", "ok"]
    assert f"{tmp_path}/killed/lock" in lines[0] and "remove it" in lines[0]
    assert f"process {os.getpid()} builds" in lines[1]
    (tmp_path / "killed" / "lock").unlink()
    batons["running"].release()
    assert doctor(capsys)[0] == 0


def test_a_store_that_cannot_be_written_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    code, report = doctor(capsys, "--store-dir", str(tmp_path / "store"))
    assert code == 3
    assert f"no  shared memory  {tmp_path} may not be written by this user" in report


def test_a_store_that_is_not_there_yet_is_said_to_be_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, report = doctor(capsys, "--store-dir", str(tmp_path / "store"))
    assert f"free in {tmp_path} ({tmp_path}/store is not there yet, and will be made)" in report


def test_a_store_that_is_not_ones_own_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store"
    store.mkdir()
    store.chmod(0o777)
    code, report = doctor(capsys, "--store-dir", str(store))
    assert code == 3 and "no  shared memory" in report
    assert f"{store} may be written to by other users" in report
    store.chmod(0o1777)
    assert "may take the store away" not in doctor(capsys, "--store-dir", str(store))[1]
    tmp_path.chmod(0o777)
    assert "may take the store away" in doctor(capsys, "--store-dir", str(store))[1]
