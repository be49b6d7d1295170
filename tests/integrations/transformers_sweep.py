"""Runs the checks of transformers_checks.py on all classes, prints a table, and writes a page of the documentation::

    python tests/integrations/transformers_sweep.py [--write docs/hugging-face-models.md] [KIND or class ...]

The kinds are causal, masked, token, sequence and base. Without names, the command runs all text models of transformers.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import transformers
from tiny_models import MAPPINGS, TinyModel, models
from transformers_checks import CALL_SECONDS, CHECKS, PRELOAD, TOLERANCE, Row, Verdict, sweep_class

from ring_backends.testing.world import World


def table(rows: Iterable[Row]) -> str:
    """One line per class. Below it, one line per check that is not equal."""
    lines = []
    for row in rows:
        passed = sum(verdict.status == "EQUAL" for verdict in row.checks.values())
        further = f"{passed} of {len(row.checks)} further checks equal" if row.checks else ""
        lines.append(f"{row.model.name:44} {row.first.status:10} {further}".rstrip())
        shown = {"": row.first, **row.checks}
        for name, verdict in shown.items():
            if verdict.status != "EQUAL":
                lines.append(f"    {name + ': ' if name else ''}{verdict.status} {verdict.why}")
    return "\n".join(lines)


def counts(rows: Sequence[Row]) -> str:
    columns = {"as configured": [row.first for row in rows]}
    columns |= {name: [row.checks[name] for row in rows if name in row.checks] for name in CHECKS}
    lines = [f"{len(rows)} classes"]
    for name, verdicts in columns.items():
        found = Counter(verdict.status for verdict in verdicts)
        lines.append(f"{name:20} " + ", ".join(f"{status} {number}" for status, number in found.most_common()))
    return "\n".join(lines)


KINDS = {
    "causal": "Causal language models",
    "masked": "Masked language models",
    "token": "Token classifiers",
    "sequence": "Sequence classifiers",
    "base": "Models without a head",
}
INTRODUCTION = f"""\
# Which Hugging Face models run on a ring

The command `{{command}}` wrote this page, with
Transformers {{release}} and torch {{torch}}. It built each text model with a tiny configuration and random weights, and
ran it on one process and on a ring of two ranks, by [`use_ring(model, ring)`](accelerate.md#other-loops), so that every
layer computed [its own attention](hugging-face.md#the-attention-of-each-layer). *Equal* means that the logits, the loss
and all gradients differ by at most {TOLERANCE:g} of the largest value. The batch had padding on the right.

A class that is not equal is *refused*: it raises an error that names the reason.
"""
SECTIONS = {
    "Equal": "These classes run as Transformers configures them, apart from their sizes.",
    "Refused": "These classes raise an error.",
    "Not tested": "One process could not build or run these classes with a tiny configuration and text alone.",
    "Defects": "These classes give other results than one process, or raise an error that does not name the reason.",
}
FURTHER = """\
## Further checks of the equal classes

The classes that are equal were also tried in zigzag layout, with padding on the left, with packed documents, in
training mode, with six layers, with [`shard_inputs`](hugging-face.md#a-forward-pass), and, if they are causal, with
[`generate`](decoding.md#hugging-face-models). Sequence classifiers got the first two of these checks. Token classifiers
and models without a head got the first, if a language model has the same layers. What one process could not run is not
tested.
"""
COMMAND = "python tests/integrations/transformers_sweep.py --write docs/hugging-face-models.md"


def section(row: Row) -> str:
    if row.defects:
        return "Defects"
    return {"EQUAL": "Equal", "REFUSED": "Refused"}.get(row.first.status, "Not tested")


def page(rows: Sequence[Row]) -> str:
    """The page of the documentation, in Markdown."""
    releases = {"release": transformers.__version__, "torch": torch.__version__.partition("+")[0]}
    parts = [INTRODUCTION.format(command=COMMAND, **releases)]
    for title, introduction in SECTIONS.items():
        found = [row for row in rows if section(row) == title]
        if not found:
            continue
        parts.append(f"## {title}\n\n{wrapped(introduction)}\n")
        if title == "Equal":
            for kind, name in KINDS.items():
                if some := [row for row in found if row.model.kind == kind]:
                    parts.append(wrapped(f"**{name}** ({len(some)}): {listed(some)}.") + "\n")
        elif title == "Defects":
            parts.append(by_reason((row, f"{name}: {why.why}") for row in found for name, why in row.defects.items()))
        elif title == "Not tested":
            parts.append(by_reason((row, row.first.why.partition(" | ")[0][:120]) for row in found))
        else:
            parts.append(by_reason((row, rule_of(row, row.first)) for row in found))
    checked = [row for row in rows if section(row) == "Equal"]
    limits = [
        (row, f"{name}: {rule_of(row, verdict)}")
        for name in CHECKS
        for row in checked
        if (verdict := row.checks.get(name)) and verdict.status == "REFUSED"
    ]
    return "\n".join([*parts, FURTHER, further(checked), *([by_reason(limits)] if limits else [])])


def further(rows: Sequence[Row]) -> str:
    """The numbers of classes by check and result."""
    lines = ["| check | equal | refused | not tested |", "|---|---|---|---|"]
    for name in CHECKS:
        found = Counter(row.checks[name].status for row in rows if name in row.checks)
        others = found.total() - found["EQUAL"] - found["REFUSED"]
        lines.append(f"| {name} | {found['EQUAL']} | {found['REFUSED']} | {others} |")
    return "\n".join(lines) + "\n"


def rule_of(row: Row, verdict: Verdict) -> str:
    return verdict.rule(row.model.model_type)


def by_reason(found: Iterable[tuple[Row, str]]) -> str:
    groups: dict[str, list[Row]] = {}
    for row, reason in found:
        groups.setdefault(reason.replace("|", "\\|"), []).append(row)
    lines = ["| reason | classes |", "|---|---|"]
    lines += [f"| {reason} | {listed(rows)} |" for reason, rows in groups.items()]
    return "\n".join(lines) + "\n"


def listed(rows: Iterable[Row]) -> str:
    return ", ".join(f"`{name}`" for name in sorted({row.model.name for row in rows}))


def wrapped(text: str) -> str:
    return textwrap.fill(text, 120, break_on_hyphens=False, break_long_words=False)


def sections_of(written: str) -> dict[str, str]:
    """The section of every class on a page."""
    found: dict[str, str] = {}
    for part in re.split(r"^## ", written, flags=re.MULTILINE)[1:]:
        title, _, text = part.partition("\n")
        if title in SECTIONS:
            found |= dict.fromkeys(re.findall(r"`(\w+)`", text), title)
    return found


def sweep_models(ranks: World, chosen: Iterable[TinyModel]) -> list[Row]:
    """The rows of these models, without those that do not take text."""
    found = (sweep_class(ranks, model) for model in chosen)
    return [row for row in found if row is not None]


def sweep(names: Sequence[str], workers: int) -> list[Row]:
    """Run the classes of these kinds and names; all if there are none. Each worker has its own ranks."""
    every = [model for kind in MAPPINGS for model in models(kind)]
    chosen = [model for model in every if not names or model.kind in names or model.name in names]

    def work(part: int) -> list[Row]:
        rows: list[Row] = []
        with World(2, call_timeout=CALL_SECONDS, preload=PRELOAD) as ranks:
            for model in chosen[part::workers]:
                begin = time.monotonic()
                found = sweep_models(ranks, [model])
                rows += found
                if found:
                    print(f"{table(found)}  [{time.monotonic() - begin:.1f} s]", flush=True)
        return rows

    with ThreadPoolExecutor(workers) as pool:
        return [row for rows in pool.map(work, range(workers)) for row in rows]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="KIND or class")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="write a page in Markdown")
    parser.add_argument("--workers", type=int, default=2, help="pairs of ranks (default: 2)")
    arguments = parser.parse_args()
    rows = sweep(arguments.names, arguments.workers)
    print(counts(rows))
    if arguments.write is not None:
        arguments.write.write_text(page(rows), encoding="utf-8")
    return int(any(row.defects for row in rows))


if __name__ == "__main__":
    sys.exit(main())
