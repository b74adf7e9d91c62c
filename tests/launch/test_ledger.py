"""``scalai ledger``: what it finds in stores, on disks and in files of ranks, and what it says."""

import argparse
import json
import shutil
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scalai.core.dataset.drawn import Draw, Number
from scalai.core.dataset.ledger import Ledger, Lost
from scalai.core.dataset.step_lines import StepLine, line_text
from scalai.core.errors import RefusedError, StoreError, UsageError
from scalai.core.messages.shared import JsonText
from scalai.launch.agent.durable import write_finished, write_ledger
from scalai.launch.commands import ledger_report as command
from scalai.runtime.consumption import LEDGER
from scalai.store.host import HostStore
from scalai.store.manifest import read_manifest, read_saved_manifest, write_manifest
from support.store_states import Opener, generation

STEP = 5
"""Of the generation; each step has 12 samples."""


def arguments(*given: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    return parser.parse_args(["ledger", *map(str, given)])


def run(capsys: pytest.CaptureFixture[str], *given: object) -> tuple[int, str]:
    """Run the command; return its exit code and what it printed."""
    return command.run(arguments(*given)), capsys.readouterr().out


def stepped(ledger: Ledger, step: int, skipped: int = 0) -> Ledger:
    begin = 12 * step - 12 + skipped
    draw = Draw("train", Number(0), begin, begin + 12, 120, 120, is_dealt=True)
    return ledger.stepped(step, 12 * step, [draw])


def consumed(first: int = 0, skip_at: int | None = None, *, has_changed: bool = True) -> Ledger:
    """Return the ledger of a job that has changed at step 3, and went back to step 4 from 6; or of
    one rank."""
    dp = 2 if has_changed else 1
    ledger = Ledger.begun(first, 12 * first).with_round("r-1", {"dp": dp, "tp": 1})
    for step in range(first + 1, STEP + 1):
        if step == 4 and has_changed:
            ledger = ledger.with_round("r-3", {"dp": 4, "tp": 1}, [Lost("r-2", 3, 6)])
        ledger = stepped(ledger, step, 12 if skip_at is not None and step >= skip_at else 0)
    return ledger


def keep(store: HostStore, value: Any, number: int = 1) -> Path:
    """Have a host hold a generation with this ledger; return the part's directory."""
    generation(store, number, STEP)
    folder = store.generation_directory(number)
    manifest = read_manifest(folder)
    scalars = {**manifest.scalars, **({LEDGER: value} if value is not None else {})}
    write_manifest(folder, replace(manifest, scalars=scalars))
    return folder


def test_a_job_that_has_changed_and_failed_is_proven_wherever_its_state_lies(
    open_store: Opener, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = open_store(host="a")
    part = keep(store, consumed().to_json())
    shutil.copytree(part, tmp_path / "disk" / "generation-1" / "a")
    job = store.directory.parent
    for place in (part, store.directory, job, tmp_path / "disk", job.name):
        code, text = run(capsys, "verify", place, "--store-dir", job.parent)
        assert code == 0 and "proven: no sample was skipped, and none was seen twice" in text
        assert "train, pass 0: 0:60 of 120, seen at the samplers" in text
        assert "r-3: steps 4 to 5, 24 samples, dp4" in text
        assert "note: steps 4 to 6 of round r-2 were lost, 2 of them done again so far" in text


def test_a_finished_job_is_proven_to_its_last_step(
    open_store: Opener, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its newest generation, if it has one at all, is of an earlier step."""
    folder = tmp_path / "gpt"
    keep(open_store(host="a"), consumed().to_json())
    for host in ("a", "b"):
        write_ledger(folder, host, JsonText.of(consumed().to_json()))
    write_finished(folder, STEP, None)
    code, text = run(capsys, "verify", folder)
    assert code == 0 and "the end: step 5, 60 samples" in text and "proven: no sample" in text
    write_finished(folder, STEP + 1, None)
    code, text = run(capsys, "verify", folder)
    assert code == 4 and "BROKEN" in text
    write_finished(folder, STEP, None)
    early = Ledger.begun(0, 0).with_round("r-1", {"dp": 2, "tp": 1})  # b died behind its file
    write_ledger(folder, "b", JsonText.of(early.to_json()))
    code, text = run(capsys, "verify", folder)
    assert code == 0 and "proven: no sample" in text
    write_ledger(folder, "b", JsonText.of(consumed(skip_at=4).to_json()))
    code, text = run(capsys, "verify", folder)
    assert code == 4 and "hosts 'a' and 'b' have different ledgers" in text
    (folder / "ledger-b.json").write_text("{")
    with pytest.raises(StoreError, match=r"ledger-b\.json.*damaged"):
        run(capsys, "verify", folder)
    (folder / "finished.json").unlink()  # the end was not come to: its job goes on
    with pytest.raises(UsageError, match="holds no generation"):
        run(capsys, "verify", folder)


def late() -> Ledger:
    """Return a ledger of one step more than its state."""
    return stepped(consumed(), STEP + 1)


@pytest.mark.parametrize(
    ("ledger", "code", "texts"),
    [
        (
            consumed(has_changed=False),
            0,
            ["r-1: steps 1 to 5, 60 samples, dp1", "proven: no sample"],
        ),
        (consumed(first=2), 0, ["proven from step 2 on", "steps 1 to 2 (24 samples)"]),
        (consumed(skip_at=3), 4, ["BROKEN: train, pass 0: samples 24:36 were skipped"]),
        (late(), 4, ["the state is of step 5, its ledger of step 6"]),
    ],
    ids=["one rank", "begun later", "skipped", "another step"],
)
def test_verify_ends_with_what_a_ledger_proves_and_show_with_0(
    open_store: Opener, capsys: pytest.CaptureFixture[str], ledger: Ledger, code: int,
    texts: list[str],
) -> None:  # fmt: skip
    part = keep(open_store(), ledger.to_json())
    found, text = run(capsys, "verify", part)
    assert found == code and all(each in text for each in texts)
    assert ("proven" in text) is (code == 0)
    found, text = run(capsys, "show", part, "--json")
    report = json.loads(text)
    assert found == 0 and report["is_kept"] is (code == 0) is not bool(report["breaks"])
    assert Ledger.from_json(report["ledger"]) == ledger


@pytest.mark.fault
@pytest.mark.parametrize(
    ("value", "error", "why"),
    [
        (None, RefusedError, "generation 1 .* has no ledger"),
        ({**consumed().to_json(), "at": [9, 9]}, StoreError, "part of host 'a' .* its digest"),
    ],
)
def test_a_generation_without_a_whole_ledger_proves_nothing(
    open_store: Opener, value: Any, error: type[Exception], why: str
) -> None:
    part = keep(open_store(host="a"), value)
    with pytest.raises(error, match=why):
        command.run(arguments("verify", part))
    (part / "manifest.json").write_bytes((part / "manifest.json").read_bytes()[:-20])
    with pytest.raises(StoreError, match="damaged"):
        command.run(arguments("verify", part))


@pytest.mark.fault
def test_two_hosts_with_different_ledgers_are_a_difference(
    open_store: Opener, capsys: pytest.CaptureFixture[str]
) -> None:
    first = open_store(host="a")
    keep(first, consumed().to_json())
    keep(open_store(host="b"), consumed(first=1).to_json())
    code, text = run(capsys, "verify", first.directory.parent)
    assert code == 4 and "hosts 'a' and 'b' have different ledgers" in text


def test_a_generation_that_a_running_job_drops_meanwhile_gives_way_to_the_next(
    open_store: Opener, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = open_store()
    old = keep(store, consumed().to_json())

    def dropping(part: Path, number: int | None = None) -> Any:
        if part == old and old.exists():
            keep(store, consumed().to_json(), 2)
            shutil.rmtree(old)
        return read_saved_manifest(part, number)

    monkeypatch.setattr(command, "read_saved_manifest", dropping)
    assert run(capsys, "verify", store.directory)[1].startswith("generation 2: step 5")


@pytest.mark.parametrize("name", ["nowhere", "a/b", "../x"])
def test_what_is_no_job_and_no_directory_is_said(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError):
        command.run(arguments("show", name, "--store-dir", tmp_path))


def test_the_picture_shows_passes_rounds_and_what_was_lost(
    open_store: Opener, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ledger.svg"
    part = keep(open_store(), consumed(first=1, skip_at=3).to_json())
    run(capsys, "show", part, "--picture", path)
    root = ElementTree.fromstring(path.read_text())
    titles = [each.text for each in root.iter("{http://www.w3.org/2000/svg}title")]
    for says in (
        "consumed: 12 to 24", "skipped: 24 to 36", "before the ledger began: 0 to 12",
        "r-1: dp2 tp1: 1 to 3", "r-3: dp4 tp1: 3 to 5", "lost by round r-2: 3 to 6",
    ):  # fmt: skip
        assert says in titles, says


def test_files_of_ranks_are_verified_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in (0, 1):
        lines = [StepLine("r", 1, step, 4 * step, rank + step, None, 0.1) for step in (1, 2, 3)]
        lines += [StepLine("r", 2, step, 4 * step, rank + step, None, 0.1) for step in (3, 4)]
        text = "".join(map(line_text, lines))
        (tmp_path / f"rank-{rank}.jsonl").write_text(text if rank else text[:-7])
    code, text = run(capsys, "verify", tmp_path)
    assert code == 0 and text == (
        "2 files: steps 1 to 4, to sample 16\nnote: rank-0.jsonl: its last line was torn\n"
        "note: steps 3 to 3 of round 1 were lost and done again\n"
        "proven: no sample was skipped, and none was seen twice\n"
    )
    other = line_text(StepLine("r", 2, 6, 24, 1, None, 0.1))
    with (tmp_path / "rank-1.jsonl").open("a") as file:
        file.write(other)
    code, text = run(capsys, "verify", tmp_path, "--json")
    assert code == 4 and json.loads(text)["breaks"] == ["steps 5 to 5 are in no file"]
