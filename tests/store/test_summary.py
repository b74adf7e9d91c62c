"""What a coordinator is told of a host's part."""

from dataclasses import replace

import numpy as np
import pytest

from scalai.core.tensors.fingerprint import Committed
from scalai.core.tensors.holders import used_only
from scalai.core.tensors.region import Box
from scalai.store.host import HostStore
from scalai.store.manifest import HostManifest, StoredFile, manifest_bytes, manifest_of_bytes
from scalai.store.parts import Extras, extended, pieces_of, reference_of, summary
from support.store_states import generation, two_ranks


@pytest.fixture
def part(store: HostStore) -> HostManifest:
    """Return a part that was committed, and that states its tensors."""
    made = generation(store, 4, step=2)
    names = [tensor.name for tensor in made.collection.tensors]
    stated = Committed((made.host,), dict.fromkeys(names, 7))
    return replace(made, committed=stated)


def grown(part: HostManifest) -> HostManifest:
    """Return a part with row after row of a tensor that it had not, as they come from others."""
    (tensor, _) = two_ranks()[0].box(0)
    other = type(tensor)("param/other", (40, 4), "F32")
    rows = type(part.collection).of((other, Box((row, 0), (1, 4))) for row in range(40))
    stated = Committed((part.host, "b"), {other.name: 9})
    return extended(
        part, StoredFile("fetched-0.safetensors", 640), rows, 16 * np.arange(40),
        np.arange(40, dtype=np.uint64), Extras({}, {"tp7": "x"}, (7,), stated),
    )  # fmt: skip


def test_a_summary_arrives_as_it_was_sent_and_names_what_it_stands_for(part: HostManifest) -> None:
    short = summary(part)
    again = manifest_of_bytes(manifest_bytes(short), "it")
    assert again.digest() == short.digest()
    assert reference_of(again) == reference_of(part) == reference_of(short)
    assert reference_of(part).digest == pieces_of(part).digest().hex()
    assert set(again.rank_state) == set(part.rank_state)
    assert not any(again.rank_state.values())


def test_pieces_that_were_fetched_are_few_and_stay_apart_while_they_are_unproven(
    part: HostManifest,
) -> None:
    short = summary(grown(part))
    names = [short.collection.tensors[number].name for number in short.collection.tensor]
    assert names.count("param/other") == 1 and short.unproven == (1,)
    assert short.file[names.index("param/other")] == 1
    assert short.size_bytes == grown(part).size_bytes
    assert short.committed is not None and short.committed.fingerprints["param/other"] == 9


def test_what_states_nothing_keeps_all_fingerprints(store: HostStore) -> None:
    made = generation(store, 4, step=2)
    assert made.committed is None
    assert (summary(made).fingerprint == made.fingerprint).all()


def test_pieces_keep_their_digest_while_others_are_added_behind_them(part: HostManifest) -> None:
    known, more = reference_of(part), grown(part)
    assert pieces_of(more, known.rows).digest().hex() == known.digest
    assert reference_of(more).digest != known.digest
    assert len(pieces_of(more)) == known.rows + 40


@pytest.mark.parametrize("what", ["snapshot", "step", "fingerprint", "offset", "tensor"])
def test_a_digest_is_of_all_of_it(part: HostManifest, what: str) -> None:
    held = pieces_of(part)
    before = held.digest()
    changed = {
        "snapshot": lambda: ("other", held.step, held.collection, held.fingerprint),
        "step": lambda: (held.snapshot, 3, held.collection, held.fingerprint),
        "fingerprint": lambda: (held.snapshot, held.step, held.collection, held.fingerprint[::-1]),
        "offset": lambda: (
            held.snapshot, held.step, type(held.collection)(
                held.collection.tensors, held.collection.tensor, held.collection.offset + 1,
                held.collection.shape,
            ), held.fingerprint,
        ),
        "tensor": lambda: (
            held.snapshot, held.step, type(held.collection)(
                held.collection.tensors[::-1], held.collection.tensor, held.collection.offset,
                held.collection.shape,
            ), held.fingerprint,
        ),
    }[what]()  # fmt: skip
    snapshot, step, collection, prints = changed
    other = type(held)(snapshot, step, collection, prints)
    assert other.digest() != before


def test_a_table_of_used_tensors_does_not_depend_on_what_else_is_in_it(part: HostManifest) -> None:
    rows = part.collection.select(np.array([2, 1, 2]))
    found = used_only(rows)
    assert [found.box(row) for row in range(3)] == [rows.box(row) for row in range(3)]
    assert len(found.tensors) == 2 and not used_only(rows.select(np.zeros(0, np.int64))).tensors
