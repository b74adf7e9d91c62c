"""Which versions of a framework are known to work."""

from dataclasses import dataclass

from scalai.converters.megatron.rules import ALLOW_UNTESTED
from scalai.core.errors import RefusedError
from scalai.core.release import numbers_of


@dataclass(frozen=True, slots=True)
class KnownVersions:
    """The versions of a framework that were tried: all minor ones from ``oldest`` to ``newest``."""

    framework: str
    oldest: tuple[int, int]
    newest: tuple[int, int]

    def check(self, version: str, *, allow_untested: bool) -> str | None:
        """Accept a version, or say why not.

        Args:
            version: As the framework's ``__version__``, such as ``0.16.1`` or ``0.19.0rc0``.
            allow_untested: Go on with a version that was never tried.

        Returns:
            A warning for the log, or None where the version is known.

        Raises:
            RefusedError: The version is unknown, and unknown ones are not allowed.
        """
        if self.oldest <= numbers_of(version)[:2] <= self.newest:
            return None
        known = f"{_dotted(self.oldest)} to {_dotted(self.newest)}"
        if allow_untested:
            return f"{self.framework} {version} was never tried, {known} were; going on as allowed"
        raise RefusedError(
            f"{self.framework} {version} was never tried; {known} were. Install one of them, or "
            f"set {ALLOW_UNTESTED}=1 to go on anyway: fingerprints still prove every move "
            "of the state, but other faults may stay unseen."
        )


# The names that the hooks and the adapters rely on are the same in all of them.
MEGATRON = KnownVersions("megatron-core", (0, 14), (0, 20))
DEEPSPEED = KnownVersions("deepspeed", (0, 16), (0, 19))


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
