"""A generation as a whole: the available parts of its hosts, put together."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scalai.core.errors import LayoutError, StoreError
from scalai.core.jsonable import Json
from scalai.core.tensors.collection import concatenate
from scalai.core.tensors.coverage import check_coverage
from scalai.core.tensors.fingerprint import unite_committed
from scalai.store.manifest import HostManifest, read_saved_manifest


def unite(parts: Iterable[Mapping[str, Json]]) -> dict[str, Json]:
    """Unite nested mappings. Of two values the earlier stays: give the lowest rank first."""
    united: dict[str, Json] = {}
    for part in parts:
        for key, value in part.items():
            if key not in united:
                united[key] = unite([value]) if isinstance(value, Mapping) else value
            elif isinstance(united[key], Mapping) and isinstance(value, Mapping):
                united[key] = unite([united[key], value])
    return united


@dataclass(frozen=True, eq=False, slots=True)
class UnitedGeneration:
    """A generation with all available parts, ordered by their lowest rank.

    ``directories`` [hosts] is each part's directory, None for a part on another machine.
    """

    generation: int
    step: int
    hosts: tuple[HostManifest, ...]
    directories: tuple[Path | None, ...]

    @property
    def about(self) -> Mapping[str, Json]:
        return self.hosts[0].about

    @property
    def stated(self) -> Mapping[str, int]:
        """Committed fingerprints of all tensors by name; none in a converted generation."""
        united = unite_committed(part.committed for part in self.hosts)
        return {} if united is None else united.fingerprints

    @property
    def scalars(self) -> dict[str, Json]:
        """Scalars of all hosts, united; the lowest rank's value stays."""
        return unite(part.scalars for part in self.hosts)

    @property
    def rank_state(self) -> dict[str, Json]:
        """States by coordinate, of all hosts."""
        return {
            key: value for part in reversed(self.hosts) for key, value in part.rank_state.items()
        }


def unite_hosts(
    manifests: Sequence[HostManifest], directories: Sequence[Path | None] | None = None
) -> UnitedGeneration:
    """Unite the parts of one generation.

    Raises:
        StoreError: None is given, they are not parts of one generation at one step, or a host comes
            twice. LayoutError: Two hosts hold tensors of one name that differ in shape or dtype.
    """
    places = list(directories) if directories is not None else [None] * len(manifests)
    if not manifests:
        raise StoreError("no part of a generation is given. Name at least one host's directory.")
    parts = sorted(
        zip(manifests, places, strict=True),
        key=lambda part: (min(part[0].ranks, default=1 << 62), part[0].host),
    )
    first = parts[0][0]
    known = {tensor.name: tensor for tensor in first.collection.tensors}
    seen: set[str] = set()
    for part, _ in parts:
        if (part.generation, part.step) != (first.generation, first.step):
            raise StoreError(
                f"host {part.host!r} has generation {part.generation} at step {part.step}, host "
                f"{first.host!r} generation {first.generation} at step {first.step}. Never mix "
                "generations: take one of them."
            )
        if part.host in seen:
            raise StoreError(
                f"two parts are of host {part.host!r}. Give each host's directory once."
            )
        seen.add(part.host)
        for tensor in part.collection.tensors:
            if known.setdefault(tensor.name, tensor) != tensor:
                other = known[tensor.name]
                raise LayoutError(
                    f"{tensor.name!r} is {tensor.dtype}{list(tensor.shape)} on host {part.host!r} "
                    f"and {other.dtype}{list(other.shape)} on another. They are not parts of one "
                    "state."
                )
    return UnitedGeneration(
        first.generation,
        first.step,
        tuple(part for part, _ in parts),
        tuple(place for _, place in parts),
    )


def load_generation(directories: Sequence[Path], number: int | None = None) -> UnitedGeneration:
    """Read the parts of one generation, one directory a host; ``number``: of this one.

    Raises:
        StoreError: As ``read_saved_manifest`` and ``unite_hosts``; or the parts are two states of
            one number. LayoutError: As ``unite_hosts``.
    """
    parts = [read_saved_manifest(directory, number) for directory in directories]
    generation = unite_hosts(parts, directories)
    snapshots = {str(part.about.get("snapshot")): part.host for part in parts}
    if len(snapshots) > 1:
        found = ", ".join(f"{host}: {name}" for name, host in sorted(snapshots.items()))
        raise StoreError(
            f"the parts of generation {generation.generation} are of several jobs or rounds "
            f"({found}). Never mix generations: take those of one."
        )
    differ = contradiction(generation.hosts)
    if differ is not None:
        raise StoreError(f"{differ} One of them is of another state: take its part away.")
    return generation


def contradiction(parts: Iterable[HostManifest]) -> str | None:
    """Return a line about two parts of one generation with different committed fingerprints; None:
    they agree.
    """
    committed_by: dict[str, tuple[str, int]] = {}
    for part in parts:
        prints = {} if part.committed is None else part.committed.fingerprints
        differ = sorted(
            n for n, value in prints.items() if committed_by.get(n, ("", value))[1] != value
        )
        if differ:
            return (
                f"hosts {committed_by[differ[0]][0]!r} and {part.host!r} hold parts of generation "
                f"{part.generation} that were committed with other fingerprints of {len(differ)} "
                f"tensors ({', '.join(differ[:5])})."
            )
        committed_by.update({name: (part.host, value) for name, value in prints.items()})
    return None


def check_whole(parts: Iterable[HostManifest], *, exact: bool = True) -> None:
    """Raise ``LayoutError`` unless the parts hold every element of every tensor of the job, all
    from one step.

    ``exact`` False: fetched pieces may overlap with written ones.
    """
    parts = list(parts)
    steps = sorted({part.step for part in parts})
    if len(steps) != 1:
        raise LayoutError(f"parts of steps {steps}; a state is made of one step only.")
    rows = concatenate([part.collection for part in parts])
    expected = max(int(part.about.get("tensors", -1)) for part in parts)
    if len(rows.tensors) != expected:
        raise LayoutError(
            f"{len(rows.tensors)} of {expected} tensors are held by "
            f"{sorted(p.host for p in parts)}."
        )
    check_coverage(rows, exact_partition=exact)
