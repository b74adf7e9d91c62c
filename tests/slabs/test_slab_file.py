"""A slab is read from a file, its bytes alone, and nothing wrong is."""

import builtins
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import safetensors.numpy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import scalai
from scalai.core.errors import RefusedError, UsageError
from scalai.store.files import header_of

VALUES = np.arange(3 * 8 * 6 * 5, dtype=np.float32).reshape(3, 8, 6, 5)
SLAB = np.s_[1:2, 2:5, :, 1:4]
SLAB_BYTES = VALUES[SLAB].nbytes


def npy(folder: Path) -> tuple[Path, str | None]:
    np.save(folder / "volume.npy", VALUES)
    return folder / "volume.npy", None


def safe(folder: Path) -> tuple[Path, str | None]:
    path = folder / "volume.safetensors"
    other = np.zeros(7, np.int64)
    safetensors.numpy.save_file({"other": other, "volume": VALUES}, path)
    return path, "volume"


def hdf5(folder: Path) -> tuple[Path, str | None]:
    with h5py.File(folder / "volume.h5", "w") as file:
        file["group/volume"] = VALUES
        file["empty"] = h5py.Empty("f4")
        file["words"] = np.array([b"a", b"bc"])
    return folder / "volume.h5", "group/volume"


Make = Callable[[Path], tuple[Path, str | None]]
every_kind = pytest.mark.parametrize("make", [npy, safe, hdf5])

# ------------------------------------------------------------------ what is refused


@every_kind
def test_a_slab_beyond_the_shape_of_other_axes_or_with_steps_is_refused(
    make: Make, tmp_path: Path
) -> None:
    path, key = make(tmp_path)
    for index in (np.s_[:, 2:9, :, :], np.s_[:, :, -1:3, :], np.s_[2:1, :, :, :]):
        with pytest.raises(RefusedError, match=r"reaches beyond its \d elements"):
            scalai.read_slab(path, key, index)
    wrong: Any
    for wrong, why in (
        (np.s_[0:1, :, :], r"has 3 axes, and the array \[3, 8, 6, 5\] has 4"),
        (np.s_[0:1, 0:8:2, :, :], r"along axis 1 .* is no range"),
        ((0, *SLAB[1:]), r"0 along axis 0 .* is no range"),
    ):
        with pytest.raises(UsageError, match=why):
            scalai.read_slab(path, key, wrong)


@pytest.mark.fault
@pytest.mark.parametrize("key", ["volumes", "group", "group/volume/none", None, ""])
@pytest.mark.parametrize("make", [safe, hdf5])
def test_an_unknown_key_is_refused_with_those_that_there_are(
    make: Make, key: str | None, tmp_path: Path
) -> None:
    path, _ = make(tmp_path)
    with pytest.raises(RefusedError, match=f"no (tensor|data set) {key!r}; it has .*'.*'"):
        scalai.read_slab(path, key, SLAB)


def test_a_npy_file_has_no_keys(tmp_path: Path) -> None:
    path, _ = npy(tmp_path)
    with pytest.raises(RefusedError, match="'volume' is none of it"):
        scalai.read_slab(path, "volume", SLAB)


def grown(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def touched(path: Path) -> None:
    os.utime(path, ns=(1, 1))


def replaced(path: Path) -> None:
    aside = path.with_name("aside")
    aside.write_bytes(path.read_bytes())
    os.utime(aside, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    aside.rename(path)


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.fault
@every_kind
@pytest.mark.parametrize("change", [grown, touched, replaced, cut_short])
def test_a_file_that_changed_since_it_was_opened_is_not_read(
    make: Make, change: Callable[[Path], None], tmp_path: Path
) -> None:
    path, key = make(tmp_path)
    with scalai.SlabFile(path, key) as file:
        file.read(SLAB)
        change(path)
        with pytest.raises(RefusedError, match="has changed since it was opened"):
            file.read(np.s_[2:3, :, :, :])


@pytest.mark.fault
@every_kind
def test_a_file_that_is_gone_is_not_read(make: Make, tmp_path: Path) -> None:
    path, key = make(tmp_path)
    with scalai.SlabFile(path, key) as file:
        path.unlink()
        with pytest.raises(RefusedError, match="is gone"):
            file.read(SLAB)
    with pytest.raises(RefusedError, match=r"cannot be read .No such file"):
        scalai.read_slab(path, key, SLAB)
    with pytest.raises(RefusedError, match="is no file"):
        scalai.read_slab(tmp_path, key, SLAB)


@pytest.mark.fault
@every_kind
def test_a_truncated_file_is_refused_wherever_it_ends(make: Make, tmp_path: Path) -> None:
    path, key = make(tmp_path)
    whole = path.read_bytes()
    for size in (0, 1, 5, 8, 9, 12, 60, 100, 500, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(RefusedError, match=r"damaged|truncated|cannot be read"):
            scalai.read_slab(path, key, SLAB)


@pytest.mark.fault
@every_kind
def test_a_damaged_header_ends_in_no_other_error(make: Make, tmp_path: Path) -> None:
    path, key = make(tmp_path)
    whole = path.read_bytes()
    random = np.random.default_rng(5)
    for _ in range(60):
        place = int(random.integers(0, 120))
        path.write_bytes(whole[:place] + bytes([int(random.integers(256))]) + whole[place + 1 :])
        try:
            scalai.read_slab(path, key, SLAB)
        except (RefusedError, UsageError):
            continue


def mixed(path: Path, *, begin: int = 8, end: int = 10, of_complex: int = 16) -> None:
    """Write tensors of float32, complex numbers, BF16, and 4-bit floats, unknown to this house."""
    entries = {
        "volume": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        "small": {"dtype": "F4", "shape": [4], "data_offsets": [begin, end]},
        "field": {"dtype": "C64", "shape": [2], "data_offsets": [10, 10 + of_complex]},
        "half": {"dtype": "BF16", "shape": [1], "data_offsets": [26, 28]},
    }
    values = np.array([1, 2], "<f4").tobytes() + b"ab" + np.array([1j, 2], "<c8").tobytes() + b"h0"
    path.write_bytes(header_of(entries, 8) + values)


def test_a_dtype_that_numpy_has_not_is_refused_where_it_is_asked_for_alone(tmp_path: Path) -> None:
    path = tmp_path / "mixed.safetensors"
    mixed(path)
    assert scalai.read_slab(path, "volume", np.s_[1:2,]).values.tolist() == [2]
    assert scalai.read_slab(path, "field", np.s_[0:2,]).values.tolist() == [1j, 2]
    for name, dtype in (("small", "F4"), ("half", "BF16")):
        why = f"{name!r} .* is of dtype {dtype}, which numpy does not"
        with pytest.raises(RefusedError, match=why):
            scalai.read_slab(path, name, np.s_[:,])


@pytest.mark.parametrize("wrong", [{"begin": 9}, {"end": 7}, {"end": 11}, {"of_complex": 12}])
def test_a_gap_beside_an_unknown_dtype_is_damage(wrong: dict[str, int], tmp_path: Path) -> None:
    mixed(tmp_path / "mixed.safetensors", **wrong)
    with pytest.raises(RefusedError, match="is damaged or truncated"):
        scalai.read_slab(tmp_path / "mixed.safetensors", "volume", np.s_[:,])


@pytest.mark.parametrize(
    "values", ["empty", "words", np.array([{}, 1]), np.zeros(3, "i4,f4"), np.array(["a"])]
)
def test_what_is_no_array_of_numbers_is_refused(values: Any, tmp_path: Path) -> None:
    path, key = hdf5(tmp_path)[0], values
    if not isinstance(values, str):
        path, key = tmp_path / "odd.npy", None
        np.save(path, values)
    with pytest.raises(RefusedError, match="slabs are of numbers or booleans"):
        scalai.read_slab(path, key, np.s_[:,])


def test_data_that_lie_in_another_file_are_refused(tmp_path: Path) -> None:
    """Nobody would see that the other file changes."""
    hdf5(tmp_path)
    with h5py.File(tmp_path / "links.h5", "w") as file:
        file["link"] = h5py.ExternalLink("volume.h5", "group/volume")
        layout = h5py.VirtualLayout(VALUES.shape, "f4")
        layout[:] = h5py.VirtualSource(tmp_path / "volume.h5", "group/volume", VALUES.shape)
        file.create_virtual_dataset("virtual", layout)
        file.create_dataset("raw", (4,), "f4", external=[(str(tmp_path / "raw"), 0, 16)])
    for key in ("link", "virtual", "raw"):
        with pytest.raises(RefusedError, match=r"lies in other files|no data set"):
            scalai.read_slab(tmp_path / "links.h5", key, SLAB)


def test_without_h5py_or_fsspec_it_is_said_what_brings_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, key = hdf5(tmp_path)
    real = builtins.__import__

    def missing(name: str, *rest: Any, **more: Any) -> Any:
        if name.partition(".")[0] in ("h5py", "fsspec"):
            raise ImportError(f"No module named {name!r}")
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", missing)
    for where in (path, f"file://{path}"):
        with pytest.raises(UsageError, match=r"scalai\[slabs\] brings"):
            scalai.read_slab(where, key, SLAB)


def test_a_closed_file_is_not_read(tmp_path: Path) -> None:
    path, key = npy(tmp_path)
    file = scalai.SlabFile(path, key)
    file.close()
    with pytest.raises(UsageError, match="is closed"):
        file.read(SLAB)


# ------------------------------------------------------------------ what is promised


@every_kind
def test_a_slab_is_what_numpy_has_there(make: Make, tmp_path: Path) -> None:
    path, key = make(tmp_path)
    with scalai.SlabFile(path, key) as file:
        assert (file.shape, file.dtype) == (VALUES.shape, VALUES.dtype)
        for index in (SLAB, np.s_[:, :, :, :], np.s_[0:3, 7:8, :, :], np.s_[0:0, :, :, :]):
            assert np.array_equal(file.read(index), VALUES[index])


@pytest.mark.parametrize(("make", "header"), [(npy, 8 + 128), (safe, 8 + 200)])
def test_exactly_the_slabs_bytes_are_read(make: Make, header: int, tmp_path: Path) -> None:
    path, key = make(tmp_path)
    with scalai.SlabFile(path, key) as file:
        opened = file.bytes_read
        assert opened <= header
        file.read(SLAB)
        assert file.bytes_read - opened == SLAB_BYTES
        file.read(np.s_[0:1, 0:0, :, :])
        assert file.bytes_read - opened == SLAB_BYTES
    read = scalai.read_slab(path, key, SLAB)
    assert read.bytes_read == opened + SLAB_BYTES and np.array_equal(read.values, VALUES[SLAB])


@pytest.mark.parametrize("block", [512, 1024, 8192])
@pytest.mark.parametrize("text", [b"", b"MATLAB 7.3 MAT-file"])
def test_hdf5_behind_a_block_of_another_program_is_read(
    block: int, text: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "volume.mat"
    with h5py.File(path, "w", userblock_size=block) as file:
        file["volume"] = VALUES
    with path.open("r+b") as raw:
        raw.write(text)
    assert np.array_equal(scalai.read_slab(path, "volume", SLAB).values, VALUES[SLAB])


def test_an_array_of_one_axis_takes_one_range(tmp_path: Path) -> None:
    np.save(tmp_path / "line.npy", np.arange(9))
    assert scalai.read_slab(tmp_path / "line.npy", None, np.s_[2:4]).values.tolist() == [2, 3]
    with pytest.raises(UsageError, match=r"has 1 axes, and the array \[3, 8, 6, 5\] has 4"):
        scalai.read_slab(*npy(tmp_path), np.s_[0:1])


@pytest.mark.parametrize("dtype", [">f8", ">i2", ">c8", "<f4"])
def test_values_come_in_the_byte_order_of_the_machine(dtype: str, tmp_path: Path) -> None:
    """Torch takes no other."""
    values = np.asfortranarray(np.arange(6).reshape(2, 3).astype(dtype))
    np.save(tmp_path / "values.npy", values)
    with h5py.File(tmp_path / "values.h5", "w") as file:
        file["values"] = values
    for name, key in (("values.npy", None), ("values.h5", "values")):
        with scalai.SlabFile(tmp_path / name, key) as opened:
            read = opened.read(np.s_[0:2, 1:3])
            assert read.dtype == opened.dtype == values.dtype.newbyteorder("=")
        assert torch.equal(torch.from_numpy(read), torch.from_numpy(read.copy()))
        assert np.array_equal(read, values[0:2, 1:3])


def test_of_hdf5_a_slabs_bytes_and_the_files_tables_are_read(tmp_path: Path) -> None:
    large = np.random.default_rng(1).random((64, 64, 64))
    with h5py.File(tmp_path / "large.h5", "w") as file:
        file["contiguous"] = large
        file.create_dataset("chunked", data=large, chunks=(8, 64, 64), compression="gzip")
    size = (tmp_path / "large.h5").stat().st_size
    for key, most in (("contiguous", large.nbytes // 8 + 40_000), ("chunked", size // 8)):
        read = scalai.read_slab(tmp_path / "large.h5", key, np.s_[16:24, :, :])
        assert np.array_equal(read.values, large[16:24])
        assert large.nbytes // 16 < read.bytes_read < most


@settings(deadline=None)
@given(st.data())
def test_any_slab_of_a_column_major_or_big_endian_array_is_read(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), max_size=4)))
    dtype = data.draw(st.sampled_from([">f8", "<i2", "?", "<c8"]))
    order: Any = data.draw(st.sampled_from(["C", "F"]))
    values = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype, order=order)
    low = [data.draw(st.integers(0, size)) for size in shape]
    index = tuple(
        slice(a, data.draw(st.integers(a, size))) for a, size in zip(low, shape, strict=True)
    )
    with tempfile.TemporaryDirectory() as folder:
        np.save(Path(folder) / "any.npy", values)
        found = scalai.read_slab(Path(folder) / "any.npy", None, index).values
    assert found.dtype == values.dtype.newbyteorder("=") and np.array_equal(found, values[index])


@every_kind
def test_a_slab_is_read_behind_a_url(make: Make, tmp_path: Path) -> None:
    path, key = make(tmp_path)
    here = scalai.read_slab(path, key, SLAB)
    there = scalai.read_slab(f"file://{path}", key, SLAB)
    assert np.array_equal(there.values, VALUES[SLAB]) and there.bytes_read == here.bytes_read
    with scalai.SlabFile(f"file://{path}", key) as file:
        cut_short(path)
        with pytest.raises(RefusedError, match="has changed since it was opened"):
            file.read(np.s_[2:3, :, :, :])
    path.unlink()
    with pytest.raises(RefusedError, match="cannot be read"):
        scalai.read_slab(f"file://{path}", key, SLAB)
    with pytest.raises(UsageError, match="nowhere"):
        scalai.read_slab("nowhere://volume.npy", key, SLAB)
