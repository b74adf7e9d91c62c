"""What is refused of our own generations and of safetensors, and with which words."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from scalai.converters.checkpoint import REPORT, WriteOptions
from scalai.converters.engine import Conversion, Limits
from scalai.converters.layouts import layout_named
from scalai.store.manifest import _digest
from support.checkpoints import state
from support.damage import link_outside
from support.rejects import Case, edit_values, rename, report_version, spoil, with_nan

PART = "generation-1/offline"
FILE = f"{PART}/rank-0.safetensors"


def change(edit: Callable[[dict[str, Any]], object], *, path: str = PART, name: str = "") -> Any:
    """Return what writes a manifest again, with a digest that fits."""

    def damage(directory: Path) -> None:
        manifest = directory / path / "manifest.json"
        data = json.loads(manifest.read_text())
        del data["digest"]
        edit(data)
        manifest.write_text(json.dumps({"digest": _digest(data), **data}))

    return rename(damage, name or "change_the_manifest")


def tensors(edit: Callable[[list[Any]], object], name: str) -> Any:
    """Return what changes the first tensor of the manifest: [name, shape, dtype]."""
    return change(lambda data: edit(data["collection"]["tensors"][0]), name=name)


def copy_the_part(directory: Path) -> None:
    shutil.copytree(directory / PART, directory / "generation-1" / "other")


def add_a_part(**entries: Any) -> Any:
    """Return what adds another host's part."""

    def damage(directory: Path) -> None:
        copy_the_part(directory)
        path = "generation-1/other"
        change(lambda data: data.update(host="other", **entries), path=path)(directory)

    return rename(damage, "add_a_part_" + "_".join(entries))


def add_a_foreign_part(directory: Path) -> None:
    add_a_part()(directory)
    path = "generation-1/other"
    change(lambda data: data["about"].update(snapshot="run-7"), path=path)(directory)


def drop_a_row(directory: Path) -> None:
    """As if a part that holds a piece of a tensor were not there."""

    def drop(data: dict[str, Any]) -> None:
        for column in (data, data["collection"]):
            for key in ("file", "begin", "fingerprint", "tensor", "offset", "shape"):
                if key in column:
                    del column[key][0]

    change(drop)(directory)


def drop_a_tensor(directory: Path) -> None:
    """As if a part were not there that alone knows of a tensor."""
    change(lambda data: data["about"].update(tensors=99))(directory)


def longer(name: str) -> Any:
    return rename(lambda at: os.truncate(at / name, (at / name).stat().st_size + 8), "longer")


def shorter(name: str) -> Any:
    return rename(lambda at: os.truncate(at / name, (at / name).stat().st_size - 1), "shorter")


def break_the_digest(directory: Path) -> None:
    path = directory / PART / "manifest.json"
    path.write_text(path.read_text().replace('"step":3', '"step":4', 1))


def spoil_without_report(directory: Path) -> None:
    (directory / REPORT).unlink()

    def spoiled(values: Any) -> None:
        values += 1

    edit_values(directory, "exp_avg/decoder.final_layernorm.weight", spoiled)


def lose(name: str) -> Any:
    return rename(lambda at: (at / name).unlink(), f"lose_{Path(name).name}")


def nan_as_saved(directory: Path) -> None:
    """A generation notes fingerprints: NaN that was saved has one that fits."""
    shutil.rmtree(directory)
    source = state()
    name = "param/decoder.final_layernorm.weight"
    files = [
        file if file.path != name else type(file)(name, 16, np.full(4, np.nan, "f4").tobytes())
        for file in source.placed.files
    ]
    from dataclasses import replace

    source = replace(source, placed=replace(source.placed, files=tuple(files)))
    target = layout_named("scalai").lay_out(source, WriteOptions({}))
    Conversion(source, target, directory, Limits(64 << 20, 1)).run()


GENERATION = [
    Case("path", change(lambda d: d["files"][0].__setitem__(0, "../x")), "is not a file name"),
    Case("path", rename(lambda at: link_outside(at / FILE), "link"), "is a link to outside"),
    Case("dtype", tensors(lambda t: t.__setitem__(2, "F4"), "dtype"), "is F4["),
    Case("shape", tensors(lambda t: t.__setitem__(1, [-8, 4]), "negative"), "[-8, 4]"),
    Case("shape", tensors(lambda t: t.__setitem__(1, [1 << 62, 4]), "large"), "more than any disk"),
    Case("shape", tensors(lambda t: t.__setitem__(1, [1 << 80, 4]), "huge"), "beyond 2^63"),
    Case("hole", drop_a_row, "the state is not whole"),
    Case("duplicate", copy_the_part, "two parts are of host 'offline'"),
    Case("missing file", lose(FILE), "rank-0.safetensors is missing"),
    Case("missing file", drop_a_tensor, "the part of a host is missing"),
    Case("extra file", add_a_part(generation=2), "says that it is generation 2"),
    Case("truncated", shorter(FILE), "bytes long"),
    Case("bomb", longer(FILE), "bytes long"),
    Case("bomb", change(lambda d: d["begin"].__setitem__(0, 1 << 40)), "ends beyond"),
    Case("count", change(lambda d: d.update(begin=[0])), "values of begin for"),
    Case("digest", break_the_digest, "its digest is"),
    Case("digest", spoil_without_report, "says was written", 4),
    Case("iterations", add_a_part(step=4), "Never mix generations"),
    Case("suspect", nan_as_saved, "nothing but NaN", 0),
    Case("run", add_a_foreign_part, "of several jobs or rounds"),
    Case("version", change(lambda d: d.update(version=99)), "version 99; this release reads"),
    Case("version", report_version, "scalai.json is of version 99"),
]
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


def header(edit: Callable[[dict[str, Any]], object], name: str, *, text: Any = None) -> Any:
    """Return what writes the header of the first file again, and leaves the tensors."""

    def damage(directory: Path) -> None:
        path = shard(directory)
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        entries = json.loads(data[8 : 8 + length])
        edit(entries)
        new = json.dumps(entries) if text is None else text(json.dumps(entries))
        path.write_bytes(len(new).to_bytes(8, "little") + new.encode() + data[8 + length :])

    return rename(damage, name)


def first(entries: dict[str, Any]) -> dict[str, Any]:
    return next(of for name, of in entries.items() if name != "__metadata__")


def repeated(text: str) -> str:
    """Return a header with one entry twice."""
    entries = json.loads(text)
    name = next(name for name in entries if name != "__metadata__")
    return text[:-1] + f", {json.dumps(name)}: {json.dumps(entries[name])}}}"


def index(edit: Callable[[dict[str, str]], object], name: str) -> Any:
    """Return what changes which file the index names for which tensor."""

    def damage(directory: Path) -> None:
        data = json.loads((directory / INDEX).read_text())
        edit(data["weight_map"])
        (directory / INDEX).write_text(json.dumps(data))

    return rename(damage, name)


def put(entries: dict[str, Any], value: str) -> None:
    entries[next(iter(entries))] = value


def store_a_tensor_in_two_files(directory: Path) -> None:
    shutil.copy(shard(directory), shard(directory, 1))


def link(directory: Path) -> None:
    path = shard(directory)
    shutil.move(path, directory.parents[1] / "elsewhere")
    path.symlink_to(directory.parents[1] / "elsewhere")


def lose_a_shard(directory: Path) -> None:
    shard(directory).unlink()


def lose_the_index(directory: Path) -> None:
    shutil.copy(shard(directory), directory / "model.safetensors")
    (directory / INDEX).unlink()


def add_a_shard(directory: Path) -> None:
    shutil.copy(shard(directory), directory / "model-00001-of-00099.safetensors")


def forget_a_shard(directory: Path) -> None:
    """The index and the files of a part of a model."""
    path = shard(directory)
    path.unlink()

    def forget(entries: dict[str, str]) -> None:
        for name in [name for name, file in entries.items() if file == path.name]:
            del entries[name]

    index(forget, "forget")(directory)


def cut_a_shard(directory: Path) -> None:
    os.truncate(shard(directory), shard(directory).stat().st_size - 1)


def grow_a_shard(directory: Path) -> None:
    os.truncate(shard(directory), 1 << 20)


def claim_a_header(directory: Path) -> None:
    path = shard(directory)
    path.write_bytes((1 << 40).to_bytes(8, "little") + path.read_bytes()[8:])


def nest_deeply(text: str) -> str:
    return '{"a":' + "[" * 200_000 + "]" * 200_000 + "}"


SAFETENSORS = [
    Case("path", index(lambda e: put(e, "../x.safetensors"), "dots"), "is no file beside it"),
    Case("path", index(lambda e: put(e, "/etc/passwd"), "absolute"), "is no file beside it"),
    Case("path", link, "is a link to outside"),
    Case("dtype", header(lambda e: first(e).update(dtype="F4"), "dtype"), "is of dtype 'F4'"),
    Case("shape", header(lambda e: first(e).update(shape=[-8, 4]), "negative"), "shape [-8, 4]"),
    Case("shape", header(lambda e: first(e).update(shape=[1 << 62, 4]), "large"), "lies at"),
    Case("shape", header(lambda e: first(e).update(shape=[8.5, 4]), "halves"), "shape [8.5, 4]"),
    Case("hole", header(lambda e: first(e).update(data_offsets=[4, 132]), "gap"), "lies at 4:132"),
    Case("overlap", header(lambda e: e.update(other={**first(e)}), "overlap"), "lies at 0:"),
    Case("duplicate", header(lambda e: None, "twice", text=repeated), "comes twice"),
    Case("duplicate", store_a_tensor_in_two_files, "and in model-00001"),
    Case("missing file", lose_a_shard, "is missing; model.safetensors.index.json places"),
    Case("missing file", lose_the_index, "the index is missing"),
    Case("extra file", add_a_shard, "no index names it"),
    Case("truncated", cut_a_shard, "is damaged or truncated"),
    Case("bomb", claim_a_header, "a header of 1099511627776 bytes"),
    Case("bomb", grow_a_shard, "by its header"),
    Case("count", header(lambda e: first(e).update(shape=[1] * 99), "axes"), "has shape [1, 1"),
    Case("count", header(lambda e: None, "nested", text=nest_deeply), "nested too deep"),
    Case("digest", spoil("param/decoder.final_layernorm.weight"), "says was written", 4),
    Case("world", forget_a_shard, "by their names"),
    Case("suspect", with_nan, "nothing but NaN", 0),
    Case("version", report_version, "scalai.json is of version 99"),
]
SAFETENSORS_NOT = {
    "setting": "it holds no settings of a job",
    "iterations": "weights without a step",
    "run": "nothing in it says of which job it is",
    "code": "JSON and raw bytes alone",
}
