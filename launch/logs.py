"""One log line a change of state, on standard error: ``2026-01-31 12:00:00,123 INFO [scalai <who>]
generation=12 event=move took_s=0.2``."""

import logging
import sys


def configure(who: str) -> None:
    """Send this process's log lines of Scalai to standard error, marked with who says them."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s [scalai {who}] %(message)s"))
    logger = logging.getLogger("scalai")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    logger.propagate = False
