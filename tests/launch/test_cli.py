"""Commands around a job: what they refuse before they ask it, and how they read its answer."""

from pathlib import Path

import pytest

from scalai.core.messages.shared import JsonText
from scalai.launch import cli
from scalai.launch.config.endpoint import read_ending, write_card, write_ending
from scalai.launch.coordinator.person_calls import Resume, Scale
from scalai.runtime.calls import Server

TOKEN = b"a secret of this job"


@pytest.mark.fault
@pytest.mark.parametrize("command", [["status"], ["scale", "--nproc", "1"]])
def test_a_name_that_is_no_folder_is_refused(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main([*command, "--store-dir", str(tmp_path), "--job", "../x"])
    assert "job name '../x' cannot name a directory" in capsys.readouterr().err


@pytest.mark.fault
@pytest.mark.parametrize("command", [["status"], ["scale", "--nproc", "1"], ["clean"]])
def test_a_store_that_others_may_write_to_is_refused(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tmp_path / "store" / "j"
    job.mkdir(parents=True)
    job.chmod(0o777)
    with pytest.raises(SystemExit, match="3"):
        cli.main([*command, "--store-dir", str(job.parent), "--job", "j"])
    assert "may be written to by other users" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [[], ["--dry-run"]], ids=["done", "dry"])
def test_a_wish_that_is_only_tried_says_that_nothing_is_changed(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "j"
    folder.mkdir(mode=0o700)
    answer = JsonText.of({"reason": "2 ranks: TP1·PP1·DP2"})
    server = Server(("127.0.0.1", 0), TOKEN, Scale | Resume, lambda *call: answer)
    assert not isinstance(server.address, str)
    write_card(folder, server.address, TOKEN)
    for wish in (["scale", "--nproc", "2"], ["resume", "--generation", "3"]):
        with pytest.raises(SystemExit) as ended:
            cli.main([*wish, *flags, "--store-dir", str(tmp_path), "--job", "j"])
        said = capsys.readouterr().out
        assert not ended.value.code and answer.value()["reason"] in said
        assert ("nothing is changed" in said) is bool(flags)
    server.close()


@pytest.mark.parametrize("command", [["verify", "a"], ["reshard", "a", "b"]])
@pytest.mark.parametrize("workers", ["0", "-1"])
def test_a_number_of_processes_is_one_or_more(
    command: list[str], workers: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main([*command, "--workers", workers])
    assert "is no number of processes" in capsys.readouterr().err


def test_the_status_of_a_job_that_has_ended_says_how(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "j"
    folder.mkdir(mode=0o700)
    tmp_path.chmod(0o700)
    write_ending(folder, 75, "saved to the durable directory")
    with pytest.raises(SystemExit, match="1"):
        cli.main(["status", "--store-dir", str(tmp_path), "--job", "j"])
    said = capsys.readouterr().err
    assert "no job 'j' runs here" in said
    assert "exit code 75: saved to the durable directory" in said
    write_card(folder, ("127.0.0.1", 1), TOKEN)
    assert read_ending(folder) == "", "another one runs"
