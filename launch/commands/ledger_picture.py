"""What a job has consumed in one picture: each pass over its data as a bar, the rounds below."""

from xml.sax.saxutils import escape

from scalai.core.dataset.drawn import Pass
from scalai.core.dataset.ledger import Ledger, Lost
from scalai.core.dataset.verdict import Verdict, name_of
from scalai.launch.commands.plan_picture import INK, LOST, MOVED, PALE, PAPER

TAKEN = "#0b6e8f"
MOST_PASSES, MOST_ROUNDS = 24, 200
"""Passes, the newest ones, and rounds that are drawn; of the rest it is said how many they are."""
_WIDTH, _LEFT, _RIGHT, _TOP, _ROW, _BAR = 1100, 220, 30, 84, 34, 18


def picture(title: str, ledger: Ledger, verdict: Verdict) -> str:
    """Return an SVG.

    A bar is a pass: what was consumed is blue, what came before the ledger is grey, what was
    skipped is white with a red edge, what was seen twice is red. Below, each round has its steps;
    those that were lost and done again lie in orange on a line of their own.
    """
    shown = ledger.passes[-MOST_PASSES:]
    rounds = _TOP + len(shown) * _ROW + 40
    height = rounds + 3 * _ROW + 30
    kept = "No sample was skipped, and none was seen twice"
    says = f"{kept}." if verdict.is_kept else "; ".join(verdict.breaks)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="12" fill="{INK}">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{_WIDTH}" height="{height}" fill="{PAPER}"/>',
        _text(20, 26, title, size=18),
        _text(20, 48, says, fill=INK if verdict.is_kept else LOST),
    ]
    if len(ledger.passes) > len(shown):
        parts.append(_text(20, 68, f"{len(ledger.passes) - len(shown)} more bars are not drawn"))
    for place, each in enumerate(shown):
        parts += _pass(each, _TOP + place * _ROW)
    parts += _rounds(ledger, rounds)
    return "\n".join([*parts, "</svg>", ""])


def _pass(entry: Pass, top: int) -> list[str]:
    """Draw one bar, as long as the pass; where that is not known, as what was consumed of it."""
    length = max(entry.length or 0, entry.taken.end, entry.unproven, 1)
    parts = [
        _text(20, top + 13, name_of(entry)),
        _box(0, length, length, top, PAPER, "not consumed", edge=PALE),
        _box(0, entry.unproven, length, top, PALE, "before the ledger began"),
    ]
    for pairs, colour, says in (
        (entry.taken.pairs, TAKEN, "consumed"), (entry.twice.pairs, LOST, "seen twice"),
    ):  # fmt: skip
        parts += [_box(start, stop, length, top, colour, says) for start, stop in pairs]
    for start, stop in entry.skipped.pairs:
        parts.append(_box(start, stop, length, top, PAPER, "skipped", edge=LOST))
    parts.append(_text(_LEFT, top + _BAR + 12, "0", size=10))
    parts.append(_text(_WIDTH - _RIGHT, top + _BAR + 12, str(length), size=10, anchor="end"))
    return parts


def _rounds(ledger: Ledger, top: int) -> list[str]:
    """Draw the rounds by their steps, and those that were done in vain."""
    last = max([ledger.at[0], *(lost.until for lost in ledger.lost), 1])
    parts = [_text(20, top + 13, "steps of each round"), _text(20, top + _ROW + 13, "lost")]
    parts.append(_box(0, ledger.since[0], last, top, PALE, "before the ledger began"))
    shown = list(ledger.rounds())[-MOST_ROUNDS:]
    for place, (stretch, until, _) in enumerate(shown):
        degrees = " ".join(f"{axis}{size}" for axis, size in stretch.degrees.items())
        says = f"{stretch.round}: {degrees}"
        colour = TAKEN if place % 2 == 0 else "#6fb1c7"
        parts.append(_box(stretch.step, until, last, top, colour, says, edge=PAPER))
    parts += [_lost(lost, last, top + _ROW) for lost in ledger.lost[-MOST_ROUNDS:]]
    parts.append(_text(_LEFT, top + _BAR + 12, "0", size=10))
    parts.append(_text(_WIDTH - _RIGHT, top + _BAR + 12, f"step {last}", size=10, anchor="end"))
    legend = (
        "Blue was consumed, grey came before the ledger, red was seen twice or skipped; orange "
    )
    parts.append(_text(20, top + 2 * _ROW + 24, legend + "steps were lost and are done again."))
    return parts


def _lost(lost: Lost, last: int, top: int) -> str:
    return _box(lost.after, lost.until, last, top, MOVED, f"lost by round {lost.round}")


def _box(
    start: int, stop: int, length: int, top: int, colour: str, says: str, *, edge: str = "none"
) -> str:
    """Draw the places from ``start`` to ``stop``; at least a hair of them is seen."""
    if stop <= start:
        return ""
    scale = (_WIDTH - _LEFT - _RIGHT) / length
    width = max((stop - start) * scale, 0.75)
    return (
        f'<rect x="{_LEFT + start * scale:.2f}" y="{top}" width="{width:.2f}" height="{_BAR}" '
        f'fill="{colour}" stroke="{edge}"><title>{escape(f"{says}: {start} to {stop}")}</title>'
        "</rect>"
    )


def _text(
    x: float, y: float, words: str, *, size: int = 12, fill: str = INK, anchor: str = "start"
) -> str:
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" fill="{fill}" text-anchor="{anchor}">'
        f"{escape(words)}</text>"
    )
