"""Draws ``ulysses.svg``: which rows and heads the ranks of two groups hold between calls, and within a call.

``python docs/draw_ulysses.py`` writes the picture. The build of the documentation fails if the picture is out of date.
The picture follows the reader's light or dark mode.
"""

from __future__ import annotations

from pathlib import Path

from ring_backends import SequenceLayout
from ring_backends.schedule.exchange import HeadExchange

PICTURE = Path(__file__).resolve().parent / "ulysses.svg"
SEQ_LEN, RANKS, GROUP_SIZE, HEADS, SHOWN = 16, 8, 4, 8, 1
CELL, GAP, TOP, LEFT, BETWEEN = 18, 44, 62, 54, 128
PLANS = [HeadExchange(SequenceLayout(SEQ_LEN, RANKS), GROUP_SIZE, rank, HEADS, HEADS) for rank in range(RANKS)]
PANEL_WIDTH = SEQ_LEN * CELL + GAP
BOTTOM = TOP + HEADS * CELL
STYLE = """
.paper{fill:#fff}.ink{fill:#1f2328}.line{fill:none;stroke:#57606a}.other{fill:#e4e8ec}.own{fill:#f08a24}
.received{fill:#f8c899}.hops{fill:#8fbce6}.arrow{fill:none;stroke:#57606a;stroke-width:1.5}.head{fill:#57606a}
@media (prefers-color-scheme:dark){.paper{fill:#0d1117}.ink{fill:#e6edf3}.line{stroke:#8c959f}.other{fill:#272d35}
.own{fill:#c96a12}.received{fill:#7a4a1c}.hops{fill:#31679c}.arrow{stroke:#8c959f}.head{fill:#8c959f}}
"""
LEGEND = {
    "own": f"held by rank {SHOWN}",
    "received": f"sent to rank {SHOWN} in the exchange",
    "hops": f"keys and values that hop to rank {SHOWN}",
}


def holder(row: int, head: int, *, in_call: bool) -> int:
    """The rank that holds a row of a head."""
    (owner,) = (rank for rank, plan in enumerate(PLANS) if row in plan.layout.positions(rank).tolist())
    if not in_call:
        return owner
    plan = PLANS[owner]
    (member,) = (member for member in range(GROUP_SIZE) if head in plan.heads_of("queries", member))
    return plan.members[member]


def kind(row: int, head: int, *, in_call: bool) -> str:
    """The class of a cell."""
    now, within = holder(row, head, in_call=in_call), holder(row, head, in_call=True)
    if now == SHOWN:
        return "own"
    if in_call:
        return "hops" if now in PLANS[SHOWN].hop_ranks else "other"
    return "received" if within == SHOWN else "other"


def x_of(row: int, left: int) -> int:
    """The left edge of a row's column. A gap separates the groups."""
    return left + row * CELL + row * RANKS // SEQ_LEN // GROUP_SIZE * GAP


def panel(title: str, left: int, *, in_call: bool) -> list[str]:
    """Draw which rank holds which rows and heads."""
    middle = left + PANEL_WIDTH // 2
    parts = [
        f'<text class="ink" x="{middle}" y="22" font-size="13" text-anchor="middle" font-weight="bold">{title}</text>'
    ]
    of_ranks: dict[int, list[tuple[int, int]]] = {}
    for head in range(HEADS):
        for row in range(SEQ_LEN):
            x, y = x_of(row, left), TOP + head * CELL
            name = kind(row, head, in_call=in_call)
            parts.append(f'<rect class="{name}" x="{x}" y="{y}" width="{CELL - 1}" height="{CELL - 1}"/>')
            of_ranks.setdefault(holder(row, head, in_call=in_call), []).append((x, y))
    for rank, cells in sorted(of_ranks.items()):
        (x, y), (end, bottom) = min(cells), max(cells)
        width, height = end + CELL - 1 - x, bottom + CELL - 1 - y
        parts += [
            f'<rect class="line" x="{x}" y="{y}" width="{width}" height="{height}"/>',
            f'<text class="ink" x="{x + width // 2}" y="{y + height // 2 + 4}" font-size="12" text-anchor="middle">'
            f"{f'rank {rank}' if in_call else rank}</text>",
        ]
    for group in range(RANKS // GROUP_SIZE):
        x = x_of(group * SEQ_LEN * GROUP_SIZE // RANKS, left) + SEQ_LEN * GROUP_SIZE // RANKS * CELL // 2
        parts.append(
            f'<text class="ink" x="{x}" y="{TOP - 10}" font-size="12" text-anchor="middle">host {group}</text>'
        )
    return parts


def draw() -> str:
    """Return the picture as SVG."""
    right = LEFT + PANEL_WIDTH + BETWEEN
    body = panel("between calls: all heads of a rank's rows", LEFT, in_call=False)
    body += panel("within a call: some heads of all rows of the host", right, in_call=True)
    for head in range(0, HEADS, 2):
        y = TOP + head * CELL + 7
        body.append(f'<text class="ink" x="{LEFT - 8}" y="{y + 5}" font-size="11" text-anchor="end">head {head}</text>')
    begin = LEFT + PANEL_WIDTH + 14
    end, middle = right - 14, (TOP + BOTTOM) // 2
    for y, text, ends in ((middle - 14, "exchange", (begin, end)), (middle + 24, "exchange back", (end, begin))):
        body += [
            f'<path class="arrow" d="M{ends[0]} {y}H{ends[1]}" marker-end="url(#head)"/>',
            f'<text class="ink" x="{(begin + end) // 2}" y="{y - 7}" font-size="12" text-anchor="middle">{text}</text>',
        ]
    gap = x_of(SEQ_LEN // 2 - 1, right) + CELL + 2
    share = HEADS // GROUP_SIZE
    for member in range(GROUP_SIZE):
        y = TOP + (member * share * CELL) + share * CELL // 2
        body.append(f'<path class="arrow" d="M{gap} {y}h{GAP - 6}" marker-start="url(#head)" marker-end="url(#head)"/>')
    body.append(
        f'<text class="ink" x="{gap + GAP // 2 - 3}" y="{BOTTOM + 16}" font-size="12" text-anchor="middle">hops</text>'
    )
    x = LEFT
    for name, text in LEGEND.items():
        body += [
            f'<rect class="{name}" x="{x}" y="{BOTTOM + 34}" width="14" height="14"/>',
            f'<text class="ink" x="{x + 20}" y="{BOTTOM + 46}" font-size="12">{text}</text>',
        ]
        x += 60 + 7 * len(text)
    width, height = right + PANEL_WIDTH + 20, BOTTOM + 62
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
        "<title>16 rows of 8 heads on eight ranks of two hosts, between calls and within a call</title>",
        f"<style>{STYLE}</style>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" '
        'orient="auto-start-reverse"><path class="head" d="M0 0L8 4L0 8z"/></marker></defs>',
        f'<rect class="paper" width="{width}" height="{height}" rx="8"/>',
    ]
    return "\n".join([*head, *body, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
