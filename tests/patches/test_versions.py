import pytest

from scalai.core.errors import RefusedError
from scalai.patches.versions import DEEPSPEED, MEGATRON, KnownVersions

KNOWN = [
    *((MEGATRON, v) for v in ("0.14.0", "0.15.3", "0.16.1", "0.17.0rc0", "0.18.2", "0.20.0rc0")),
    *((DEEPSPEED, v) for v in ("0.16.0", "0.17.6", "0.18.9", "0.19.8", "0.19.8+abc")),
]
UNKNOWN = [
    *((MEGATRON, v, r"0\.14 to 0\.20") for v in ("0.13.1", "0.21.0", "1.14.0", "main")),
    *((DEEPSPEED, v, r"0\.16 to 0\.19") for v in ("0.15.4", "0.20.0", "1.16.0")),
]


@pytest.mark.parametrize(("framework", "version"), KNOWN)
def test_known_versions_pass_without_a_word(framework: KnownVersions, version: str) -> None:
    assert framework.check(version, allow_untested=False) is None


@pytest.mark.parametrize(("framework", "version", "known"), UNKNOWN)
def test_unknown_versions_are_refused_unless_allowed(
    framework: KnownVersions, version: str, known: str
) -> None:
    with pytest.raises(RefusedError, match=rf"{known}.*SCALAI_ALLOW_UNTESTED=1"):
        framework.check(version, allow_untested=False)
    assert version in (framework.check(version, allow_untested=True) or "")
