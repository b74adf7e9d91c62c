"""Layouts refused by Megatron-LM's own classes.

``core/degrees/degrees.py`` checks a layout by flags. Megatron-LM's argument checks and
configurations are asked by a worker of the first round, before the model is built. The coordinator
then offers no refused layout.
"""

import contextlib
import copy
import importlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from scalai.converters.megatron.arguments import (
    MegatronArguments,
    derived_flags,
    read_arguments,
    scan,
)
from scalai.converters.megatron.rules import values_of
from scalai.core.degrees.choice import replicated, splits
from scalai.core.degrees.degrees import Degrees
from scalai.core.degrees.policy import Case, DegreePolicy
from scalai.core.errors import ScalaiError

log = logging.getLogger(__name__)

REFUSED = "refused_layouts"
"""Under this name it is told: a list of TP, PP, VPP and the reason."""
MOST_CUT = 1024
"""Most ranks of a replica in a question."""
MOST_ASKED = 256
"""Most questions."""
_MODULES = ("megatron.training.argument_utils", "megatron.training.arguments")
"""Modules of ``core_transformer_config_from_args``: in 0.20, and before."""


Validate = Callable[[Any], object]
"""``validate_args`` with the script's defaults."""


def refused_layouts(
    flags: Sequence[str], parsed: Any, validate: Validate, release: tuple[int, ...]
) -> list[list[int | str]]:
    """Ask for every layout allowed by the flags, beside the present one.

    Args:
        flags: The script's command line, with those of the present layout.
        parsed: The namespace before ``validate_args``; a copy of it is changed.

    Returns:
        The value of ``REFUSED``. Nothing if the present layout itself is refused like this: then
        the question is not Megatron-LM's.
    """
    arguments = read_arguments(flags, release=release, allow_untested=True)
    asked = arguments.initial
    present = Degrees(asked.tp, asked.pp, 1, asked.vpp, asked.cp or 1, asked.ep or 1)
    present = replace(present, dp=max(1, parsed.world_size // present.world_size))
    make = _config_maker()
    why = _refusal(arguments, present, parsed, validate, make)
    if why is not None:
        log.info("event=layouts_not_asked the present one is not taken so: %s", why)
        return []
    answers = (
        (each, _refusal(arguments, each, parsed, validate, make))
        for each in islice(_offered(arguments), MOST_ASKED)
    )
    return [[each.tp, each.pp, each.vpp, why] for each, why in answers if why is not None]


def _offered(arguments: MegatronArguments) -> Iterator[Degrees]:
    """Yield each cut of the model allowed by flags, with the fewest replicas, small ones first."""
    policy = DegreePolicy(initial=arguments.initial, min_model_parallel=1)
    case = Case(MOST_CUT, arguments.limits, policy, None, ())
    for split in sorted(splits(case, MOST_CUT, 1), key=lambda each: each.tp * each.pp):
        most = split.tp * split.pp * (case.kept.cp or 1) * (case.limits.global_batch_size or 1)
        yield from islice(replicated(replace(case, world=most), split), 1)


def _refusal(
    arguments: MegatronArguments, degrees: Degrees, parsed: Any, validate: Validate,
    make: Callable[[Any], object],
) -> str | None:  # fmt: skip
    """Say why Megatron-LM does not take a layout; None: it does."""
    try:
        flags, _ = derived_flags(arguments, degrees, None)
    except ScalaiError:
        return None  # it is not offered
    job = copy.deepcopy(parsed)
    for name, word in values_of(scan(flags)).items():
        setattr(job, name, int(word) if isinstance(word, str) and word.isdigit() else word)
    job.rank, job.world_size = 1, degrees.world_size
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            validate(job)
            make(job)
    except (Exception, SystemExit) as error:  # whatever a start may raise is the answer
        lines = str(error).strip().splitlines()
        return lines[0] if lines else type(error).__name__
    return None


def _config_maker() -> Callable[[Any], object]:
    for name in _MODULES:
        try:
            made: Callable[[Any], object] = importlib.import_module(
                name
            ).core_transformer_config_from_args
        except (ImportError, AttributeError):
            continue
        return made
    return lambda job: None
