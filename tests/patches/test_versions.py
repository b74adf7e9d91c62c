import pytest

from scalai.core.errors import RefusedError
from scalai.patches.megatron.versions import check_version


@pytest.mark.parametrize("version", ["0.14.0", "0.15.3", "0.16.1", "0.17.0rc0", "0.18.2", "0.19.1"])
def test_known_versions_pass_without_a_word(version: str) -> None:
    assert check_version(version, allow_unknown=False) is None


@pytest.mark.parametrize("version", ["0.13.1", "0.20.0", "1.14.0", "main"])
def test_unknown_versions_are_refused_unless_allowed(version: str) -> None:
    with pytest.raises(RefusedError, match=r"0\.14 to 0\.19.*SCALAI_ALLOW_UNKNOWN_VERSION=1"):
        check_version(version, allow_unknown=False)
    assert version in (check_version(version, allow_unknown=True) or "")
