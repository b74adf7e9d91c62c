"""What a job knows of its data sets from round to round, so that one which has changed is noticed
before a step draws from it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from scalai.core import fields
from scalai.core.jsonable import Json


@dataclass(frozen=True, slots=True)
class Source:
    """What the order of a data set follows from.

    Attributes:
        data_set: Its name.
        step: Behind this one it is so.
        facts: Such as size, seed, and weights of a blend; of what is no fact nobody says anything.
    """

    data_set: str
    step: int
    facts: Mapping[str, Json]

    def to_json(self) -> list[Json]:
        return [self.data_set, self.step, dict(self.facts)]

    @classmethod
    def from_json(cls, value: Json) -> "Source":
        data_set, step, facts = fields.listed(value, "a source")
        return cls(
            fields.text(data_set, "data_set"), fields.whole_number(step, "step"),
            dict(fields.mapped(facts, "facts")),
        )  # fmt: skip


def known_of(sources: Iterable[Source], data_set: str) -> Mapping[str, Json]:
    """Return the latest facts that are known of a data set."""
    found: Mapping[str, Json] = {}
    for source in sources:
        found = source.facts if source.data_set == data_set else found
    return found


def difference(before: Mapping[str, Json], now: Mapping[str, Json]) -> str:
    """Say in which facts a data set is another one; empty: in none that both know."""
    return ", ".join(
        f"{name}={now[name]!r} (it was {before[name]!r})"
        for name in sorted(before.keys() & now.keys())
        if before[name] != now[name]
    )


def changes(sources: Iterable[Source]) -> tuple[tuple[Source, str], ...]:
    """Return where data sets have become others, and in what."""
    known: dict[str, Mapping[str, Json]] = {}
    found = []
    for source in sources:
        if text := difference(known.get(source.data_set, {}), source.facts):
            found.append((source, text))
        known[source.data_set] = source.facts
    return tuple(found)
