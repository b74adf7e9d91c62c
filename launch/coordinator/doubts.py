"""What is damaged of the generations, and which of them a proof has failed of."""

from collections.abc import Iterable, Mapping


class Doubts:
    """Damage by generation and host. Not shared between threads."""

    def __init__(self) -> None:
        self._damaged: dict[int, dict[str, str]] = {}
        self._found: dict[int, set[str]] = {}
        """Hosts that have found damage when they read their part again."""
        self._failed: dict[int, dict[str, str]] = {}
        """Of which a proof has failed, and none has passed since: where the part lies of each host
        that has read its part again and has found nothing."""

    def note_damaged(self, host: str, number: int, reason: str) -> None:
        """A host, or a durable directory that it sees, has a generation that cannot be read."""
        self._damaged.setdefault(number, {})[host] = reason

    def note_examined(self, number: int, host: str, directory: str, damage: Iterable[str]) -> None:
        """A host has compared its part of a generation with its manifest."""
        lines = tuple(damage)
        if lines:
            self._found.setdefault(number, set()).add(host)
            self.note_damaged(host, number, "; ".join(lines))
            self._failed.pop(number, None)  # that was it, perhaps
        elif number in self._failed:
            self._failed[number][host] = directory

    def found(self) -> tuple[tuple[int, str], ...]:
        """Return the generations in which hosts have found damage when they read their part again,
        with these hosts, in order."""
        return tuple(sorted((n, host) for n, hosts in self._found.items() for host in hosts))

    def numbers(self) -> set[int]:
        """Return the generations of which anything is damaged."""
        return set(self._damaged)

    def damaged(self, number: int) -> Mapping[str, str]:
        """Return what is damaged of a generation, by host."""
        return self._damaged.get(number, {})

    def has_found(self, number: int) -> bool:
        """Whether a host has found damage in a generation when it read its part again."""
        return number in self._found

    def failed(self, number: int) -> bool:
        """A proof of this generation has failed. Returns whether one had before, and nobody has
        found damage since."""
        is_second = number in self._failed
        self._failed.setdefault(number, {})
        return is_second

    def passed(self, number: int) -> None:
        """A proof of this generation has passed, or another state has its number."""
        self._failed.pop(number, None)

    def give_up(self, numbers: Iterable[int]) -> None:
        """These are of no use any more."""
        for number in numbers:
            self._damaged.pop(number, None)
            self._found.pop(number, None)

    def keep(self, number: int) -> None:
        """Forget what is not newer than this generation."""
        self.give_up([n for n in self._damaged if n <= number])

    def verdict(self, number: int, step: int, reason: str, holders: Iterable[str]) -> str:
        """Say what is wrong with a generation whose proof has failed twice, where it lies, and what
        a person may do."""
        places = ", ".join(f"{h!r} ({at})" for h, at in sorted(self._failed[number].items()))
        return (
            f"generation {number} of step {step} cannot be gone on from, twice: {reason} parts lie "
            f"at {places or sorted(holders)}. {WAYS_OUT}"
        )


WAYS_OUT = (
    "The state is kept. Move the damaged directory away (of memory: run scalai clean on that host) "
    "and start the job again to go on from what is left, or begin anew with --fresh"
)
