"""The public names of ``import scalai``: a fixed set, each imported at its first use."""

import importlib
import json
import subprocess
import sys
from collections.abc import Sequence

import pytest

import scalai
from scalai.core import errors

ERRORS = {
    "AbsentError", "AnswerError", "DamageError", "EndedError", "LayoutError", "MemoryShortError",
    "MessageError", "MismatchError", "PeerError", "ProofError", "RefusedError", "ReplacedError",
    "RoomError", "ScalaiError", "SilentError", "StaleError", "StoreError",
    "UnprovenError", "UsageError", "VersionError",
}  # fmt: skip
PLACES = {
    "current": "scalai.runtime.session",
    "elastic": "scalai.runtime.session",
    "Session": "scalai.runtime.session",
    "OrderedBatches": "scalai.runtime.ordered_batches",
    "Shuffled": "scalai.core.dataset.order",
    "Blend": "scalai.core.dataset.order",
    "BatchRamp": "scalai.core.degrees.batches",
    "MegatronState": "scalai.patches.megatron.megatron_state",
    "DeepSpeedState": "scalai.patches.deepspeed.deepspeed_state",
    "ReplicatedState": "scalai.patches.replicated",
    "Slabs": "scalai.core.tensors.slabs",
    "zig_zag": "scalai.core.tensors.slabs",
    "SlabFile": "scalai.slabs.slab_file",
    "read_slab": "scalai.slabs.slab_file",
    "exchange_halo": "scalai.slabs.halo",
    **dict.fromkeys(ERRORS, "scalai.core.errors"),
}


def test_the_set_of_public_names_is_fixed() -> None:
    """Scripts import these: a name that goes, or comes, is a decision."""
    assert set(scalai.__all__) == set(PLACES) and len(scalai.__all__) == len(PLACES)


def test_every_error_is_public() -> None:
    tree = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, scalai.ScalaiError)
    }
    assert tree == ERRORS


@pytest.mark.parametrize("name", sorted(PLACES))
def test_each_name_is_what_lies_at_its_place(name: str) -> None:
    place = PLACES[name]
    if name in ("MegatronState", "DeepSpeedState"):
        pytest.importorskip({"MegatronState": "megatron.core"}.get(name, "deepspeed"))
    assert getattr(scalai, name) is getattr(importlib.import_module(place), name)
    assert getattr(scalai, name).__module__ == place


def test_an_unknown_name_is_said_to_be_none() -> None:
    with pytest.raises(AttributeError, match=r"'scalai' has no attribute 'Sesion'.*'Session'"):
        scalai.Sesion  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'Sesion'"):
        from scalai import Sesion  # type: ignore[attr-defined]  # noqa: F401


def in_a_fresh_process(code: str) -> Sequence[str]:
    """Run code that prints a list as JSON, and return the list."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    return list(json.loads(done.stdout))


def test_the_names_are_listed_and_nothing_is_imported_for_it() -> None:
    code = (
        "import json, sys, scalai\n"
        "listed = sorted({*scalai.__all__} - {*dir(scalai)})\n"
        "brought = {name.partition('.')[0] for name in sys.modules}\n"
        "heavy = brought & {'torch', 'numpy', 'megatron', 'deepspeed', 'transformers'}\n"
        "print(json.dumps([*listed, *heavy, *(n for n in sys.modules if n[:7] == 'scalai.')]))"
    )
    assert in_a_fresh_process(code) == []


def test_errors_are_caught_without_torch() -> None:
    code = (
        "import json, sys\nfrom scalai import RefusedError, ScalaiError\n"
        "print(json.dumps([name for name in ('torch', 'numpy') if name in sys.modules]))"
    )
    assert in_a_fresh_process(code) == []


@pytest.mark.parametrize(
    ("name", "framework", "way"),
    [
        ("MegatronState", "megatron", r"scalai[megatron] brings it"),
        ("Session", "torch", "pip install it"),
    ],
)
def test_what_is_not_installed_is_named_with_the_way_out(
    name: str, framework: str, way: str
) -> None:
    code = (
        f"import json, sys\nsys.modules[{framework!r}] = None\nimport scalai\n"
        f"try:\n    scalai.{name}\nexcept ModuleNotFoundError as error:\n"
        "    print(json.dumps([str(error), error.name]))"
    )
    text, missing = in_a_fresh_process(code)
    assert missing.partition(".")[0] == framework
    assert text == f"scalai.{name} needs {missing}, which is not installed here; {way}."
