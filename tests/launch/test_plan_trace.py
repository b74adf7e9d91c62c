"""``scalai plan --trace`` says what policies make of devices that come and go."""

import json
from pathlib import Path
from typing import Any

import pytest

from scalai.launch.cli import main

TRACES = Path(__file__).parents[2] / "examples" / "traces"
MODEL = "[model]\nlayers = 12\nhidden = 768\nheads = 12\nseq = 512\nvocab = 50304\n"
EVENTS = "time_min,gpus,kind\n0,16,\n35,8,planned\n70,4,failure\n105,0,\n110,7,\n150,,end\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.toml").write_text(MODEL)
    return tmp_path


def run(folder: Path, events: str, *words: str) -> int:
    (folder / "t.csv").write_text(events)
    given = ("--model", folder / "model.toml", "--global-batch-size", "64", "--gpu", "a100-40gb")
    with pytest.raises(SystemExit) as end:
        main(["plan", "--trace", str(folder / "t.csv"), *map(str, given), *words])
    return int(end.value.code or 0)


def replayed(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("events", "words", "way_out"),
    [
        ("", "", "It needs a header such as time_min,gpus,kind"),
        ("time_min\n0\n", "", "have one called gpus"),
        ("gpus\n8\n", "", "have one of time_s, time_min and time_h"),
        ("time_min,gpus\n0,8\n0,4\n", "", "sort the lines by time"),
        ("time_min,gpus\n0,0\n9,0\n", "", "at no time is there a device"),
        (EVENTS, "--gpus 8", "leave out --gpus"),
        (EVENTS, "--until 200", "leave out --until"),
        (EVENTS, "--start tp5", "Give other degrees for 16"),
        (EVENTS, "--start tp4,pp4,dp2", "they need 32 devices"),
        (EVENTS, "--degrees 8=tp4 --degrees 8=tp2", "two entries for 8 devices"),
        (EVENTS, "--degrees 8=tp4,pp4", "they need 16 devices at least"),
        (EVENTS, "--degrees 8=tp2,mbs7", "Give other degrees for 8"),
        (EVENTS, "--micro-batch-size 7", "Use a global batch of"),
    ],
)
def test_what_cannot_be_replayed_is_refused_with_the_way_out(
    folder: Path, events: str, words: str, way_out: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder, events, *words.split()) == 3
    captured = capsys.readouterr()
    assert way_out in captured.err and not captured.out


@pytest.mark.parametrize("words", ["--until 90", "--start tp2", "--degrees 8=tp2",
                                   "--checkpoint-every 5", "--storage-gb-s 2"])  # fmt: skip
def test_flags_of_a_trace_without_one_are_refused(
    folder: Path, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--model", folder / "model.toml", "--global-batch-size", "64", "--gpus", "8")
    with pytest.raises(SystemExit) as end:
        main(["plan", *map(str, given), *words.split()])
    assert end.value.code == 3
    assert f"{words.split()[0]} is about a trace; name it" in capsys.readouterr().err


def test_a_trace_that_is_no_file_or_no_text_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", "--model", str(folder / "model.toml"), "--global-batch-size", "64", "--trace"]
    (folder / "raw.csv").write_bytes(b"\xff\xfe\x00time")
    for path, way_out in (("none.csv", "is no file"), ("raw.csv", "cannot be read")):
        with pytest.raises(SystemExit) as end:
            main([*words, str(folder / path)])
        assert end.value.code == 3 and way_out in capsys.readouterr().err


def test_where_nothing_ever_fits_the_nearest_that_does_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    large = MODEL.replace("12\nhidden = 768", "96\nhidden = 12288").replace("12\nseq", "96\nseq")
    (folder / "model.toml").write_text(large)
    assert run(folder, "time_min,gpus\n0,2\n9,1\n20,0\n") == 3
    assert "the fewest on which it does" in capsys.readouterr().err


def test_a_policy_has_its_steps_and_where_all_time_went(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--start", "tp2,pp2", "--degrees", "16=tp2,pp2", "--degrees", "4=tp4", "--json")
    assert run(folder, EVENTS, *words, "--checkpoint-every", "60") == 0
    said = replayed(capsys)
    assert set(said["policies"]) == {"ours", "dp-only", "fixed", "checkpoint", "table"}
    assert said["seconds"] == 150 * 60 and not said["end_is_assumed"]
    for policy in said["policies"].values():
        assert 0 < policy["steps"] <= said["ideal_steps"]
        assert policy["goodput"] == pytest.approx(policy["steps"] / said["ideal_steps"])
        assert policy["useful_s"] + sum(policy["lost_s"].values()) == pytest.approx(9000)
        assert policy["lost_s"]["waiting"] >= 300  # there is no device for 5 minutes
        assert policy["timeline"][-1]["end_s"] == 9000
    ours, fixed = said["policies"]["ours"], said["policies"]["fixed"]
    # 16 devices are never there again: fixed degrees wait ever after.
    assert fixed["lost_s"]["waiting"] == pytest.approx(115 * 60)
    assert ours["steps"] > fixed["steps"] and ours["lost_s"]["redone"] < 300
    assert said["policies"]["checkpoint"]["lost_s"]["redone"] > 1800


def test_the_table_names_every_policy_and_what_is_assumed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder, "time_min,gpus\n0,8\n40,3\n80,8\n") == 0
    text = capsys.readouterr().out
    for word in ("ours", "dp-only", "fixed", "checkpoint", "always the best at no cost", "--until"):
        assert word in text


def test_more_devices_than_any_layout_takes_are_idle(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder, "time_min,gpus\n0,100000\n40,0\n", "--json") == 0
    ours = replayed(capsys)["policies"]["ours"]
    assert ours["goodput"] == pytest.approx(1)
    used = ours["timeline"][0]["gpus"] - ours["idle_device_s"] / 2400
    assert 0 < used <= 64 * 12 * 12


def test_what_is_given_counts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def lost(*words: str) -> dict[str, float]:
        assert run(folder, EVENTS, "--json", *words) == 0
        return dict(replayed(capsys)["policies"]["checkpoint"]["lost_s"])

    usual = lost("--relaunch", "10")
    assert lost("--relaunch", "100")["reconfiguration"] > usual["reconfiguration"] + 200
    often = lost("--relaunch", "10", "--checkpoint-every", "1")
    assert often["redone"] < 60 < usual["redone"]
    slow = lost("--relaunch", "10", "--storage-gb-s", "0.1")
    assert slow["reconfiguration"] > usual["reconfiguration"]
    with pytest.raises(SystemExit) as end:
        main(["plan", "--trace", "t.csv", "--relaunch", "-1"])
    assert end.value.code == 2


def test_the_published_trace_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--model",
        str(TRACES / "tenplex.toml"),
        "--global-batch-size",
        "128",
        "--gpu",
        "a6000",
    ]
    words += ["--calibrate", str(TRACES / "tenplex_steps.csv"), "--source", "tenplex", "--json"]
    with pytest.raises(SystemExit) as end:
        main(["plan", "--trace", str(TRACES / "tenplex.csv"), "--precision", "fp16", *words])
    assert not end.value.code
    said = replayed(capsys)
    assert said["seconds"] == 538 * 60 and len(said["events"]) == 16
    assert said["calibrated_by_rows"] == 3
