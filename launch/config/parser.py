"""The parser of every command line: a slip is one sentence, as every other wrong use is."""

import argparse
import difflib
import re
from typing import Any, NoReturn

from scalai.core.errors import UsageError

_TYPES = {"int": "a whole number", "float": "a number"}


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises ``UsageError`` in place of its usage, its error and its
    exit. Parsers of subcommands are of this kind too."""

    def error(self, message: str) -> NoReturn:
        """Raise ``UsageError``: argparse's sentence, without its own names of things."""
        text = re.sub(r"^argument ([^\s/:]+)[^:]*:", r"\1:", message)
        text = re.sub(r"invalid (int|float) value: (.*)$", _no_number, text)
        ends = "" if text.endswith((".", "?")) else "."
        raise UsageError(f"{text}{ends}{self._nearest(text)} All flags: {self.prog} --help")

    def parse_known_args(self, *given: Any, **how: Any) -> Any:
        """Parse, and refuse what is left: the parser of a subcommand knows the flags that were
        meant."""
        found, left = super().parse_known_args(*given, **how)
        if left:
            self.error(f"unrecognized arguments: {' '.join(left)}")
        return found, left

    def _nearest(self, text: str) -> str:
        """Return the question whether a known flag or command was meant; empty: none is near."""
        if found := re.search(r"unrecognized arguments: (--[\w-]+)", text):
            known = list(self._option_string_actions)
        elif found := re.search(r"invalid choice: '([^']*)'", text):
            known = [
                str(choice)
                for action in self._actions
                if isinstance(action, argparse._SubParsersAction)
                for choice in action.choices
            ]
        near = difflib.get_close_matches(found[1], known, n=1) if found else []
        return f" Did you mean {near[0]}?" if near else ""


def _no_number(found: re.Match[str]) -> str:
    return f"{found[2]} is not {_TYPES[found[1]]}"
