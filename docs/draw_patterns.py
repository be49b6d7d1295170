"""Draws ``patterns.svg``: the keys that queries see with segments, a dilated segment, a window and strides.

``python docs/draw_patterns.py`` writes the picture. The build of the documentation fails if the picture is out of date.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from ring_backends import DilatedPattern

PICTURE = Path(__file__).resolve().parent / "patterns.svg"
SEQ_LEN, CELL, GAP, MARGIN, TOP, BOTTOM = 16, 11, 18, 14, 46, 30
EARLIER, LATER, LINE = "#1f6fb2", "#b5d5ee", "#888"
PANELS = {
    "segments": ("[4], [1]", DilatedPattern([4], [1])),
    "dilated segment, head 0": ("[16], [4]", DilatedPattern([16], [4])),
    "window": ("[None], [1], window_lengths=[4]", DilatedPattern([None], [1], window_lengths=[4])),
    "strides": ('[None], [4], offset="every"', DilatedPattern([None], [4], offset="every")),
}


def shown(pattern: DilatedPattern, seq_len: int) -> Tensor:
    """Whether each query of head 0 sees each key in a call that is not causal: bool [queries, keys]."""
    positions = torch.arange(seq_len)
    segments = pattern.segment(0, positions, seq_len)
    together = torch.zeros(seq_len, seq_len, dtype=torch.bool)
    for offset in pattern.head_offsets(0, 0, num_heads=1, seq_len=seq_len):
        is_covered = pattern.covers(0, offset, positions, seq_len)
        together |= is_covered[:, None] & is_covered
    is_near = (positions[:, None] - positions).abs() <= pattern.reach(0, seq_len)
    return together & (segments[:, None] == segments) & is_near


def cells(mask: Tensor) -> str:
    """Draw the true cells of a mask as the path of an SVG picture, one rectangle for neighbours in a row."""
    path = []
    for number, row in enumerate(mask.tolist()):
        for is_shown, run in groupby(range(SEQ_LEN), row.__getitem__):
            first, *rest = run
            if is_shown:
                width = CELL * (1 + len(rest))
                path.append(f"M{first * CELL} {number * CELL}h{width}v{CELL}h-{width}z")
    return "".join(path)


def draw() -> str:
    """Return the picture as SVG."""
    side = SEQ_LEN * CELL
    width, height = 2 * MARGIN + len(PANELS) * (side + GAP) - GAP, TOP + side + BOTTOM
    lines = "".join(f"M0 {x}H{side}M{x} 0V{side}" for x in range(CELL, side, CELL))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
        f'<defs><path id="lines" d="{lines}" stroke="#fff"/></defs>',
        f'<rect width="{width}" height="{height}" rx="6" fill="#fff"/>',
    ]
    for number, (title, (arguments, pattern)) in enumerate(PANELS.items()):
        mask = shown(pattern, SEQ_LEN)
        parts += [
            f'<g transform="translate({MARGIN + number * (side + GAP)} {TOP})">',
            f'<text y="-26" font-size="13" fill="#111">{title}</text>',
            f'<text y="-10" font-size="9.5" font-family="monospace" fill="#333">{arguments}</text>',
            f'<path d="{cells(mask.triu(1))}" fill="{LATER}"/>',
            f'<path d="{cells(mask.tril())}" fill="{EARLIER}"/>',
            f'<use href="#lines"/><rect width="{side}" height="{side}" fill="none" stroke="{LINE}"/></g>',
        ]
    legend = "Each row is a query, each column a key."
    parts.append(f'<text x="{MARGIN}" y="{height - 10}" font-size="11" fill="#111">{legend}</text>')
    for x, color, text in ((236, EARLIER, "seen in every call"), (366, LATER, "seen only if the call is not causal")):
        parts += [
            f'<rect x="{MARGIN + x}" y="{height - 20}" width="{CELL}" height="{CELL}" fill="{color}"/>',
            f'<text x="{MARGIN + x + 16}" y="{height - 10}" font-size="11" fill="#111">{text}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
