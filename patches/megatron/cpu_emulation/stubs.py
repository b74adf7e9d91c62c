"""Modules and names imported by megatron without condition and missing on a CPU machine, and tools
to replace names."""

import importlib.machinery
import importlib.util
import sys
import types
import typing
from collections.abc import Callable
from typing import Any

import torch.utils._triton as torch_triton
import typing_extensions
import wrapt


def replace(*owners: Any, **values: Any) -> None:
    """Set attributes of modules or classes; the same values on every owner."""
    for owner in owners:
        for name, value in values.items():
            setattr(owner, name, value)


def returning(value: Any) -> Callable[..., Any]:
    """Return a new function with any arguments and the result ``value``.

    One for each replaced name: torch's compiler keeps a table by function and refuses to find one
    under two names.
    """

    def answer(*args: Any, **kwargs: Any) -> Any:
        return value

    return answer


def nothing() -> Callable[..., None]:
    """Return a new function that stands in for a call without meaning on a CPU."""
    return returning(None)


def when_imported(module: str, patch: Callable[[Any], None]) -> None:
    """Call ``patch(module)`` right after its import, or now where it was imported before.

    The importer sees the patched module: names that it takes by ``from module import name`` are
    patched ones.
    """
    wrapt.register_post_import_hook(patch, module)


class Anything:
    """Answers every attribute, call and index with itself; as a decorator it changes nothing."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else self

    def __getattr__(self, name: str) -> "Anything":
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __getitem__(self, index: Any) -> "Anything":
        return self

    def __or__(self, other: Any) -> "Anything":
        return self

    __ror__ = __or__


class AnythingModule(types.ModuleType):
    """A module with every attribute but the ones that Python itself asks for."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)
        self.__path__: list[str] = []
        self.__version__ = "0.0.0"

    def __getattr__(self, name: str) -> Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()


def install() -> None:
    """Offer ``typing.override`` and ``triton`` where they are missing."""
    if not hasattr(typing, "override"):  # megatron-core 0.19 imports it; Python has it from 3.12 on
        replace(typing, override=typing_extensions.override)
    if importlib.util.find_spec("triton") is None:
        # Imported without condition by batch_invariant_kernels.py from 0.16 on. Torch caches its
        # answer to "is there a triton?": ask before the stub exists, so that torch itself never
        # believes in it.
        torch_triton.has_triton_package()
        torch_triton.has_triton()
        triton, language = AnythingModule("triton"), AnythingModule("triton.language")
        replace(triton, language=language)
        sys.modules.update({"triton": triton, "triton.language": language})
