"""Draws ``architecture.svg``: the rooms of the package, and which room imports which.

A *room* is a sub-package of ``ring_backends``, or a module in its root. ``python docs/draw_architecture.py`` writes the
picture. The build of the documentation fails if the picture is out of date.
"""

from __future__ import annotations

import configparser
import math
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "architecture.svg"
BOX_WIDTH, BOX_HEIGHT, GAP, BEND_WIDTH, ROW, MARGIN = 156, 30, 14, 44, 70, 12
LEFT_OUT = {"testing", "__main__"}

Node = tuple[str, int]
"""A room and its level, or a bend of an arrow that crosses a level: "importer imported" and this level."""


def rooms() -> list[str]:
    """Read the rooms from the contract in setup.cfg. Rooms come before the rooms that they import."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    layers = config["importlinter:contract:order"]["layers"]
    return [room for line in layers.split("\n") if line.strip() for room in map(str.strip, line.split("|"))]


def room_imports() -> dict[str, set[str]]:
    """Find the rooms that each room imports, from the source of the package."""
    graph = grimp.build_graph("ring_backends", exclude_type_checking_imports=True, cache_dir=None)
    imports: dict[str, set[str]] = {room: set() for room in rooms() if room not in LEFT_OUT}
    for module in graph.modules:
        for imported in graph.find_modules_directly_imported_by(module):
            importer_room, imported_room = (name.split(".")[1:2] for name in (module, imported))
            if importer_room and imported_room and importer_room != imported_room and importer_room[0] in imports:
                imports[importer_room[0]].add(imported_room[0])
    return imports


def without_implied(imports: dict[str, set[str]]) -> dict[str, set[str]]:
    """Leave out imports that others imply: if a imports b and c, and b imports c, a's import of c is left out."""
    reached: dict[str, set[str]] = {}
    for room in reversed(imports):  # imported rooms first
        reached[room] = imports[room].union(*(reached[other] for other in imports[room]))
    return {room: {x for x in found if not any(x in reached[y] for y in found)} for room, found in imports.items()}


def place(imports: dict[str, set[str]]) -> tuple[list[list[Node]], list[tuple[Node, Node]]]:
    """Return rows of nodes, with importers on top, and the lines between neighbouring rows."""
    level: dict[str, int] = {}
    for room in reversed(imports):
        level[room] = 1 + max((level[other] for other in imports[room]), default=-1)
    rows: defaultdict[int, list[Node]] = defaultdict(list)
    for room in imports:
        rows[level[room]].append((room, level[room]))
    lines: list[tuple[Node, Node]] = []
    for room, found in imports.items():
        for other in sorted(found, key=list(imports).index):
            bends = [(f"{room} {other}", row) for row in range(level[room] - 1, level[other], -1)]
            for bend in bends:
                rows[bend[1]].append(bend)
            lines += pairwise([(room, level[room]), *bends, (other, level[other])])
    ordered = [rows[row] for row in sorted(rows, reverse=True)]
    for sweep in range(12):
        _order_by_neighbours(ordered if sweep % 2 == 0 else ordered[::-1], lines)
    return ordered, lines


def _order_by_neighbours(rows: list[list[Node]], lines: list[tuple[Node, Node]]) -> None:
    """Sort the nodes of each row by the mean place of their neighbours in the row before, so that fewer lines cross."""
    neighbours = defaultdict(set)
    for upper, lower in lines:
        neighbours[upper].add(lower)
        neighbours[lower].add(upper)
    for fixed, row in pairwise(rows):
        places = {node: (place + 0.5) / len(fixed) for place, node in enumerate(fixed)}

        def mean(node: Node, own: int, row: list[Node] = row, places: dict[Node, float] = places) -> float:
            near = [places[other] for other in neighbours[node] if other in places]
            # The rounding of sum() would depend on the order of the set, and so on the hash seed.
            return math.fsum(near) / len(near) if near else (own + 0.5) / len(row)

        means = {node: mean(node, own) for own, node in enumerate(row)}
        row.sort(key=means.__getitem__)


def _width(node: Node) -> int:
    return BEND_WIDTH if " " in node[0] else BOX_WIDTH + GAP


def draw() -> str:
    """Return the picture as SVG."""
    rows, lines = place(without_implied(room_imports()))
    widths = [[_width(node) for node in row] for row in rows]
    width = max(map(sum, widths)) + 2 * MARGIN
    height = (len(rows) - 1) * ROW + BOX_HEIGHT + 2 * MARGIN
    where: dict[Node, tuple[int, int]] = {}
    for number, (row, in_row) in enumerate(zip(rows, widths, strict=True)):
        x = (width - sum(in_row)) // 2
        for node, node_width in zip(row, in_row, strict=True):
            where[node] = (x + node_width // 2, MARGIN + number * ROW)
            x += node_width
    packages = {path.parent.name for path in (ROOT / "ring_backends").glob("*/__init__.py")}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
        '<defs><marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#666"/></marker></defs>',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for upper, lower in lines:
        (x1, y1), (x2, y2) = where[upper], where[lower]
        y1 += BOX_HEIGHT
        middle = (y1 + y2) / 2
        straight_on = f"V{y2 + BOX_HEIGHT}" if " " in lower[0] else ""
        head = "" if " " in lower[0] else ' marker-end="url(#head)"'
        path = f"M{x1} {y1}C{x1} {middle:g} {x2} {middle:g} {x2} {y2}{straight_on}"
        parts.append(f'<path d="{path}" fill="none" stroke="#666"{head}/>')
    for (room, _), (x, y) in where.items():
        if " " in room:
            continue
        fill = "#cfe3f7" if room in packages else "#f6e7c8"
        parts += [
            f'<rect x="{x - BOX_WIDTH // 2}" y="{y}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="5" fill="{fill}" '
            'stroke="#666"/>',
            f'<text x="{x}" y="{y + 19}" font-size="12" text-anchor="middle" fill="#111">{room}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
