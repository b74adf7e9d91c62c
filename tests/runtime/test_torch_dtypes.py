"""Every dtype has one name, and the same width, everywhere."""

import numpy as np
import pytest
import torch
from safetensors.torch import save

from scalai.core.errors import RefusedError
from scalai.core.tensors.dtypes import FROM_STORAGE, ITEM_BYTES, NUMPY_DTYPES
from scalai.runtime.live import TORCH_DTYPES, dtype_name
from scalai.store.files import number_of


@pytest.mark.parametrize("name", ITEM_BYTES)
def test_a_dtype_is_as_wide_in_torch_and_numpy_and_named_as_safetensors_names_it(name: str) -> None:
    dtype = TORCH_DTYPES[name]
    assert dtype.itemsize == ITEM_BYTES[name] and dtype_name(dtype) == name
    assert f'"dtype":"{name}"'.encode() in save({"w": torch.zeros(2, dtype=dtype)})
    if name in NUMPY_DTYPES:
        assert np.dtype(NUMPY_DTYPES[name]).itemsize == ITEM_BYTES[name]


@pytest.mark.parametrize("name", ITEM_BYTES)
def test_the_first_element_of_bytes_is_read_as_its_dtype(name: str) -> None:
    content = torch.tensor([1, 0]).to(TORCH_DTYPES[name]).view(torch.uint8).numpy().tobytes()
    assert number_of(content, name) == 1


@pytest.mark.filterwarnings("ignore:TypedStorage")
def test_storages_are_named_as_torch_names_them() -> None:
    for storage, name in FROM_STORAGE.items():
        assert getattr(torch, storage)().dtype == TORCH_DTYPES[name]


def test_a_dtype_without_a_name_is_refused() -> None:
    with pytest.raises(RefusedError, match=r"torch\.complex64 cannot be kept; known are"):
        dtype_name(torch.complex64)
