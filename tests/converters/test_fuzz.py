"""Damaged files end in our error or in a result that is what they say: no other exception, no hang,
no memory beyond a bound, no code run.

Every layout's small files are changed at random, in a process of its own for each layout. Checksums
of ZIP members are not looked at there and manifests get digests that fit, so that changes reach
what lies behind them.
"""

import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import sysconfig
import time
import traceback
import zipfile
from pathlib import Path
from typing import Any

import pytest

from scalai.converters import engine, forked, pickles
from scalai.converters.checkpoint import REPORT
from scalai.converters.consistency import compare, verify
from scalai.converters.layouts import READ_ALONE, open_checkpoint
from scalai.converters.suspects import find_suspects
from scalai.core.errors import RefusedError, ScalaiError
from scalai.core.fields import digest_of
from support.checkpoints import carry
from support.rejects import MAKERS

MEMORY_BYTES = 768 << 20
CASE_S = 30
SECONDS = 1.0
LONG_SECONDS = 7.0
TRIES = 12
"""So many at least, however slow the machine is."""

NUMBERS = [-1, 0, 1, 7, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**64, 10**30]
WORDS = [b"null", b"true", b'""', b"[]", b"{}", b"1e400", b"NaN", b'"BF16"', b'"../x"', b"-0.5"]
FORBIDDEN = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "exec")
STANDARD_LIBRARY = sysconfig.get_path("stdlib")


def mutate(data: bytes, choice: random.Random) -> bytes:
    """Return bytes with a few changes: flipped, cut, moved, repeated; other numbers."""
    changed = bytearray(data)
    for _ in range(choice.randint(1, 3)):
        at = choice.randrange(len(changed) or 1)
        kind = choice.randrange(7)
        if kind == 0:
            changed[at : at + 1] = choice.randbytes(1)
        elif kind == 1:
            del changed[at : at + choice.randint(1, 8)]
        elif kind == 2:
            changed[at:at] = changed[at : at + choice.randint(1, 40)]
        elif kind == 3:
            width = choice.choice([1, 2, 4, 8])
            number = choice.choice(NUMBERS) % (1 << 8 * width)
            changed[at : at + width] = number.to_bytes(width, "little")
        elif kind == 4:
            other = choice.randrange(len(changed) or 1)
            changed[at : at + 8] = changed[other : other + 8]
        elif kind == 5:
            del changed[at:]
        else:
            found = list(re.finditer(rb"(?<=[\[: ,])-?\d+|\"[A-Z0-9]{2,4}\"", changed))
            if found:
                new = choice.choice([*WORDS, *(str(n).encode() for n in NUMBERS)])
                match = choice.choice(found)
                changed[match.start() : match.end()] = new
    return bytes(changed)


def with_digest(data: bytes) -> bytes:
    """Return a manifest with a digest that fits, where it is still JSON."""
    try:
        content = json.loads(data)
        content.pop("digest", None)
        return json.dumps({"digest": digest_of(content), **content}).encode()
    except (ValueError, AttributeError, RecursionError):
        return data


def try_one(whole: Path, bad: Path, choice: random.Random) -> bool:
    """Damage a checkpoint and convert it; return whether it was refused."""
    shutil.copytree(whole, bad)
    if choice.randrange(4):
        (bad / REPORT).unlink(missing_ok=True)
    files = sorted(path for path in bad.rglob("*") if path.is_file())
    for path in choice.sample(files, choice.choice([1, 1, 1, 2])):
        data = mutate(path.read_bytes(), choice)
        path.write_bytes(with_digest(data) if path.name == "manifest.json" else data)
    try:
        checkpoint = open_checkpoint(bad)
        verify(checkpoint, workers=0)
        list(find_suspects(checkpoint))
        same = READ_ALONE.get(checkpoint.layout, checkpoint.layout)
        for layout in {same, choice.choice(["torch_dist", "scalai", "safetensors"])}:
            carry(checkpoint, bad.parent / layout, layout)
            made = open_checkpoint(bad.parent / layout)
            kept = [line for line in compare(checkpoint, made, 0) if " is in " not in line]
            assert not kept, kept
    except ScalaiError:
        return True
    return False


def watch(event: str, values: tuple[Any, ...]) -> None:
    """End this process where something would be run; the standard library imports some of itself
    late."""
    is_ours = event == "exec" and values[0].co_filename.startswith(STANDARD_LIBRARY)
    if event in FORBIDDEN and not is_ours:
        print(event, values, file=sys.stderr)
        os._exit(99)


def child(whole: Path, folder: Path, seed: int, seconds: float) -> dict[str, Any]:
    """Damage checkpoints until the time is over."""
    zipfile.ZipExtFile._update_crc = lambda *_: None  # type: ignore[attr-defined]
    forking: Any = engine
    forking.map_forked = lambda function, items, _: forked.map_forked(function, items, 0)
    os.fsync = os.fdatasync = lambda fd: None
    # What is imported late is imported before imports are watched.
    verify(open_checkpoint(whole), workers=0)
    with open("/proc/self/status") as status:
        used = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (used + MEMORY_BYTES, used + MEMORY_BYTES))
    sys.addaudithook(watch)
    began, tries, refused = time.monotonic(), 0, 0
    while tries < TRIES or time.monotonic() - began < seconds:
        (folder / "seed").write_text(str(seed + tries))
        signal.alarm(CASE_S)  # which ends this process
        # A name of its own: mappings of files are kept by name.
        case = folder / f"case-{seed + tries}"
        refused += try_one(whole, case / "bad", random.Random(seed + tries))
        shutil.rmtree(case)
        tries += 1
    return {"tries": tries, "refused": refused}


def run_child(whole: Path, folder: Path, seed: int, seconds: float) -> dict[str, Any]:
    """Fork; return what the child found out."""
    answer = folder / "answer"
    pid = os.fork()
    if not pid:
        try:
            found = child(whole, folder, seed, seconds)
        except BaseException:
            found = {"error": traceback.format_exc()}
        answer.write_text(json.dumps(found))
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    where = f"seed {(folder / 'seed').read_text()} in {folder}"
    assert status == 0, f"it ended with {os.waitstatus_to_exitcode(status)}: {where}"
    result: dict[str, Any] = json.loads(answer.read_text())
    assert "error" not in result, f"{where}:\n{result['error']}"
    return result


@pytest.mark.parametrize(
    ("seconds", "seed"),
    [
        (SECONDS, 1),
        pytest.param(LONG_SECONDS, int(time.time()) << 20, marks=pytest.mark.campaign, id="long"),
    ],
)
@pytest.mark.parametrize("layout", MAKERS)
def test_damaged_files_end_in_our_error_or_in_what_they_say(
    tmp_path: Path, layout: str, seconds: float, seed: int
) -> None:
    MAKERS[layout](tmp_path / "whole")
    found = run_child(tmp_path / "whole", tmp_path, seed, seconds)
    print(f"{layout}: {found['refused']} of {found['tries']} refused")
    assert found["refused"] > 0


def test_a_pickle_that_asks_for_all_memory_is_refused() -> None:
    memo = b"\x80\x02N" + pickle_memo() + b"."
    with pytest.raises(RefusedError, match=r"memory ran out while file was read.*is damaged"):
        pickles.loads(memo, "file")


def pickle_memo() -> bytes:
    """Return what puts something at the end of a memo of four billion places."""
    return b"r" + (2**32 - 1).to_bytes(4, "little")
