"""A change of degrees in one picture: ranks on their hosts before and after, and who sends what."""

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from scalai.core.planner.columns import Layout
from scalai.core.planner.reconfiguration import Hosts, Reconfiguration

INK, PALE, PAPER, MOVED, LOST = "#22303c", "#b9c6d2", "#ffffff", "#d9822b", "#c8443a"
MOST_HOSTS, MOST_FLOWS, MOST_RANKS = 24, 80, 16
"""Hosts on each side, flows, and ranks of a host that are drawn; of what is left it is said how
much it is."""
_CELL, _ROW, _WIDTH, _TOP = 18, 52, 1100, 96
_WIDEST = 16.0


@dataclass(frozen=True, slots=True)
class _Side:
    """The hosts of one layout: where each stands, from top to bottom."""

    layout: Layout
    hosts: Hosts
    left: int

    @property
    def shown(self) -> Hosts:
        return self.hosts[:MOST_HOSTS]

    def middle(self, name: str) -> float | None:
        """Return the height at which a host's flows begin or end; None: it is not drawn."""
        for place, (host, _) in enumerate(self.shown):
            if host == name:
                return _TOP + place * _ROW + _CELL / 2
        return None


def picture(
    title: str,
    before: Layout,
    before_hosts: Hosts,
    after: Layout,
    after_hosts: Hosts,
    change: Reconfiguration | None,
    lost: frozenset[str] = frozenset(),
) -> str:
    """Return an SVG.

    Hosts of before stand at the left, those of after at the right, each with its ranks, in the
    colour of their pipeline stage. A line is as wide as its share of what crosses; what stays on
    its host is pale.

    Args:
        change: None: nothing changes.
        lost: Hosts of before whose memory is gone.
    """
    width = MOST_RANKS * _CELL
    old, new = _Side(before, before_hosts, 20), _Side(after, after_hosts, _WIDTH - width - 20)
    rows = max(len(old.shown), len(new.shown))
    cut = max(len(old.hosts), len(new.hosts)) > MOST_HOSTS
    height = _TOP + rows * _ROW + (22 if cut else 0) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="12" fill="{INK}">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{_WIDTH}" height="{height}" fill="{PAPER}"/>',
        _text(20, 26, title, size=18),
        _text(20, 48, _summary(change)),
        _text(20, 78, f"before: {before.degrees}"),
        _text(new.left, 78, f"after: {after.degrees}"),
    ]
    if change is not None:
        parts += _flows(old, new, change)
    for side, gone in ((old, lost), (new, frozenset[str]())):
        parts += _hosts(side, gone, change, is_after=side is new)
    legend = "A square is a rank, its colour the pipeline stage; pale lines stay on their host, "
    parts.append(_text(20, height - 12, legend + "orange ones cross."))
    return "\n".join([*parts, "</svg>", ""])


def _summary(change: Reconfiguration | None) -> str:
    if change is None:
        return "nothing changes"
    text = f"{_gb(change.moves)} cross between hosts, {_gb(change.stays)} stay; "
    text += f"{change.total_s:.1f} s: "
    text += ", ".join(f"{name} {value:.3g}" for name, value in change.seconds.items() if value)
    return text + (f"; {_gb(change.missing)} held by nobody" if change.missing else "")


def _flows(old: _Side, new: _Side, change: Reconfiguration) -> list[str]:
    """Draw what goes from host to host, the largest last, so that it lies on top."""
    found: list[tuple[int, str, str]] = []
    rows, columns = change.host_bytes.nonzero()
    for row, column in zip(rows.tolist(), columns.tolist(), strict=True):
        giver, taker = change.hosts[row], change.hosts[column]
        if old.middle(giver) is not None and new.middle(taker) is not None:
            found.append((int(change.host_bytes[row, column]), giver, taker))
    found.sort(key=lambda flow: (-flow[0], flow[1:]))
    drawn = found[:MOST_FLOWS]
    most = drawn[0][0] if drawn else 1
    start, end = old.left + MOST_RANKS * _CELL + 6, new.left - 8
    bend = (end - start) / 2
    parts = []
    for size, giver, taker in reversed(drawn):
        top, bottom = old.middle(giver), new.middle(taker)
        is_kept = giver == taker
        stroke = max(_WIDEST * size / most, 0.5)
        says = f"{giver} {'keeps' if is_kept else 'to ' + taker} {_gb(size)}"
        parts.append(
            f'<path d="M{start} {top} C{start + bend} {top} {end - bend} {bottom} {end} {bottom}" '
            f'fill="none" stroke="{PALE if is_kept else MOVED}" stroke-width="{stroke:.2f}" '
            f'stroke-opacity="{0.9 if is_kept else 0.55}"><title>{escape(says)}</title></path>'
        )
    return parts


def _hosts(
    side: _Side, gone: frozenset[str], change: Reconfiguration | None, *, is_after: bool
) -> list[str]:
    parts, first = [], 0
    degrees = side.layout.degrees
    for place, (name, count) in enumerate(side.shown):
        top = _TOP + place * _ROW
        for number in range(min(count, MOST_RANKS)):
            where = degrees.coordinate(first + number)
            parts.append(
                f'<rect x="{side.left + number * _CELL}" y="{top}" width="{_CELL - 2}" '
                f'height="{_CELL - 2}" fill="{_colour(where.pp_rank, degrees.pp)}">'
                f"<title>{escape(_rank(first + number, where))}</title></rect>"
            )
        first += count
        words = f"{name}, {_ranks(first - count, count)}"
        if name in gone:
            words += ", lost"
        elif change is not None:
            words += f", {_crossing(change, name, is_after=is_after)}"
        parts.append(
            _text(side.left, top + _CELL + 12, words, size=11, fill=LOST if name in gone else INK)
        )
    rest = len(side.hosts) - MOST_HOSTS
    if rest > 0:
        parts.append(
            _text(side.left, _TOP + MOST_HOSTS * _ROW + 10, f"{rest} more hosts are not drawn")
        )
    return parts


def _crossing(change: Reconfiguration, name: str, *, is_after: bool) -> str:
    if name not in change.hosts:
        return "sends nothing"
    place = change.hosts.index(name)
    line: Sequence[int] = (
        change.host_bytes[:, place] if is_after else change.host_bytes[place]
    ).tolist()
    size = sum(line) - line[place]
    return f"{'takes' if is_after else 'sends'} {_gb(size)}"


def _rank(rank: int, where: tuple[int, ...]) -> str:
    tp_rank, pp_rank, dp_rank, cp_rank, _ = where
    return f"rank {rank}: TP {tp_rank}, PP {pp_rank}, DP {dp_rank}, CP {cp_rank}"


def _ranks(first: int, count: int) -> str:
    if not count:
        return "no rank"
    return f"rank {first}" if count == 1 else f"ranks {first} to {first + count - 1}"


def _colour(stage: int, stages: int) -> str:
    """Return a colour of the stage: neighbours differ, and all are about as dark."""
    hue = 190 + 140 * stage / max(stages - 1, 1)
    light = 42 if stage % 2 == 0 else 62
    return _rgb(hue % 360, 0.45, light / 100)


def _rgb(hue: float, saturation: float, light: float) -> str:
    """Return ``#rrggbb``, which every renderer knows."""
    reach = saturation * min(light, 1 - light)

    def part(turn: float) -> int:
        k = (turn + hue / 30) % 12
        return round(255 * (light - reach * max(-1.0, min(k - 3, 9 - k, 1.0))))

    return f"#{part(0):02x}{part(8):02x}{part(4):02x}"


def _text(x: float, y: float, words: str, *, size: int = 12, fill: str = INK) -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="{fill}">{escape(words)}</text>'


def _gb(size_bytes: int) -> str:
    if size_bytes >= 1e12:
        return f"{size_bytes / 1e12:.3g} TB"
    return f"{size_bytes / 1e9:.3g} GB"
