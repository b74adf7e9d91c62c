"""The checksums of torch's own files, also of several archives in one file."""

import io
from pathlib import Path

from scalai.converters.checksums import storages_in
from scalai.converters.zip_members import storages


def test_the_storages_of_every_archive_in_a_file_are_found(tmp_path: Path) -> None:
    import torch

    tensors = [torch.arange(5 + number, dtype=torch.float32) for number in range(4)]
    file = io.BytesIO()
    for number in range(0, 4, 2):  # as torch_dist writes them: one archive behind the other
        torch.save({"a": tensors[number], "b": tensors[number + 1]}, file)
    (tmp_path / "__0_0.distcp").write_bytes(file.getvalue())
    found = sorted(storages_in(tmp_path, "__0_0.distcp"), key=lambda stored: stored.begin)
    data = file.getvalue()
    assert [data[s.begin : s.begin + s.size_bytes] for s in found] == [
        tensor.numpy().tobytes() for tensor in tensors
    ]


def test_what_has_no_checksums_has_none(tmp_path: Path) -> None:
    import torch

    (tmp_path / "other").write_bytes(b"PK\x03\x04 but no archive")
    (tmp_path / "empty").write_bytes(b"")
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(torch.ones(3), tmp_path / "unchecked")
    finally:
        torch.serialization.set_crc32_options(True)
    for name in ("other", "empty", "unchecked"):
        assert list(storages_in(tmp_path, name)) == []


def test_a_damaged_directory_yields_nothing_outside_of_the_file(tmp_path: Path) -> None:
    import torch

    file = io.BytesIO()
    for number in range(2):
        torch.save({"a": torch.ones(5) * number}, file)
    data = file.getvalue()
    whole = list(storages(memoryview(data)))
    assert len(whole) == 2
    for at in range(len(data)):
        for value in (0, 0x7F, 0xFF):
            changed = data[:at] + bytes([value]) + data[at + 1 :]
            for member in storages(memoryview(changed)):
                assert 0 <= member.begin < member.begin + member.size_bytes <= len(data)
    for end in range(0, len(data), 7):
        assert len(list(storages(memoryview(data[:end])))) <= 1
