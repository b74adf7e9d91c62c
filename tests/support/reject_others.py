"""Refusals of our own generations and of safetensors: the damage, and the words."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from scalai.converters.checkpoint import REPORT, WriteOptions
from scalai.converters.engine import Conversion, Limits
from scalai.converters.layouts import layout_named
from scalai.store.manifest import digest_of
from support.checkpoints import state, write
from support.damage import Damage, link_outside
from support.rejects import (
    Case,
    copied,
    cut,
    lost,
    on,
    replaced,
    report_version,
    spoil,
    with_nan,
)

PART, OTHER = "generation-1/offline", "generation-1/other"
FILE = f"{PART}/rank-0.safetensors"
Edit = Callable[[dict[str, Any]], object]


def change(edit: Edit, path: str = PART) -> Damage:
    """Write a manifest again, with a digest that fits."""

    def damage(directory: Path) -> None:
        manifest = directory / path / "manifest.json"
        data = json.loads(manifest.read_text())
        del data["digest"]
        edit(data)
        manifest.write_text(json.dumps({"digest": digest_of(data), **data}))

    return damage


def tensor(place: int, value: Any) -> Damage:
    """Change the first tensor of the manifest: [name, shape, dtype]."""
    return change(lambda data: data["collection"]["tensors"][0].__setitem__(place, value))


def with_a_part(edit: Edit = lambda data: None) -> Damage:
    """Add another host's part."""

    def damage(directory: Path) -> None:
        copied(PART, OTHER)(directory)
        change(lambda data: (data.update(host="other"), edit(data)), OTHER)(directory)

    return damage


def drop_a_row(data: dict[str, Any]) -> None:
    """As if a part that holds a piece of a tensor were not there."""
    for column in (data, data["collection"]):
        for key in ("file", "begin", "fingerprint", "tensor", "offset", "shape"):
            if key in column:
                del column[key][0]


def spoil_without_report(directory: Path) -> None:
    (directory / REPORT).unlink()
    spoil("exp_avg/decoder.final_layernorm.weight")(directory)


def nan_as_saved(directory: Path) -> None:
    """A generation notes fingerprints: NaN that was saved has one that fits."""
    shutil.rmtree(directory)
    source, name = state(), "param/decoder.final_layernorm.weight"
    nan = np.full(4, np.nan, "f4").tobytes()
    files = tuple(
        replace(file, content=nan) if file.path == name else file for file in source.placed.files
    )
    write(directory, "scalai", replace(source, placed=replace(source.placed, files=files)))


GENERATION = [
    Case("path", change(lambda d: d["files"][0].__setitem__(0, "../x")), "is not a file name"),
    Case("path", on(link_outside, FILE), "is a link to outside"),
    Case("dtype", tensor(2, "F4"), "is F4["),
    Case("shape", tensor(1, [-8, 4]), "[-8, 4]"),
    Case("shape", tensor(1, [1 << 62, 4]), "more than any disk"),
    Case("shape", tensor(1, [1 << 80, 4]), "beyond 2^63"),
    Case("hole", change(drop_a_row), "the state is not whole"),
    Case("duplicate", copied(PART, OTHER), "two parts are of host 'offline'"),
    Case("missing file", lost(FILE), "rank-0.safetensors is missing"),
    # As if a part were not there that alone knows of a tensor.
    Case("missing file", change(lambda d: d["about"].update(tensors=99)), "the part of a host is"),
    Case("extra file", with_a_part(lambda d: d.update(generation=2)), "that it is generation 2"),
    Case("truncated", cut(FILE, 1), "bytes long"),
    Case("bomb", cut(FILE, -8), "bytes long"),
    Case("bomb", change(lambda d: d["begin"].__setitem__(0, 1 << 40)), "ends beyond"),
    Case("count", change(lambda d: d.update(begin=[0])), "values of begin for"),
    Case("digest", replaced(f"{PART}/manifest.json", b'"step":3', b'"step":4'), "its digest is"),
    Case("digest", spoil_without_report, "says was written", 4),
    Case("iterations", with_a_part(lambda d: d.update(step=4)), "Never mix generations"),
    Case("suspect", nan_as_saved, "nothing but NaN", 0),
    Case("run", with_a_part(lambda d: d["about"].update(snapshot="run-7")), "of several jobs or"),
    Case("version", change(lambda d: d.update(version=99)), "version 99; this release reads"),
    Case("version", report_version, "scalai.json is of version 99"),
]  # fmt: skip
GENERATION_NOT = {
    "setting": "it holds no settings that decide how it is read",
    "overlap": "pieces that hosts fetched from each other may overlap: all are proven",
    "world": "no file is named by a rank of a world",
    "code": "JSON and raw bytes alone",
}


def write_shards(directory: Path) -> None:
    """Write weights in several files with an index."""
    source = state()
    with patch("scalai.converters.safetensors_index.FILE_BYTES", 200):
        target = layout_named("safetensors").lay_out(source, WriteOptions({}))
    Conversion(source, target, directory, Limits(64 << 20, 1)).run()


INDEX = "model.safetensors.index.json"


def shard(directory: Path, number: int = 0) -> Path:
    return sorted(directory.glob("model-*.safetensors"))[number]


def in_shard(change: Callable[[Path], object]) -> Damage:
    def damage(directory: Path) -> None:
        change(shard(directory))

    return damage


def header(
    edit: Edit = lambda entries: None, *, text: Callable[[str], str] = lambda text: text
) -> Damage:
    """Write the header of the first file again, and leave the tensors."""

    def damage(path: Path) -> None:
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        entries = json.loads(data[8 : 8 + length])
        edit(entries)
        new = text(json.dumps(entries)).encode()
        path.write_bytes(len(new).to_bytes(8, "little") + new + data[8 + length :])

    return in_shard(damage)


def first(entries: dict[str, Any]) -> dict[str, Any]:
    return next(of for name, of in entries.items() if name != "__metadata__")


def entry(**values: Any) -> Damage:
    """Change the first tensor of the first file's header."""
    return header(lambda entries: first(entries).update(values))


def repeated(text: str) -> str:
    """Return a header with one entry twice."""
    entries = json.loads(text)
    name = next(name for name in entries if name != "__metadata__")
    return text[:-1] + f", {json.dumps(name)}: {json.dumps(entries[name])}}}"


def index(edit: Callable[[dict[str, str]], object]) -> Damage:
    """Change the files of tensors in the index."""

    def damage(path: Path) -> None:
        data = json.loads(path.read_text())
        edit(data["weight_map"])
        path.write_text(json.dumps(data))

    return on(damage, INDEX)


def named(value: str) -> Damage:
    return index(lambda entries: entries.update({next(iter(entries)): value}))


def lose_the_index(directory: Path) -> None:
    shutil.copy(shard(directory), directory / "model.safetensors")
    (directory / INDEX).unlink()


def forget_a_shard(directory: Path) -> None:
    """The index and the files of a part of a model."""
    path = shard(directory)
    path.unlink()

    def forget(entries: dict[str, str]) -> None:
        for name in [name for name, file in entries.items() if file == path.name]:
            del entries[name]

    index(forget)(directory)


def claim_a_header(path: Path) -> None:
    path.write_bytes((1 << 40).to_bytes(8, "little") + path.read_bytes()[8:])


def nested(_: str) -> str:
    return '{"a":' + "[" * 200_000 + "]" * 200_000 + "}"


SAFETENSORS = [
    Case("path", named("../x.safetensors"), "is no file beside it"),
    Case("path", named("/etc/passwd"), "is no file beside it"),
    Case("path", in_shard(link_outside), "is a link to outside"),
    Case("dtype", entry(dtype="F4"), "is of dtype 'F4'"),
    Case("shape", entry(shape=[-8, 4]), "shape [-8, 4]"),
    Case("shape", entry(shape=[1 << 62, 4]), "lies at"),
    Case("shape", entry(shape=[8.5, 4]), "shape [8.5, 4]"),
    Case("hole", entry(data_offsets=[4, 132]), "lies at 4:132"),
    Case("overlap", header(lambda e: e.update(other={**first(e)})), "lies at 0:"),
    Case("duplicate", header(text=repeated), "comes twice"),
    Case(
        "duplicate", lambda at: shutil.copy(shard(at), shard(at, 1)), "and in model-00001",
    ),
    Case(
        "missing file", in_shard(Path.unlink), "is missing; model.safetensors.index.json places",
    ),
    Case("missing file", lose_the_index, "the index is missing"),
    Case(
        "extra file",
        lambda at: shutil.copy(shard(at), at / "model-00001-of-00099.safetensors"),
        "no index names it",
    ),
    Case(
        "truncated", in_shard(lambda path: os.truncate(path, path.stat().st_size - 1)),
        "is damaged or truncated",
    ),
    Case("bomb", in_shard(claim_a_header), "a header of 1099511627776 bytes"),
    Case("bomb", in_shard(lambda path: os.truncate(path, 1 << 20)), "by its header"),
    Case("count", entry(shape=[1] * 99), "has shape [1, 1"),
    Case("count", header(text=nested), "nested too deep"),
    Case("digest", spoil("param/decoder.final_layernorm.weight"), "says was written", 4),
    Case("world", forget_a_shard, "by their names"),
    Case("suspect", with_nan, "nothing but NaN", 0),
    Case("version", report_version, "scalai.json is of version 99"),
]  # fmt: skip
SAFETENSORS_NOT = {
    "setting": "it holds no settings of a job",
    "iterations": "weights without a step",
    "run": "nothing in it says of which job it is",
    "code": "JSON and raw bytes alone",
}
