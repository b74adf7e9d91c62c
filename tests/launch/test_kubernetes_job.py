"""``scalai scale --kubernetes``: an Indexed Job gets another number of pods, or the reason why not
is said."""

from typing import Any

import pytest

from scalai.launch import cli
from support.kubernetes_api import Api


def scale(*flags: str, job: str = "gpt") -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(["scale", "--kubernetes", job, *flags])
    return int(ended.value.code or 0)


def size(api: Api) -> tuple[int, int]:
    spec = api.jobs["gpt"]["spec"]
    return spec["parallelism"], spec["completions"]


def test_both_numbers_of_a_job_change_together(
    api: Api, capsys: pytest.CaptureFixture[str]
) -> None:
    for pods, before in ((7, 4), (1, 7)):
        assert scale("--nnodes", str(pods)) == 0
        assert size(api) == (pods, pods)
        assert f"Job train/gpt: {before} -> {pods} pods" in capsys.readouterr().out


def test_a_dry_run_asks_the_api_server_and_changes_nothing(
    api: Api, capsys: pytest.CaptureFixture[str]
) -> None:
    assert scale("--nnodes", "2", "--dry-run") == 0
    assert size(api) == (4, 4)
    said = capsys.readouterr().out
    assert "nothing is changed" in said and "4 -> 2 pods" in said
    assert api.asked[-1][0] == "PATCH"


@pytest.mark.fault
@pytest.mark.parametrize(
    ("flags", "code", "why"),
    [
        (["--nnodes", "0"], 2, "would complete the Job"),
        (["--nproc", "2"], 2, "the number of pods alone"),
        (["--nnodes", "2", "--degrees", "tp2"], 2, "the number of pods alone"),
    ],
)
def test_what_is_no_number_of_pods_is_refused(
    flags: list[str], code: int, why: str, api: Api, capsys: pytest.CaptureFixture[str]
) -> None:
    assert scale(*flags) == code
    assert why in capsys.readouterr().err
    assert not api.asked


@pytest.mark.fault
@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"spec": {"completionMode": "NonIndexed"}}, "completionMode NonIndexed"),
        ({"spec": {"completions": 9}}, "completions 9"),
        ({"status": {"conditions": [{"type": "Complete", "status": "True"}]}}, "has ended"),
    ],
)
def test_a_job_of_a_fixed_size_is_refused(
    change: dict[str, Any], why: str, api: Api, capsys: pytest.CaptureFixture[str]
) -> None:
    for key, value in change.items():
        api.jobs["gpt"][key] = api.jobs["gpt"].get(key, {}) | value
    before = size(api)
    assert scale("--nnodes", "2") == 3
    assert why in capsys.readouterr().err and size(api) == before


@pytest.mark.fault
def test_a_failed_call_names_the_way_out(api: Api, capsys: pytest.CaptureFixture[str]) -> None:
    assert scale("--nnodes", "2", job="../leases/x") == 3
    assert "404" in capsys.readouterr().err
    assert api.asked[-1][1].endswith("/jobs/..%2Fleases%2Fx")
    for status, why, code in (
        (403, "needs a Role with", 3), (422, "422 a failure", 3), (429, "429 a failure", 1),
        (500, "500 a failure", 1),
    ):  # fmt: skip
        api.status = status
        assert scale("--nnodes", "2") == code
        assert why in capsys.readouterr().err
    api.status = None
    api.jobs["gpt"] = {"kind": "Job"}
    assert scale("--nnodes", "2") == 1
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.fault
def test_outside_of_a_pod_it_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert scale("--nnodes", "2") == 2
    assert "--kubernetes is for pods" in capsys.readouterr().err
