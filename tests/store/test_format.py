"""Another program can read a generation by ``docs/format.md`` alone, and the page names every field
that there is."""

import ast
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scalai.converters.checkpoint import WriteOptions
from scalai.converters.engine import Conversion, Limits
from scalai.converters.layouts import layout_named, open_checkpoint
from scalai.core.tensors.collection import Collection
from scalai.core.tensors.region import Box, whole
from scalai.launch.agent.durable import write_finished
from scalai.store.files import decode, slices
from scalai.store.generation import unite_hosts
from scalai.store.host import HostStore
from scalai.store.manifest import FORMAT, VERSION
from scalai.store.parts import Extras
from scalai.store.places import MANIFEST
from support.bad_manifests import BAD, change
from support.format_reader import (
    ITEM_BYTES,
    FormatError,
    Generation,
    find_durable,
    fingerprint,
    read_header,
    read_part,
)
from support.mixed_state import LONG, NOTHING, NUMBER, STEP, TENSORS, WEIGHT, bits_of, stores_of
from support.store_states import generation, two_ranks

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "format.md"
SAVED = sorted((TESTS / "data").glob("*/durable/mixed"))


def test_the_reader_needs_numpy_and_the_standard_library_alone() -> None:
    tree = ast.parse((TESTS / "support" / "format_reader.py").read_text())
    imported = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    imported |= {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert {each.partition(".")[0] for each in imported - {"numpy"}} <= sys.stdlib_module_names


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[dict[str, HostStore]]:
    """Two hosts that hold the mixed state as generation 2, also saved to ``disk``."""
    stores = stores_of(tmp_path / "store")
    for store in stores.values():
        store.copy_to(NUMBER, tmp_path / "disk")
    yield stores
    for store in stores.values():
        store.close()


def places(stores: Mapping[str, HostStore], hosts: str = "ab") -> list[Path]:
    """Return where the parts of these hosts lie in memory."""
    return [stores[host].generation_directory(NUMBER) for host in hosts]


def check_values(found: Generation) -> None:
    """Check every tensor, bit by bit and as numbers, against what was written."""
    assert found.step == STEP
    assert set(found.tensors) == {tensor.name for tensor in TENSORS}
    for tensor in TENSORS:
        assert found.tensors[tensor.name] == (tensor.shape, tensor.dtype)
        expected = bits_of(tensor)
        assert np.array_equal(found.bits(tensor.name), expected)
        values = found.values(tensor.name)
        assert np.array_equal(
            values, decode(expected, tensor.dtype), equal_nan=tensor.dtype != "BOOL"
        )


def test_a_generation_of_two_hosts_is_read_by_the_page_alone(
    stores: dict[str, HostStore], tmp_path: Path
) -> None:
    durable = find_durable(tmp_path / "disk")
    assert list(durable) == [NUMBER] and len(durable[NUMBER]) == 2
    union = unite_hosts([store.manifest(NUMBER) for store in stores.values()])
    for directories in (durable[NUMBER], list(reversed(places(stores)))):
        found = Generation(directories, NUMBER)
        check_values(found)
        assert found.committed == union.stated and len(found.committed) == len(TENSORS)
        assert (found.scalars, found.rank_state) == (union.scalars, union.rank_state)
        pieces = [(piece.offset, piece.shape) for piece in found.pieces(WEIGHT.name)]
        assert sorted(pieces) == 2 * [((0, 0), (6, 4))] + 2 * [((0, 4), (6, 4))]  # replicas
    assert found.bits(NOTHING.name).shape == (0, 4) and not found.pieces(NOTHING.name)


def test_a_part_alone_is_not_a_generation(stores: dict[str, HostStore]) -> None:
    with pytest.raises(FormatError, match=r"\['a'\]: not 22 tensors"):
        Generation(places(stores, "a"))
    with pytest.raises(FormatError, match="a host twice"):
        Generation(places(stores, "aba"))
    with pytest.raises(FormatError, match="of another generation"):
        Generation(places(stores), NUMBER + 1)


def test_a_tensor_that_is_held_in_part_is_not_given(store: HostStore) -> None:
    generation(store, 1, 1, {0: two_ranks()[0]})
    found = Generation([store.generation_directory(1)])
    with pytest.raises(FormatError, match="param/w: not whole"):
        found.bits("param/w")


def fetch(stores: Mapping[str, HostStore], salt: int = 0) -> HostStore:
    """Have a third host fetch what is cut otherwise than it was written: columns in the middle of
    both pieces."""
    union = unite_hosts([store.manifest(NUMBER) for store in stores.values()])
    third = HostStore("mixed", "c", stores["a"].directory.parents[1])
    third.adopt_empty(union.hosts[0])
    box = Box((1, 100), (2, 90))
    pieces = Collection.of([(LONG, box)])
    staged = third.stage(pieces)
    with staged.path.open("r+b") as file:
        file.seek(int(staged.begins[0]))
        file.write((bits_of(LONG)[slices(box)] ^ np.uint16(salt)).tobytes())
    extras = Extras(union.scalars, {}, (), union.hosts[0].committed)
    third.extend(NUMBER, staged, extras)
    return third


def test_pieces_that_were_fetched_overlap_and_are_proven_by_what_was_committed(
    stores: dict[str, HostStore],
) -> None:
    with fetch(stores) as third:
        part = read_part(third.generation_directory(NUMBER), NUMBER)
        assert part.fields["unproven"] == [0] and part.fields["ranks"] == []
        check_values(Generation(places({**stores, "c": third}, "abc")))
        third.prove(NUMBER)
        assert "unproven" not in read_part(third.generation_directory(NUMBER)).fields


def test_pieces_that_arrived_damaged_are_found(stores: dict[str, HostStore]) -> None:
    with fetch(stores, salt=1) as third:
        found = Generation(places({**stores, "c": third}, "cab"))
        with pytest.raises(FormatError, match="param/long: pieces differ"):
            found.bits(LONG.name)


def test_an_attached_generation_is_one_part_of_links(
    stores: dict[str, HostStore], tmp_path: Path
) -> None:
    held = [store.manifest(NUMBER) for store in stores.values()]
    parts = list(zip(find_durable(tmp_path / "disk")[NUMBER], held, strict=True))
    with HostStore("mixed", "d", tmp_path / "other") as fourth:
        fourth.attach(parts)
        found = Generation(places({"d": fourth}, "d"))
        check_values(found)
        attached = found.parts[0].fields["about"]["attached"]
        assert attached == {"hosts": ["a", "b"], "directory": str(tmp_path / "disk/generation-2")}


def offline(source: Path, target: Path) -> Path:
    """Convert a generation to one of whole tensors; return its part."""
    checkpoint = open_checkpoint(source)
    laid_out = layout_named("scalai").lay_out(checkpoint, WriteOptions({"tp": 1}))
    Conversion(checkpoint, laid_out, target, Limits(64 << 20, 1)).run()
    return target / "generation-1" / "offline"


def test_a_converted_generation_is_read_by_the_page_alone(
    stores: dict[str, HostStore], tmp_path: Path
) -> None:
    found = Generation([offline(tmp_path / "disk", tmp_path / "whole")], 1)
    check_values(found)
    (empty,) = found.pieces(NOTHING.name)
    assert empty.shape == (0, 4) and empty.fingerprint == 0 and not found.committed


@pytest.mark.parametrize("saved", SAVED, ids=[path.parents[1].name for path in SAVED])
def test_what_was_saved_is_read_by_the_page_alone(saved: Path) -> None:
    check_values(Generation(find_durable(saved)[NUMBER], NUMBER))


def test_headers_of_files_say_what_the_manifest_says(stores: dict[str, HostStore]) -> None:
    for place in places(stores):
        for path in place.glob("*.safetensors"):
            start, header = read_header(path)
            metadata = header.pop("__metadata__")
            assert all(isinstance(value, str) for value in metadata.values())
            part = read_part(place)
            mine = [piece for piece in part.pieces if piece.path == path]
            assert len(mine) == len(header)
            for piece in mine:
                ranges = (f"{a}:{a + n}" for a, n in zip(piece.offset, piece.shape, strict=True))
                entry = header[f"{piece.tensor}[{','.join(ranges)}]"]
                begin, end = (start + offset for offset in entry["data_offsets"])
                dtype = part.tensors[piece.tensor][1]
                size = ITEM_BYTES[dtype] * prod(piece.shape)
                assert (begin, end, entry["dtype"]) == (piece.begin, piece.begin + size, dtype)
                assert entry["shape"] == list(piece.shape) and begin % ITEM_BYTES[dtype] == 0
            assert start + max(e["data_offsets"][1] for e in header.values()) == path.stat().st_size


def test_fingerprints_of_pieces_add_up_to_those_of_tensors() -> None:
    for tensor in TENSORS:
        if not tensor.numel or not tensor.shape:
            continue
        values, origin, cut = bits_of(tensor), whole(tensor.shape).offset, tensor.shape[-1] // 2 + 1
        total = fingerprint(values, origin, tensor.shape)
        pieces = (values[..., :cut], origin), (values[..., cut:], (*origin[:-1], cut))
        parts = [fingerprint(each, offset, tensor.shape) for each, offset in pieces]
        assert sum(parts) % ((1 << 64) - 59) == total


@pytest.mark.parametrize("bad", BAD.values(), ids=list(BAD))
def test_what_scalai_refuses_the_page_refuses(store: HostStore, bad: Any) -> None:
    generation(store, 1, step=1)
    path = store.generation_directory(1) / MANIFEST
    Generation([path.parent], 1)
    path.write_text(bad(path.read_text()))
    with pytest.raises(FormatError, match=str(path)):
        Generation([path.parent], 1)


def test_a_file_that_was_changed_is_refused(stores: dict[str, HostStore]) -> None:
    (place,) = places(stores, "b")
    path = place / "rank-2.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(FormatError, match=f"{path}: {len(content) - 1} bytes, not {len(content)}"):
        Generation(places(stores))
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(FormatError, match=f"{path}: .* is not what was written"):
        check_values(Generation(places(stores)))


def test_a_field_of_a_later_release_is_passed_over(stores: dict[str, HostStore]) -> None:
    path = places(stores)[0] / MANIFEST
    path.write_text(change(path.read_text(), later={"a": [1.5, "ü", None]}))
    check_values(Generation(places(stores)))


def tables() -> dict[str, dict[str, bool]]:
    """Return the fields that the page names, by their table, and whether they are always there."""
    found: dict[str, dict[str, bool]] = {}
    title = ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("#"):
            title = line.strip("# `")
        header = re.match(r"\| field(?: of `(\w+)`)?.* \| JSON \| there \|", line)
        if header:
            table = found.setdefault(header[1] or title, {})
        row = re.match(r"\| `(\w+)` \| [^|]+ \| (always|maybe) \|", line)
        if row:
            table[row[1]] = row[2] == "always"
    return found


def real_manifests(stores: Mapping[str, HostStore], tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Yield manifests of every way in which one comes to be."""
    (tmp_path / "converted").mkdir()
    folders = [*places(stores), offline(tmp_path / "disk", tmp_path / "converted" / "whole")]
    folders += [path.parent for path in (TESTS / "data").rglob(MANIFEST)]
    with fetch(stores) as third, HostStore("mixed", "d", tmp_path / "other") as fourth:
        durable = find_durable(tmp_path / "disk")[NUMBER]
        held = [store.manifest(NUMBER) for store in stores.values()]
        fourth.attach(list(zip(durable, held, strict=True)))
        folders += places({"c": third, "d": fourth}, "cd")
        yield from (json.loads((folder / MANIFEST).read_text()) for folder in folders)


def check_names(table: Mapping[str, bool], real: Sequence[Mapping[str, Any]]) -> None:
    """Check that the page names every field that is there, and no other one."""
    assert {name for each in real for name in each} == set(table)
    always = {name for name, is_always in table.items() if is_always}
    assert all(set(each) >= always for each in real)


def test_the_page_names_the_fields_that_there_are(
    stores: dict[str, HostStore], tmp_path: Path
) -> None:
    page = tables()
    manifests = list(real_manifests(stores, tmp_path))
    check_names(page.pop("manifest.json"), manifests)
    check_names(page.pop("collection"), [each["collection"] for each in manifests])
    abouts = [each["about"] for each in manifests]
    check_names(page.pop("about"), abouts)
    check_names(page.pop("attached"), [a["attached"] for a in abouts if "attached" in a])
    check_names(page.pop("committed"), [e["committed"] for e in manifests if "committed" in e])
    write_finished(tmp_path / "ended", 3, None)
    check_names(
        page.pop("finished.json"), [json.loads((tmp_path / "ended/finished.json").read_text())]
    )
    _, header = read_header(next(places(stores)[0].glob("*.safetensors")))
    entries = [entry for name, entry in header.items() if name != "__metadata__"]
    check_names(page.pop("Files of tensors"), entries)
    assert not page


def test_the_page_states_this_version_and_every_dtype() -> None:
    text = PAGE.read_text()
    assert f"**Version {VERSION}.**" in text and f"`{FORMAT}`" in text
    logged = set(
        re.findall(r"\b(?:BOOL|BF16|F8_E\dM\d|[FIU]\d+)\b", text.partition("| dtype |")[2])
    )
    assert logged == {tensor.dtype for tensor in TENSORS}
