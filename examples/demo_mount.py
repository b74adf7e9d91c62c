"""Ranks read their samples from the files of a mount while DP changes twice.

    python examples/demo.py --data-view mount [--data FILE]

``scalai mount`` shows a text, a sample a paragraph, in the order of a seed: each replica's samples
as ordinary files. A small model trains on them (``train_view.py``) on 3 ranks, on 1 and on 2, by a
reader that opens files and knows nothing else. What all ranks have read must be the permutation,
and the job's ledger must prove that no sample was skipped or seen twice.
"""

import json
import shutil
import time
from contextlib import ExitStack
from pathlib import Path

from demo_frameworks import Framework
from demo_hosts import DemoError, make_place, no_process_left, undisturbed
from demo_records import check_records, corpus, permuted, read_notes
from demo_story import ORDINARY_STEPS, Change, Check, check_degrees, check_proofs
from demo_training import RESUMABLE, Setting, Training, scalai
from demo_words import change_line, check_lines, end_line, phase_table

from scalai.vfs.mounts import absolute, find_mount, unmount

ROOT = Path(__file__).resolve().parents[1]
JOB = "view"
SEED, BATCH = 7, 12
DIFFERS = 4
"""Exit code of a check that does not hold, here and of ``scalai ledger verify``."""
RECORDS = 500
"""Samples of the data set: no whole batches, and few, so that the training sees several passes."""
STEPS_BETWEEN = 40
"""Steps to train before the next change, about a pass."""
MOST_STEPS = 100_000
"""The story ends long before."""
STORY = (
    Change("start", "TP1·PP1·DP3", host="a"),
    Change("scale", "TP1·PP1·DP1", workers=1),
    Change("scale", "TP1·PP1·DP2", workers=2),
)
_INTRODUCTION = """\
Scalai: ranks read their samples from the files of a mount while DP changes

  text      {text}, {count} samples of a paragraph each
  mount     {point}
  files     dataset/corpus/dp-R-of-D/pass-P.jsonl: of each global batch of {batch} a share a replica
  model     a byte from the 8 before it, on plain torch; every rank has all of it

   step  change                       degrees                  training paused"""


def demonstrate(data: Path | None, out: Path) -> int:
    """Mount, train, check, print and draw. Returns the exit code."""
    began = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    place = make_place()
    point, store = absolute(place / "mount"), place / "store"
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, place, ignore_errors=True)
        # Behind the end of all processes, so that none can mount once more.
        stack.callback(unmount_all, point)
        stack.enter_context(no_process_left())
        source = out / "corpus.jsonl"
        count = write_corpus(data, source)
        point.mkdir()
        store.mkdir(mode=0o700)
        mount(source, point, store, out / "mount.log")
        text = "the documentation texts of Python itself" if data is None else str(data)
        print(_INTRODUCTION.format(text=text, count=count, point=point, batch=BATCH), flush=True)
        training = Training(_setting(point, store, out), JOB, hosts=1, steps=MOST_STEPS, workers=3)
        _tell(training)
        run, resizes = training.run, training.resizes()
        saved = out / JOB / "saved" / JOB
        picture = out / "scalai-demo-ledger.svg"
        ledger = json.loads(scalai("ledger", "show", saved, "--picture", picture, "--json"))
        checks = (
            check_degrees(resizes, STORY),
            check_proofs(resizes[1:]),
            _check_notes(out / JOB / "metrics", source, ledger["samples"]),
            check_ledger(saved),
        )
    print(phase_table(run, resizes, STORY))
    print(check_lines(checks))
    print(f"\n  picture   {picture}\n  took      {time.monotonic() - began:.0f} s")
    return 0 if all(one.is_kept for one in checks) else DIFFERS


def write_corpus(data: Path | None, path: Path) -> int:
    """Write the data set of a text as lines of JSON; return how many samples there are.

    Raises:
        DemoError: The text is empty.
    """
    if data is None:
        from pydoc_data import topics

        text = "\n\n".join(topics.topics.values())
    else:
        text = data.read_text(errors="replace")
    samples = corpus(text)[:RECORDS]
    if not samples:
        raise DemoError(f"{data} has no text.")
    path.write_bytes(b"".join(samples))
    return len(samples)


def mount(source: Path, point: Path, store: Path, log: Path) -> None:
    """Show a data set in the order of the seed. Raises ``DemoError`` where nothing can be mounted
    here, with the reason."""
    scalai(
        "mount", JOB, point, "--store-dir", store, "--source", f"corpus={source.resolve()}",
        "--shuffle", f"corpus={SEED}", "--global-batch-size", BATCH, "--log", log,
    )  # fmt: skip


def unmount_all(point: Path) -> None:
    """Unmount what is there, also where files are open or its process is dead."""
    with undisturbed():
        while find_mount(point) is not None:
            unmount(point, is_lazy=True)


def _setting(point: Path, store: Path, out: Path) -> Setting:
    view = Framework(
        ROOT / "examples" / "train_view.py",
        ("--elastic", str(ROOT / "configs" / "elastic_view.toml")),
        (
            *("--view", str(point / "dataset" / "corpus"), "--shuffle", str(SEED)),
            *("--global-batch-size", str(BATCH), "--pause-s", "0.05"),
        ),
        "",
        STORY,
    )
    return Setting(view, None, store, out)


def _tell(training: Training) -> None:
    """Carry out the story, until the host has left with the state on disk."""
    for number, change in enumerate(STORY, start=1):
        if change.kind == "start":
            training.hosts.start(change.host)
        else:
            training.scale(change.workers)
        resize = training.wait_for_round(number)
        training.wait_for_step(resize.step + ORDINARY_STEPS + 1)
        print(change_line(change, resize, training.run), flush=True)
        training.wait_for_step(resize.step + STEPS_BETWEEN)
    training.hosts.tell_to_leave("a")
    training.hosts.wait_for_end("a", RESUMABLE)
    print(end_line(training.run), flush=True)


def _check_notes(folder: Path, source: Path, consumed: int) -> Check:
    """Compare what ranks have noted with the order of the source's samples."""
    notes = read_notes(path.read_text() for path in sorted(folder.glob("records-*.jsonl")))
    samples = source.read_bytes().splitlines(keepends=True)
    return check_records(notes, permuted(samples, SEED, consumed))


def check_ledger(saved: Path) -> Check:
    """Ask the command whether each sample was seen once."""
    verdict = scalai("ledger", "verify", saved, codes=(0, DIFFERS)).splitlines()[-1]
    return Check("scalai ledger verify", verdict.startswith("proven: "), verdict)
