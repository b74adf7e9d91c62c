"""``scalai doctor`` names what is in an elastic job's way, and its exit code says whether."""

import json
from pathlib import Path

import pytest

from scalai.launch.cli import main


def doctor(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[object, str]:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *argv])
    return ended.value.code, capsys.readouterr().out


def test_a_host_that_can_run_a_job_is_told_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"train_batch_size": 12, "scalai": {}}))
    flags = ["--nproc-per-node", "4", "train.py", "--deepspeed_config", str(config)]
    code, report = doctor(capsys, "--store-dir", str(tmp_path), "--", *flags)
    assert code == 0, report
    assert f"free in {tmp_path}" in report
    assert "deepspeed" in report and ", hooked: tried" in report
    assert "4  TP1·PP1·DP4" in report


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
