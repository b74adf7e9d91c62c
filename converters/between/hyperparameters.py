"""Parameter groups of one framework with the rates of another's, matched by their parameters."""

from collections.abc import Mapping, Sequence
from typing import Any

from scalai.converters.between.translation import INVENTED, LEFT_OUT

RATES = ("lr", "betas", "eps", "weight_decay")
"""Adam's hyperparameters under torch's names; both frameworks use them."""

Group = Mapping[str, Any]


def with_rates(
    bases: Sequence[Group], sources: Sequence[Sequence[Group]], notes: list[str]
) -> tuple[dict[str, Any], ...]:
    """Return the target's groups with the source's rates.

    Args:
        bases: The target's groups from its job.
        sources: For each of them, the source's groups of its parameters.
        notes: Gets a line for each rate not the source's.
    """
    return tuple(
        {**base, **_rates(base, groups, number, notes)}
        for number, (base, groups) in enumerate(zip(bases, sources, strict=True))
    )


def _rates(base: Group, groups: Sequence[Group], number: int, notes: list[str]) -> dict[str, Any]:
    found = {}
    for rate in RATES:
        known: list[Any] = []
        for group in groups:
            value = group.get(rate)
            value = tuple(value) if isinstance(value, list) else value
            if value is not None and value not in known:
                known.append(value)
        if len(known) == 1:
            found[rate] = known[0]
        elif known:
            notes.append(
                f"{LEFT_OUT}{rate} of parameter group {number}, for its parameters had {known}: it "
                f"stays {base.get(rate)} as in --args-from"
            )
        else:
            notes.append(f"{INVENTED}{rate} {base.get(rate)} of parameter group {number}")
    return found
