"""``scalai autoscale``: files of jobs, devices, and its hands on engines."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from scalai.core.errors import ScalaiError, UsageError
from scalai.launch.commands.autoscale_hands import Kubernetes, Slurm
from scalai.launch.commands.autoscale_jobs import JobWatch, Seen, read_job
from scalai.launch.commands.autoscale_view import measured, view
from scalai.launch.commands.autoscaler import Devices, read_devices
from scalai.launch.commands.job_history import history_of, read_resize
from support.command import logged
from support.kubernetes_api import Api


def file(folder: Path, text: str, name: str = "gpt") -> Path:
    path = folder / f"{name}.toml"
    path.write_text(text)
    return path


def test_a_file_names_what_is_not_usual(tmp_path: Path) -> None:
    found = read_job(file(tmp_path, "devices = [1, 4]"))
    assert (found.job, found.asked, found.steps, found.engine) == ("gpt", 4, None, "gpt")
    text = 'devices = [2, 8]\nasked = 4\nsteps = 900\ncoordinator = "h:1"\ntoken_file = "/t"'
    assert read_job(file(tmp_path, text)).devices == (2, 8)


@pytest.mark.fault
@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("devices = [0, 4]", "expected [least, most]"),
        ("devices = [4, 2]", "expected [least, most]"),
        ("", "expected [least, most]"),
        ("devices = [1, 4]\nprioritty = 2", "Did you mean priority?"),
        ("devices = [1, 4]\nsteps = 0", "steps = 0"),
        ("devices = [1, 4]\nasked = 8", "asked = 8; expected a whole number from 1 to 4"),
        ('devices = [1, 4]\nasked = "2"', "asked = '2'; expected a whole number"),
        ("devices = [1, 4]\nasked = 2.5", "asked = 2.5; expected a whole number"),
        ('devices = [1, 4]\nsteps = "900"', "steps = '900'; expected a whole number"),
        ("devices = [1, 4]\nsteps = true", "steps = True; expected a whole number"),
        ('devices = [1, 4]\npriority = "high"', "priority = 'high'; expected a number above 0"),
        ("devices = [1, 4]\npriority = inf", "priority = inf; expected a number above 0"),
        ("devices = [1, 4]\njob = 5", "job = 5; expected a text"),
        ("devices = [1, 4_000_000_000]", "expected [least, most]"),
        (f"devices = [1, 4]\nx = {'[' * 9999}", "cannot be read"),
        ("devices = [1, 4]\nbatch = [64, 256]", "keeps its global batch"),
        ('devices = [1, 4]\ncoordinator = "h:1"', "token_file"),
        ('devices = [1, 4]\ncoordinator = "h"\ntoken_file = "t"', "is not HOST:PORT"),
        ('devices = [1, 4]\njob = "../x"', "cannot name a directory"),
        ("devices = [1, 4", "cannot be read"),
    ],
)
def test_a_wrong_file_says_what_is_expected(text: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="(?s).*" + why.replace("[", r"\[").replace("?", r"\?")):
        read_job(file(tmp_path, text))


def test_devices_are_a_number_a_grid_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "devices").write_text("2x8\n")
    assert read_devices("4") == Devices(1, 4)
    assert read_devices(str(tmp_path / "devices")) == Devices(2, 8)
    assert Devices(2, 8).without(9) == Devices(0, 8)
    assert Devices(1, 8).without(3) == Devices(1, 5)
    assert Devices(1, 8).without(8) == Devices(1, 8).without(9) == Devices(0, 8)
    assert read_devices("0x8") == Devices(0, 8)
    for wrong in ("x", "-1", "2x", "0", "8x0"):
        with pytest.raises(UsageError, match="expected N"):
            read_devices(wrong)
    (tmp_path / "devices").write_text("8x0\n")
    with pytest.raises(UsageError, match="holds '8x0"):
        read_devices(str(tmp_path / "devices"))


@pytest.mark.fault
def test_a_wrong_call_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = ("autoscale", "--devices", "4", "--jobs")
    assert logged(capsys, *jobs, tmp_path / "none")[0] == 2
    tmp_path.chmod(0o777)
    code, said = logged(capsys, *jobs, tmp_path, "--once")
    assert code == 1 and "may be written to by other" in said


def report(at: float, ranks: int, step: int, paused_s: float | None, **more: object) -> object:
    return {
        "at": at, "step": step, "after": f"TP1·PP1·DP{ranks}", "workers": {"a": ranks},
        "reason": "a person asked", "kind": "grow", "seconds": {"first_step": 1.0},
        **({} if paused_s is None else {"paused_s": paused_s}), **more,
    }  # fmt: skip


def test_a_jobs_own_steps_and_pauses_say_what_it_would_gain(tmp_path: Path) -> None:
    """100 steps in 100 s on one device, and 100 in 60 s on two; no pause counts."""
    reports = [report(1000.0, 1, 0, None), report(1101.0, 2, 101, 1.0)]
    history = history_of("gpt", [(read_resize(each), each) for each in reports])
    status = {"workers": {"a": 2}, "hosts": {"a": {"slots": 4}}, "step": 202, "phase": "running"}
    history = replace(history, until=(1161.0, 202))
    assert measured(history) == {
        (1, 1): pytest.approx(1.0, rel=0.02), (1, 2): pytest.approx(0.6, rel=0.02),
    }  # fmt: skip
    seen = Seen(status=status, at=1161.0, history=history)
    job = view(
        read_job(file(tmp_path, "devices = [1, 4]\nsteps = 1000")), seen, 1161.0, 4, most=4,
        is_valid=lambda size: size != 3,
    )  # fmt: skip
    assert job.devices == 2 and job.remaining == 798 and job.pause_s == 1.0
    assert job.standing.since_s == pytest.approx(60.0)
    assert job.rates[3] == 0.0 and job.rates[4] > job.rates[2] > job.rates[1] > 0
    assert job.rates[2] == pytest.approx(1 / 0.6, rel=0.05)


# ------------------------------------------------------------------ engines


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[JobWatch]:
    text = f'devices = [8, 64]\nstore_dir = "{tmp_path}"'
    found = JobWatch(read_job(file(tmp_path, text)), 8, asks_sizes=False)
    yield found
    found.close()


def test_pods_are_whole_hosts(api: Api, watch: JobWatch) -> None:
    hand = Kubernetes(8)
    assert "4 -> 2 pods" in hand.give(watch, 16, is_dry=True)
    assert api.jobs["gpt"]["spec"]["parallelism"] == 4
    hand.give(watch, 16, is_dry=False)
    assert api.jobs["gpt"]["spec"]["parallelism"] == 2
    assert not hand.can_have(watch.file, Seen(), 12)


SQUEUE = """\
#!/bin/sh
echo "$0 $*" >>{log}
case $0 in *squeue) printf '{rows}' ;; esac
"""


def slurm(folder: Path, monkeypatch: pytest.MonkeyPatch, rows: str) -> Path:
    """Commands that note their calls; the recipes have the real ones."""
    log, programs = folder / "calls", folder / "bin"
    programs.mkdir()
    for name in ("squeue", "scontrol", "scancel"):
        (programs / name).write_text(SQUEUE.format(log=log, rows=rows))
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    return log


def test_a_smaller_array_has_a_lower_throttle_and_its_last_tasks_drain(
    tmp_path: Path, watch: JobWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job of this name that is no array is left alone."""
    rows = r"7 0 RUNNING\n7 3 RUNNING\n9 N/A RUNNING\n7 1 RUNNING\n7 4 PENDING\n6 N/A PENDING\n"
    log = slurm(tmp_path, monkeypatch, rows)
    assert "7_1, 7_3 drain" in Slurm(8).give(watch, 8, is_dry=False)
    calls = [line.rpartition("/")[2] for line in log.read_text().splitlines()]
    assert calls[0].startswith("squeue --me ")
    assert calls[1:] == [
        "scontrol update JobId=7 ArrayTaskThrottle=1", "scancel --signal=USR1 7_1",
        "scancel --signal=USR1 7_3",
    ]  # fmt: skip


@pytest.mark.fault
def test_an_array_without_tasks_left_does_not_grow(
    tmp_path: Path, watch: JobWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = r"7 0 RUNNING\n7 4 PENDING\n8 0 PENDING\n"
    log = slurm(tmp_path, monkeypatch, rows)
    assert "1 tasks run; throttle 2" in Slurm(8).give(watch, 16, is_dry=True)
    with pytest.raises(ScalaiError, match="1 that wait, of 3"):
        Slurm(8).give(watch, 24, is_dry=False)
    assert "scontrol" not in log.read_text()


@pytest.mark.fault
@pytest.mark.parametrize("rows", ["", r"7 0 RUNNING\n8 0 RUNNING\n"])
def test_an_array_that_cannot_be_told_is_not_touched(
    rows: str, tmp_path: Path, watch: JobWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = slurm(tmp_path, monkeypatch, rows)
    with pytest.raises(ScalaiError, match="expected one that runs"):
        Slurm(8).give(watch, 8, is_dry=False)
    assert "scontrol" not in log.read_text()
