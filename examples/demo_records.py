"""What ranks have read, against what the order of the data set says: values in, verdicts out."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from demo_story import Check

import scalai

PROMISE = "the ranks' records, interleaved, are the permutation"


@dataclass(frozen=True, slots=True)
class Note:
    """What a rank has read for a step: the hash of each record, from a place of the global order
    on."""

    step: int
    first: int
    hashes: tuple[str, ...]


def corpus(text: str) -> list[bytes]:
    """Return the paragraphs of a text as samples: lines of JSON, no two of them alike."""
    paragraphs = filter(None, (part.strip() for part in text.split("\n\n")))
    return [
        json.dumps({"number": number, "text": paragraph}).encode() + b"\n"
        for number, paragraph in enumerate(paragraphs)
    ]


def read_notes(texts: Iterable[str]) -> list[Note]:
    """Read what ranks have noted, a text a rank."""
    lines = (json.loads(line) for text in texts for line in text.splitlines())
    return [Note(line["step"], line["first"], tuple(line["hashes"])) for line in lines]


def permuted(source: Sequence[bytes], seed: int, samples: int) -> list[str]:
    """Return the hashes of the first samples of a training, in the order of a seed."""
    order = scalai.Shuffled(len(source), seed, "corpus")
    chosen = order.samples_at(np.arange(samples)).tolist()
    return [hashlib.sha256(source[sample]).hexdigest() for sample in chosen]


def check_records(notes: Iterable[Note], expected: Sequence[str]) -> Check:
    """Check that at each place just the sample was read that is expected there.

    A step that was lost and done again is noted twice, and must have read the same.
    """
    read: dict[int, str] = {}
    for note in sorted(notes, key=lambda each: each.step):
        for place, found in enumerate(note.hashes, start=note.first):
            if read.setdefault(place, found) != found:
                return Check(PROMISE, False, f"place {place} was read twice, and differently")
    places = {*read, *range(len(expected))}
    known = dict(enumerate(expected))
    wrong = sorted(place for place in places if read.get(place) != known.get(place))
    if wrong or not expected:
        where = f"first place {wrong[0]}" if wrong else "there are none"
        return Check(PROMISE, False, f"{len(wrong)} of {len(places)} differ, {where}")
    found = digest(read[place] for place in sorted(read))
    return Check(PROMISE, True, f"{len(expected)} records, {found} = {digest(expected)}")


def digest(hashes: Iterable[str]) -> str:
    """Return a few letters that stand for all records in this order."""
    return hashlib.sha256("".join(hashes).encode()).hexdigest()[:12]
