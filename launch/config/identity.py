"""As who a process connects over TCP: what ``--tls`` says, or the environment."""

import logging
import os

from scalai.runtime.tls import Tls, TlsFiles, of_this_process, secure

TLS_VARIABLE = "SCALAI_TLS"
"""Environment variable: ``CERT,KEY,CA``, where no ``--tls`` is given."""

log = logging.getLogger(__name__)


def tls_files(flag: str | None) -> str | None:
    """Return the files that a flag names, else the environment, by their full paths; None: the job
    goes without TLS. Raises ``UsageError`` where it is not ``CERT,KEY,CA``."""
    text = flag or os.environ.get(TLS_VARIABLE)
    return str(TlsFiles.parse(text)) if text else None


def secure_process(files: str | None) -> None:
    """Connect and listen by TCP under TLS from now on, where files are named.

    Raises:
        UsageError: They cannot be used.
    """
    secure(None if files is None else Tls(TlsFiles.parse(files)))
    if files is not None:
        log.info(
            "event=tls files=%s: control and data plane; gloo, NCCL and torch's store have none "
            "of it", files,
        )  # fmt: skip


def files_of_this_process() -> str | None:
    """Return what this process is secured by; None: nothing."""
    own = of_this_process()
    return None if own is None else str(own.files)
