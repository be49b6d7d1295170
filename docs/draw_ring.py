"""Draws ``ring.svg``: a sequence on four ranks, and which rows of K and V hop with segments, dilation and a window.

``python docs/draw_ring.py`` writes the picture. The build of the documentation fails if the picture is out of date. The
picture follows the reader's light or dark mode.
"""

from __future__ import annotations

from pathlib import Path

from draw_patterns import shown

from ring_backends import DilatedPattern, RingSchedule, SequenceLayout

PICTURE = Path(__file__).resolve().parent / "ring.svg"
SEQ_LEN, RANKS, CELL, RANK_GAP, MARGIN, TOP, LANE = 32, 4, 18, 28, 22, 40, 24
SHARD = SEQ_LEN // RANKS
RANK_WIDTH = SHARD * CELL
BRANCHES = {
    "segments of 4, rate 1: no row hops": DilatedPattern([4], [1]),
    "one segment, rate 4: the selected rows hop (here those of head 0)": DilatedPattern([SEQ_LEN], [4]),
    "window of 4: the last 3 rows of a rank hop": DilatedPattern([None], [1], window_lengths=[4]),
}
STYLE = """
.paper{fill:#fff}.ink{fill:#1f2328}.line{fill:none;stroke:#8c959f}.skipped{fill:#e4e8ec}.stays{fill:#8fbce6}
.hops{fill:#f08a24}.arrow{fill:none;stroke:#c65d00;stroke-width:1.5}.head{fill:#c65d00}
@media (prefers-color-scheme:dark){.paper{fill:#0d1117}.ink{fill:#e6edf3}.line{stroke:#6e7681}.skipped{fill:#272d35}
.stays{fill:#31679c}.hops{fill:#f08a24}.arrow{stroke:#ffa657}.head{fill:#ffa657}}
"""


def hopping_rows(pattern: DilatedPattern) -> dict[tuple[int, int], list[int]]:
    """For each rank and each other rank: the rows of the first that causal queries of the second see."""
    seen = shown(pattern, SEQ_LEN).tril()
    blocks = seen.view(RANKS, SHARD, RANKS, SHARD).any(dim=1)  # [rank of the queries, rank of the keys, key]
    pairs = [(source, to) for source in range(RANKS) for to in range(RANKS) if source != to]
    rows = {(source, to): blocks[to, source].nonzero().flatten().tolist() for source, to in pairs}
    rows = {pair: [pair[0] * SHARD + row for row in found] for pair, found in rows.items() if found}
    schedule = RingSchedule(pattern, SequenceLayout(SEQ_LEN, RANKS), num_heads=1, is_causal=True)
    sent = sum(schedule.wire_bytes(rank, batch=1, head_dim=1, itemsize=1) for rank in range(RANKS))
    assert sent == 2 * sum(map(len, rows.values())), "the picture shows other rows than those that K and V send"
    return rows


def x_of(row: int) -> int:
    return MARGIN + row * CELL + row // SHARD * RANK_GAP


def arrow(source: int, to: int, y: int) -> str:
    """An arrow below a lane, from one rank to another."""
    begin = x_of(source * SHARD) + RANK_WIDTH // 2 + 30 + 8 * (to - source)
    end = x_of(to * SHARD) + RANK_WIDTH // 2 - 30 - 8 * (to - source)
    depth = y + 20 + 16 * (to - source)
    return f'<path class="arrow" d="M{begin} {y}C{begin} {depth} {end} {depth} {end} {y + 2}" marker-end="url(#head)"/>'


def lane(title: str, pattern: DilatedPattern, y: int) -> tuple[list[str], int]:
    """Draw the sequence for one branch. Returns the elements, and the y below them."""
    rows = hopping_rows(pattern)
    hopping = {row for found in rows.values() for row in found}
    selected = shown(pattern, SEQ_LEN).any(dim=0).tolist()
    parts = [f'<text class="ink" x="{MARGIN - 7}" y="{y + 12}" font-size="13">{title}</text>']
    for first in range(0, SEQ_LEN, SHARD):
        box = f'x="{x_of(first) - 7}" y="{y + LANE - 5}" width="{RANK_WIDTH + 12}" height="{CELL + 10}"'
        parts.append(f'<rect class="line" {box} rx="5"/>')
    for row in range(SEQ_LEN):
        kind = "hops" if row in hopping else "stays" if selected[row] else "skipped"
        cell = f'x="{x_of(row)}" y="{y + LANE}" width="{CELL - 2}" height="{CELL}"'
        parts.append(f'<rect class="{kind}" {cell} rx="2"/>')
    bottom = y + LANE + CELL + 7
    segment = pattern.segment_lengths[0] or SEQ_LEN
    if segment <= SHARD:
        for first in range(0, SEQ_LEN, segment):
            end = x_of(first + segment - 1) + CELL - 2
            parts.append(f'<path class="line" d="M{x_of(first)} {bottom + 2}v4H{end}v-4"/>')
    parts += [arrow(source, to, bottom) for source, to in rows]
    return parts, bottom + 34 + max((12 * (to - source) for source, to in rows), default=-12)


def draw() -> str:
    """Return the picture as SVG."""
    body, y = [], TOP
    for rank in range(RANKS):
        first = rank * SHARD
        text = f"rank {rank}: rows {first} to {first + SHARD - 1}"
        body.append(
            f'<text class="ink" x="{x_of(first) + RANK_WIDTH // 2}" y="24" font-size="13" text-anchor="middle" '
            f'font-weight="bold">{text}</text>'
        )
    for title, pattern in BRANCHES.items():
        parts, y = lane(title, pattern, y)
        body += parts
    legend = (("hops", "row of K and V that hops"), ("stays", "row that stays"), ("skipped", "row that the head skips"))
    for number, (kind, text) in enumerate(legend):
        x = MARGIN - 7 + 220 * number
        body += [
            f'<rect class="{kind}" x="{x}" y="{y}" width="14" height="14" rx="2"/>',
            f'<text class="ink" x="{x + 20}" y="{y + 12}" font-size="12">{text}</text>',
        ]
    width, height = x_of(SEQ_LEN - 1) + CELL + MARGIN, y + 28
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
        "<title>A sequence of 32 rows on four ranks, and the rows of K and V that hop in a causal call</title>",
        f"<style>{STYLE}</style>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" orient="auto">'
        '<path class="head" d="M0 0L8 4L0 8z"/></marker></defs>',
        f'<rect class="paper" width="{width}" height="{height}" rx="8"/>',
    ]
    return "\n".join([*head, *body, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
