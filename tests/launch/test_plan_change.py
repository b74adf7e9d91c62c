"""``scalai plan --from`` says what a change moves and takes, draws it, or says the way out."""

import json
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from scalai.launch.cli import main

SCRIPT = (
    "pretrain_gpt.py --num-layers 24 --hidden-size 2048 --num-attention-heads 16 "
    "--seq-length 1024 --max-position-embeddings 1024 --global-batch-size 96 --bf16 "
    "--micro-batch-size 1 --vocab-size 51200 --use-distributed-optimizer --sequence-parallel"
).split()
SVG = "{http://www.w3.org/2000/svg}"


def run(*words: str | Path) -> int:
    with pytest.raises(SystemExit) as end:
        main(["plan", "--gpu", "a100", *map(str, words), "--", *SCRIPT])
    return int(end.value.code or 0)


def content(capsys: pytest.CaptureFixture[str], *words: str | Path) -> dict[str, object]:
    assert run(*words, "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert isinstance(said, dict)
    return said


def test_a_change_is_told_by_bytes_pairs_and_phases(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--from", "tp4 pp4 dp2", "--to", "tp2 pp4 dp3", "--relaunch", "12.5") == 0
    text = capsys.readouterr().out
    assert "TP4·PP4·DP2" in text and "to TP2·PP4·DP3" in text and "as given" in text
    assert "cross between hosts (" in text and "in the order of joining)" in text
    assert "relaunch 12.5 s" in text and " -> host-" in text


def test_json_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    said = content(capsys, "--from", "tp4 pp4 dp2", "--to", "tp2 pp4 dp3")
    to, pairs = said["to"], said["pairs"]
    assert isinstance(to, dict) and isinstance(pairs, list)
    assert sum(pair["bytes"] for pair in pairs) == to["moves"] <= to["unplaced_moves"]
    assert sum(to["seconds"].values()) == pytest.approx(to["total_s"])
    assert sum(host["ranks"] for host in to["hosts"]) == 24 and to["missing"] == 0
    assert not any(pair["from"] == pair["to"] for pair in pairs)


def test_what_to_change_to_is_computed_where_nobody_says_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = content(capsys, "--from", "tp2 pp2 dp2", "--gpus", "7", "--residence", "1e6")
    to, others = said["to"], said["others"]
    assert isinstance(to, dict) and isinstance(others, list) and others
    assert to["tp"] * to["pp"] * to["dp"] + to["idle"] == 7
    assert said["pairs"] == [] and to["moves"] == 0  # one host
    assert all(other["reason"] for other in others)


def test_for_a_moment_nothing_changes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "stays.svg"
    words = ("--from", "tp2 pp2 dp4", "--gpus", "16", "--residence", "1", "--picture", picture)
    assert run(*words) == 0
    assert "nothing changes: no byte moves" in capsys.readouterr().out
    assert "nothing changes" in picture.read_text()


def test_no_time_is_not_the_usual_time(capsys: pytest.CaptureFixture[str]) -> None:
    said = content(capsys, "--from", "tp8 pp2 dp1", "--gpus", "16", "--residence", "0")
    to = said["to"]
    assert isinstance(to, dict) and to["is_stay"] and said["residence_s"] == 0


def test_bytes_that_are_lost_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--from", "tp4 pp4 dp2", "--to", "tp4 pp4 dp1", "--lost", "host-1") == 0
    assert "held by no host that is left" in capsys.readouterr().out


def test_the_picture_has_every_rank_and_every_flow(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "change.svg"
    words = ("--from", "tp4 pp4 dp2", "--to", "tp2 pp4 dp3", "--lost", "host-1")
    said = content(capsys, *words, "--picture", path)
    to, pairs = said["to"], said["pairs"]
    assert isinstance(to, dict) and isinstance(pairs, list)
    root = ElementTree.fromstring(path.read_text())
    squares = [one for one in root.iter(f"{SVG}rect") if one.find(f"{SVG}title") is not None]
    assert len(squares) == 32 + 24
    titles = [str(one.findtext(f"{SVG}title")) for one in root.iter(f"{SVG}path")]
    for pair in pairs:
        assert any(title.startswith(f"{pair['from']} to {pair['to']} ") for title in titles)
    words_drawn = " ".join("".join(one.itertext()) for one in root.iter(f"{SVG}text"))
    assert "host-1, ranks 8 to 15, lost" in words_drawn and "takes" in words_drawn
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for one in root.iter(f"{SVG}rect"):
        assert 0 <= float(one.get("x", "0")) <= width - float(one.attrib["width"])
        assert 0 <= float(one.get("y", "0")) <= height - float(one.attrib["height"])


def test_lines_of_a_host_lie_side_by_side_and_begin_at_its_squares(tmp_path: Path) -> None:
    path = tmp_path / "change.svg"
    words = ("--per-host", "4", "--from", "tp4 pp4 dp2", "--to", "tp4 pp3 dp1")
    assert run(*words, "--picture", path) == 0
    root = ElementTree.fromstring(path.read_text())
    ends: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for one in root.iter(f"{SVG}path"):
        x, y, *_, last = one.attrib["d"].removeprefix("M").split()
        width = float(one.attrib["stroke-width"])
        assert float(x) == 20 + 4 * 18 + 4
        says = str(one.findtext(f"{SVG}title")).replace(" keeps ", " to ").split()
        ends.setdefault(("from", says[0]), []).append((float(y), width))
        if says[2].startswith("host"):
            ends.setdefault(("to", says[2]), []).append((float(last), width))
    assert max(len(lines) for lines in ends.values()) > 1
    for lines in ends.values():
        for (above, upper), (below, lower) in pairwise(sorted(lines)):
            assert below - above >= (upper + lower) / 2 - 0.5, "0.5 is the thinnest line"
        assert sum(width for _, width in lines) <= 16.5


def test_a_large_picture_says_what_it_leaves_out(tmp_path: Path) -> None:
    path = tmp_path / "large.svg"
    assert run("--from", "tp8 pp6 dp6", "--to", "tp8 pp6 dp4", "--picture", path) == 0
    text = path.read_text()
    assert "12 more hosts are not drawn" in text and text.count("<path") <= 80


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--to", "tp1 pp1 dp1", "--gpus", "1"), "say what runs, by --from"),
        (("--residence", "60", "--gpus", "8"), "--residence is about a change; say what runs"),
        (("--relaunch", "0", "--gpus", "8"), "--relaunch is about a change; say what runs"),
        (("--from", "tp2 pp2 dp2", "--trace", "a.csv"), "--score and --trace"),
        (("--from", "tp2 pp2"), "does not say dp; write for example"),
        (("--from", "tp2 pp2 dp2"), "give --gpus N"),
        (("--from", "two", "--gpus", "8"), "write for example 'tp2 pp1'"),
        (("--from", "tp3 pp1 dp1", "--gpus", "8"), "tp=3 does not divide num_attention_heads=16"),
        (("--from", "tp2 pp2 dp2", "--to", "tp1 pp5 dp1"), "On 5 devices TP"),
        (("--from", "tp2 pp2 dp2", "--to", "tp2 pp2 dp4", "--gpus", "8"), "use --gpus 16"),
        (("--from", "tp2 pp2 dp2", "--gpus", "8", "--lost", "host-7"), "name some of these"),
        (("--from", "tp2 pp2 dp2", "--range", "1:8"), "leave out --range"),
        (("--from", "tp2 pp2 dp2", "--gpus", "8", "--picture", "a.png"), "ends in .svg"),
        (("--from", "tp2 pp2 dp2", "--gpus", "8", "--picture", "/nowhere/a.svg"), "another file"),
    ],
)
def test_what_cannot_be_is_refused_with_the_way_out(
    words: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*words) == 3
    assert says in capsys.readouterr().err


def test_seconds_that_are_none_are_wrong_usage() -> None:
    assert run("--from", "tp2 pp2 dp2", "--gpus", "8", "--residence", "soon") == 2
