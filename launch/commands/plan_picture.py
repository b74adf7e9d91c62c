"""A change of degrees in one picture: ranks on their hosts before and after, and bytes between
them."""

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from scalai.core.planner.columns import Layout
from scalai.core.planner.devices import GB
from scalai.core.planner.reconfiguration import Hosts, Reconfiguration

INK, PALE, PAPER, MOVED, LOST = "#22303c", "#b9c6d2", "#ffffff", "#d9822b", "#c8443a"
MOST_HOSTS, MOST_FLOWS, MOST_RANKS = 24, 80, 16
"""Hosts on each side, flows, and ranks of a host that are drawn; of what is left it is said how
much it is."""
_CELL, _ROW, _WIDTH, _TOP = 18, 52, 1100, 112
_WIDEST = 16.0
"""How wide all lines of the host are together that gives or takes most."""
_STAGE, _MOST_STAGES = 26, 10


@dataclass(frozen=True, slots=True)
class _Side:
    """The hosts of one layout, from top to bottom."""

    layout: Layout
    hosts: Hosts
    left: int

    @property
    def edge(self) -> int:
        """Right end of the largest host's squares."""
        most = max((count for _, count in self.shown), default=0)
        return self.left + min(most, MOST_RANKS) * _CELL

    @property
    def shown(self) -> Hosts:
        return self.hosts[:MOST_HOSTS]

    def middle(self, name: str) -> float | None:
        """Return the height of a host's flows; None: not drawn."""
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

    Old hosts stand at the left, new ones at the right, with their ranks in the colour of the
    pipeline stage. A line's width is its share of the busiest host's bytes; bytes within a host are
    pale. Lines of a host begin and end side by side.

    Args:
        change: None: no change.
        lost: Old hosts without their memory.
    """
    width = MOST_RANKS * _CELL
    old, new = _Side(before, before_hosts, 20), _Side(after, after_hosts, _WIDTH - width - 20)
    rows = max(len(old.shown), len(new.shown))
    cut = max(len(old.hosts), len(new.hosts)) > MOST_HOSTS
    height = _TOP + rows * _ROW + (22 if cut else 0) + 30
    parts = [svg_text(20, 48, _summary(change))]
    for side, when in ((old, "before"), (new, "after")):
        parts.append(svg_text(side.left, 78, f"{when}: {side.layout.degrees}"))
        parts += _stages(side)
    if change is not None:
        parts += _flows(old, new, change)
    for side, other, gone in ((old, new, lost), (new, old, frozenset[str]())):
        parts += _hosts(side, other, gone, change)
    legend = "A square is a rank, its colour the pipeline stage; bytes of pale lines stay on their "
    parts.append(svg_text(20, height - 12, legend + "host, those of orange ones cross."))
    return svg(_WIDTH, height, title, parts)


def _summary(change: Reconfiguration | None) -> str:
    if change is None:
        return "nothing changes"
    text = f"{sized(change.moves)} cross between hosts, {sized(change.stays)} stay; "
    text += f"{change.total_s:.1f} s: "
    text += ", ".join(f"{name} {value:.3g}" for name, value in change.seconds.items() if value)
    return text + (f"; {sized(change.missing)} held by nobody" if change.missing else "")


@dataclass(frozen=True, slots=True)
class _Flow:
    """Bytes from an old host to a new one."""

    size: int
    giver: str
    taker: str


def _flows(old: _Side, new: _Side, change: Reconfiguration) -> list[str]:
    """Draw the flows from host to host, crossing ones on top."""
    found = []
    rows, columns = change.host_bytes.nonzero()
    for row, column in zip(rows.tolist(), columns.tolist(), strict=True):
        giver, taker = change.hosts[row], change.hosts[column]
        if old.middle(giver) is not None and new.middle(taker) is not None:
            found.append(_Flow(int(change.host_bytes[row, column]), giver, taker))
    drawn = sorted(found, key=lambda flow: (-flow.size, flow.giver, flow.taker))[:MOST_FLOWS]
    totals: dict[tuple[bool, str], int] = {}
    for flow in drawn:
        for side in ((False, flow.giver), (True, flow.taker)):
            totals[side] = totals.get(side, 0) + flow.size
    scale = _WIDEST / max(totals.values(), default=1)
    begins = _side_by_side(drawn, old, new, scale, is_after=False)
    ends = _side_by_side(drawn, old, new, scale, is_after=True)
    drawn.sort(key=lambda flow: (flow.giver != flow.taker, flow.size))
    start, end = old.left + MOST_RANKS * _CELL + 6, new.left - 6
    bend = (end - start) / 2
    parts = []
    for flow in drawn:
        top, bottom = begins[flow], ends[flow]
        is_kept = flow.giver == flow.taker
        says = f"{flow.giver} {'keeps' if is_kept else 'to ' + flow.taker} {sized(flow.size)}"
        parts.append(
            f'<path d="M{old.edge + 4} {top:.2f} H{start} '
            f'C{start + bend} {top:.2f} {end - bend} {bottom:.2f} {end} {bottom:.2f}" '
            f'fill="none" stroke="{PALE if is_kept else MOVED}" '
            f'stroke-width="{max(flow.size * scale, 0.5):.2f}" '
            f'stroke-opacity="0.85"><title>{escape(says)}</title></path>'
        )
    return parts


def _side_by_side(
    flows: Sequence[_Flow], old: _Side, new: _Side, scale: float, *, is_after: bool
) -> dict[_Flow, float]:
    """Return the height of each flow's begin or end, in the order of its other end: lines of a host
    do not cross there."""
    here, there = (new, old) if is_after else (old, new)
    found: dict[_Flow, float] = {}
    for name, _ in here.shown:
        mine = [flow for flow in flows if name == (flow.taker if is_after else flow.giver)]
        mine.sort(key=lambda flow: there.middle(flow.giver if is_after else flow.taker) or 0.0)
        height = (here.middle(name) or 0.0) - sum(flow.size for flow in mine) * scale / 2
        for flow in mine:
            found[flow] = height + flow.size * scale / 2
            height += flow.size * scale
    return found


def _stages(side: _Side) -> list[str]:
    """Draw the legend of stages."""
    parts, stages = [], side.layout.degrees.pp
    if stages == 1:
        return []
    for stage in range(min(stages, _MOST_STAGES)):
        left = side.left + stage * _STAGE
        parts.append(
            f'<rect x="{left}" y="86" width="9" height="9" fill="{_colour(stage, stages)}"/>'
        )
        parts.append(svg_text(left + 11, 95, str(stage), size=10))
    if stages > _MOST_STAGES:
        left = side.left + _MOST_STAGES * _STAGE
        parts.append(svg_text(left, 95, f"... {stages - 1}", size=10))
    return parts


def _hosts(
    side: _Side, other: _Side, gone: frozenset[str], change: Reconfiguration | None
) -> list[str]:
    parts, first = [], 0
    degrees, is_after = side.layout.degrees, side.left > other.left
    others = {name for name, count in other.hosts if count}
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
            if name not in others:
                words += ", new" if is_after else ", leaves"
            words += f", {_crossing(change, name, is_after=is_after)}"
        fill = LOST if name in gone else INK
        parts.append(svg_text(side.left, top + _CELL + 12, words, size=11, fill=fill))
    rest = len(side.hosts) - MOST_HOSTS
    if rest > 0:
        parts.append(
            svg_text(side.left, _TOP + MOST_HOSTS * _ROW + 10, f"{rest} more hosts are not drawn")
        )
    return parts


def _crossing(change: Reconfiguration, name: str, *, is_after: bool) -> str:
    if name not in change.hosts:
        return "takes nothing" if is_after else "sends nothing"
    place = change.hosts.index(name)
    line: Sequence[int] = (
        change.host_bytes[:, place] if is_after else change.host_bytes[place]
    ).tolist()
    size = sum(line) - line[place]
    return f"{'takes' if is_after else 'sends'} {sized(size) if size else 'nothing'}"


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
    """Return ``#rrggbb``, known to every renderer."""
    reach = saturation * min(light, 1 - light)

    def part(turn: float) -> int:
        k = (turn + hue / 30) % 12
        return round(255 * (light - reach * max(-1.0, min(k - 3, 9 - k, 1.0))))

    return f"#{part(0):02x}{part(8):02x}{part(4):02x}"


def svg(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    """Return a picture of these elements below its title."""
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12" fill="{INK}">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="{PAPER}"/>',
        svg_text(20, 26, title, size=18),
    ]
    return "\n".join([*head, *parts, "</svg>", ""])


def svg_text(
    x: float, y: float, words: str, *, size: int = 12, fill: str = INK, anchor: str = "start"
) -> str:
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" fill="{fill}" text-anchor="{anchor}">'
        f"{escape(words)}</text>"
    )


def sized(size_bytes: int) -> str:
    """Return a number of bytes in a suitable unit."""
    for unit, name in ((1e12, "TB"), (GB, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:.3g} {name}"
    return f"{size_bytes} bytes"
