"""Compares one model class of transformers on a ring of two ranks with one process.

A class is tried with a tiny configuration and its own attention. Its logits, its loss, and the gradients of a random
weighting of the logits must be equal. Classes that are equal are then tried with other inputs and by other functions
(``CHECKS``).
"""

from __future__ import annotations

import math
import os
import re
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, Literal

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import torch
from tiny_models import CHANGES, END_OF_TOKENS, FIRST_TOKEN, MAPPINGS, MASK, NUM_LABELS, PAD, TinyModel
from torch import Tensor
from torch.nn import functional as F

import ring_backends
from ring_backends import RingMismatchError, RingPeerError
from ring_backends.adapters import native
from ring_backends.integrations.transformers import IGNORED, generate, register, shard_inputs, use_ring
from ring_backends.integrations.transformers.attention import first_position_of
from ring_backends.ring.ring import Ring
from ring_backends.testing.rank import Outcome
from ring_backends.testing.world import World

PRELOAD = ("transformers.modeling_utils", "transformers.models.auto.modeling_auto", "transformers.generation.utils")
BUILD_SECONDS, CALL_SECONDS, RING_SECONDS = 10, 40, 15
EVERYTHING = os.environ.get("RING_BACKENDS_SWEEP") == "everything"
"""Whether every class that is equal gets all further checks. This takes twice as long."""

LANGUAGE_MODELS = frozenset({*MAPPINGS["causal"], *MAPPINGS["masked"]})
"""The types of the models with a class that predicts tokens."""

_DECODERS = "Whisper Bart MBart PLBart BigBirdPegasus Blenderbot BlenderbotSmall Marian Pegasus"
NOT_SHIFTED = frozenset(f"{name}ForCausalLM" for name in _DECODERS.split())
"""Causal models whose labels are those of the rows themselves."""

TOLERANCE = 1e-4
"""Of the largest value, or of 1."""

DOCUMENTS = (19, 1, 30, 14)
NEW_TOKENS = 4


@dataclass(frozen=True)
class Check:
    """What a model gets, and how it gets on the ring.

    Attributes:
        seq_len: the number of tokens of both rows of the batch.
        padding: where the second row of the batch has padding. "packed": one row of several documents instead.
        way: the function that is tested. ``shard_inputs`` is tested with ``register``.
        segment_length: that of the pattern; None for the model's own attention.
    """

    seq_len: int = 64
    layout: Literal["contiguous", "zigzag"] = "contiguous"
    padding: Literal["right", "left", "packed"] = "right"
    way: Literal["use_ring", "shard_inputs", "generate"] = "use_ring"
    is_training: bool = False
    num_layers: int | None = None
    segment_length: int | None = None


FIRST = Check()
CHECKS = {
    "zigzag layout": Check(seq_len=61, layout="zigzag"),
    "padding on the left": Check(padding="left"),
    "packed documents": Check(layout="zigzag", padding="packed"),
    "training mode": Check(is_training=True),
    "six layers": Check(num_layers=6),
    "shard_inputs": Check(layout="zigzag", way="shard_inputs"),
    "generate": Check(seq_len=32, padding="left", way="generate"),
}

Status = Literal["EQUAL", "REFUSED", "WRONG", "CRASH", "HANG", "NOT BUILT", "NO TEXT"]
DEFECTS: tuple[Status, ...] = ("WRONG", "CRASH", "HANG")


@dataclass(frozen=True)
class Verdict:
    """How one check of a class ended, and why."""

    status: Status
    why: str = ""

    def rule(self, model_type: str) -> str:
        """The error message without the argument and its value, and without names and numbers of one class."""
        rule = (self.why.partition(": ")[2] or self.why).replace(model_type, "…")
        rule = re.sub(r"(?<!\w)'[^']*'|\b\w*[a-z][A-Z]\w*\b|-?\d[\d.e-]*\d|\d", "…", rule)
        return rule[:1].upper() + rule[1:]


@dataclass
class Row:
    """The results of one class: of the first check, and of the further ones."""

    model: TinyModel
    first: Verdict
    checks: dict[str, Verdict] = field(default_factory=dict)

    @property
    def defects(self) -> dict[str, Verdict]:
        every = {"as configured": self.first, **self.checks}
        return {name: verdict for name, verdict in every.items() if verdict.status in DEFECTS}


_softmax = F.softmax


def softmax(x: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Tensor:
    """torch's own, which does not round float64. The attentions of transformers compute it in float32."""
    return _softmax(x, dim, _stacklevel, None if x.dtype == torch.float64 else dtype)


F.softmax = softmax


# --- In a rank --------------------------------------------------------------------------------------------------------


@dataclass
class Computed:
    """The logits of the whole sequence, and this process's gradients and loss.

    ``num_labels`` is the number of this rank's labels if the loss is their mean. None: it is the mean over all labels.
    """

    logits: Tensor
    gradients: dict[str, Tensor] = field(default_factory=dict)
    loss: float | None = None
    num_labels: int | None = None


@dataclass
class Batch:
    """A batch, its labels, and the rows whose logits are compared."""

    inputs: dict[str, Any]
    labels: Tensor
    rows: Tensor


def make_batch(check: Check, first_position: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(1)
    shape = 2, check.seq_len
    tokens = torch.randint(FIRST_TOKEN, END_OF_TOKENS, shape, generator=generator)
    tokens[:, 3::11] = MASK
    labels = torch.randint(FIRST_TOKEN, END_OF_TOKENS, shape, generator=generator)
    rows = torch.ones(shape, dtype=torch.bool)
    if check.padding == "packed":
        positions = torch.cat([torch.arange(length) for length in DOCUMENTS]) + first_position
        return Batch({"input_ids": tokens[:1], "position_ids": positions[None]}, labels[:1], rows[:1])
    num_tokens = check.seq_len * 3 // 4 - 3
    rows[1, slice(0, -num_tokens) if check.padding == "left" else slice(num_tokens, None)] = False
    tokens[~rows] = PAD
    labels[~rows] = IGNORED
    labels[:, 1:][~rows[:, :-1]] = IGNORED  # a causal model would predict this token from padding
    return Batch({"input_ids": tokens, "attention_mask": rows.long()}, labels, rows)


def compute(model: Any, outputs: Any, rows: Tensor, ring: Ring | None = None) -> Computed:
    """Compute the gradients of a random weighting of the logits of ``rows``, or of those of whole sequences."""
    logits = first_of(outputs)
    whole, generator = logits.detach(), torch.Generator().manual_seed(2)
    if logits.dim() == 2:  # the same on every rank
        weights = torch.randn(logits.shape, generator=generator) / (1 if ring is None else ring.size)
    else:
        weights = torch.randn((*rows.shape, logits.shape[-1]), generator=generator) * rows[..., None]
        if ring is not None:
            weights, whole = ring.shard(weights), ring.unshard(whole, seq_len=rows.shape[1])
    (logits * weights).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    loss = getattr(outputs, "loss", None)
    return Computed(whole, gradients, None if loss is None else loss.item())


def first_of(outputs: Any) -> Tensor:
    logits: Tensor = outputs["logits"] if "logits" in outputs else outputs[0]
    return logits


def alone(model: TinyModel, check: Check) -> Computed:
    """What one process computes. It computes every packed document by itself."""
    built = build(model, check)
    batch = make_batch(check, first_position_of(built.config))
    if check.way == "generate":
        return generated(built.generate, batch)
    if check.padding == "packed":
        documents = batch.inputs["input_ids"].split(DOCUMENTS, 1)
        outputs = {"logits": torch.cat([first_of(built(input_ids=tokens)) for tokens in documents], 1)}
    else:
        outputs = built(**arguments_of(model, batch))
    return compute(built, outputs, batch.rows)


@cache
def ring_here() -> Ring:
    """One ring for all checks: every new one starts threads, which end with the process."""
    return native.initialize(timeout=timedelta(seconds=RING_SECONDS))


def on_ring(model: TinyModel, check: Check) -> Computed:
    """What a rank of a ring over all ranks computes."""
    ring = ring_here().with_layout(check.layout)
    attention: Any = ring
    if check.segment_length is not None:
        attention = native.RingDilatedAttention([check.segment_length], [1], ring=ring)
    if check.way == "shard_inputs":
        register(attention)
        try:
            built = build(model, check, "ring_dilated")
        except KeyError:  # a part, such as that for images, has a table of its own
            built = build(model, check)
        register(attention, model=built)
    else:
        built = build(model, check)
        use_ring(built, attention)
    first_position = first_position_of(built.config)
    batch = make_batch(check, first_position)
    if check.way == "generate":
        return generated(lambda **options: generate(built, ring, **options), batch)
    if check.way == "use_ring":
        return compute(built, built(**arguments_of(model, batch)), batch.rows, ring)
    is_shifted = model.kind == "causal" and model.name not in NOT_SHIFTED
    options: dict[str, Any] = {"next_token_labels": is_shifted, "first_position": first_position}
    inputs = shard_inputs(ring, **arguments_of(model, batch), **options)
    computed = compute(built, built(**inputs), batch.rows, ring)
    if model.has_loss:
        computed.num_labels = int((inputs["shift_labels" if is_shifted else "labels"] != IGNORED).sum())
    return computed


def build(model: TinyModel, check: Check, implementation: str | None = None) -> Any:
    built = replace(model, num_layers=check.num_layers).build(implementation)
    return built.train(check.is_training)


def arguments_of(model: TinyModel, batch: Batch) -> dict[str, Any]:
    has_labels = model.has_loss and "position_ids" not in batch.inputs
    labels = batch.labels[:, 0] % NUM_LABELS["sequence"] if model.kind == "sequence" else batch.labels
    inputs = {**batch.inputs, "labels": labels} if has_labels else dict(batch.inputs)
    if model.needs_decoder_input():
        inputs["decoder_input_ids"] = batch.inputs["input_ids"]
    return inputs


def generated(generate_text: Callable[..., Any], batch: Batch) -> Computed:
    """The logits of new tokens."""
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": PAD, "eos_token_id": None}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # transformers renames arguments of its own calls
        result = generate_text(**batch.inputs, **options, return_dict_in_generate=True, output_logits=True)
    return Computed(torch.stack(result.logits))


def find_configuration(model: TinyModel) -> tuple[TinyModel, Computed] | Verdict:
    """The first configuration in which one process can build and run the class, and what it computes."""
    if not model.is_for_text():
        return Verdict("NO TEXT")
    errors: list[str] = []
    deadline = time.monotonic() + BUILD_SECONDS
    for change in range(len(CHANGES)):
        for implementation in ("eager", "sdpa"):  # torch's own attention ignores soft caps and sinks
            tried = replace(model, change=change, implementation=implementation)
            try:
                return try_configuration(tried)
            except Exception as error:
                errors.append(first_line(error))
        if time.monotonic() > deadline:
            break
    return Verdict("NOT BUILT", " | ".join(dict.fromkeys(errors)))


def try_configuration(model: TinyModel) -> tuple[TinyModel, Computed]:
    try:
        computed = alone(model, FIRST)
    except Exception:
        if not model.has_loss:
            raise
        model = replace(model, has_loss=False)
        computed = alone(model, FIRST)
    check_reference(model, computed)
    return model, computed


def check_reference(model: TinyModel, computed: Computed) -> None:
    """Check that a ring could be wrong: the last token of the first rank changes the logits of the second."""
    logits, batch = computed.logits, make_batch(FIRST)
    expected = (len(batch.rows), NUM_LABELS["sequence"]) if model.kind == "sequence" else batch.rows.shape
    num_dims = 2 if model.kind == "sequence" else 3
    if logits.dim() != num_dims or logits.shape[:2] != expected or not logits.isfinite().all():
        raise ValueError(f"logits are {[*logits.shape]}, or are not finite")
    last = batch.inputs["input_ids"][0, FIRST.seq_len // 2 - 1]
    last.copy_(FIRST_TOKEN + (last == FIRST_TOKEN))
    with torch.no_grad():
        changed = first_of(model.build()(**arguments_of(model, batch)))
    after = slice(None) if model.kind == "sequence" else slice(FIRST.seq_len // 2, None)
    if (changed - logits)[0, after].abs().max() < 1e-3:
        raise ValueError("the tokens of the first rank do not change the logits of the second")


def first_line(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]} ({Path(frame.filename).name}:{frame.lineno})"


# --- In the process of the test ---------------------------------------------------------------------------------------


def sweep_class(ranks: World, model: TinyModel) -> Row | None:
    """Try one class; None if it does not take text."""
    (outcome,) = ranks.run_collect(find_configuration, model, ranks=[0])[:1]
    found = outcome.value if outcome.status == "returned" else Verdict("NOT BUILT", message_of(outcome))
    if isinstance(found, Verdict):
        return None if found.status == "NO TEXT" else Row(model, found)
    model, wanted = found
    row = Row(model, run_check(ranks, model, FIRST, wanted))
    if row.first.status == "EQUAL":
        row.checks = {name: further_check(ranks, model, check) for name, check in checks_of(model).items()}
    return row


def checks_of(model: TinyModel) -> dict[str, Check]:
    """The further checks of a class. The layers of most classes are also those of a language model, which gets all."""
    if model.kind in ("token", "base") and model.model_type in LANGUAGE_MODELS and not EVERYTHING:
        return {"zigzag layout": CHECKS["zigzag layout"]}
    if model.kind == "sequence":
        return {name: CHECKS[name] for name in ("zigzag layout", "padding on the left")}
    return {name: check for name, check in CHECKS.items() if check.way != "generate" or model.kind == "causal"}


def further_check(ranks: World, model: TinyModel, check: Check, tolerance: float = TOLERANCE) -> Verdict:
    outcome = ranks.run_collect(alone, model, check, ranks=[0])[0]
    if outcome.status != "returned":
        return Verdict("NOT BUILT", message_of(outcome))
    return run_check(ranks, model, check, outcome.value, tolerance)


def run_check(ranks: World, model: TinyModel, check: Check, wanted: Computed, tolerance: float = TOLERANCE) -> Verdict:
    outcomes = ranks.run_collect(on_ring, model, check)
    if any(outcome.status != "returned" for outcome in outcomes):
        verdict = why_failed(outcomes)
        if verdict.status != "REFUSED":
            ranks.close()  # the ring may be in the middle of a call
        return verdict
    rows = None if check.way == "generate" or model.kind == "sequence" else make_batch(check).rows
    verdict = compare([outcome.value for outcome in outcomes], wanted, rows, tolerance)
    if verdict.status == "WRONG" and model.dtype == torch.float32:
        # In float64, rounding cannot choose another expert or grow over many layers.
        exact = further_check(ranks, replace(model, dtype=torch.float64), check, tolerance)
        verdict = exact if exact.status == "EQUAL" else verdict
    return verdict


def compare(by_rank: list[Computed], wanted: Computed, rows: Tensor | None, tolerance: float = TOLERANCE) -> Verdict:
    """Compare the ranks with one process: the logits of ``rows``, the summed gradients, and the loss."""
    wrong = []
    for rank, computed in enumerate(by_rank):
        if computed.logits.shape != wanted.logits.shape:
            return Verdict("WRONG", f"logits {[*computed.logits.shape]} instead of {[*wanted.logits.shape]}")
        got, right = (t.logits if rows is None else t.logits[rows] for t in (computed, wanted))
        wrong += difference(f"logits of rank {rank}", got, right, right.abs().max().item(), tolerance)
    largest = max((grad.abs().max().item() for grad in wanted.gradients.values() if grad.numel()), default=0)
    for name in sorted({name for computed in (wanted, *by_rank) for name in computed.gradients}):
        parts = [computed.gradients[name] for computed in by_rank if name in computed.gradients]
        right = wanted.gradients.get(name, torch.zeros(()))
        total = torch.stack(parts).sum(0) if parts else torch.zeros(())
        wrong += difference(f"gradient of {name}", total, right, largest, tolerance)
    if wanted.loss is not None:
        wrong += loss_difference(by_rank, wanted.loss, tolerance)
    return Verdict("WRONG", "; ".join(wrong[:3])) if wrong else Verdict("EQUAL")


def difference(what: str, got: Tensor, right: Tensor, largest: float, tolerance: float) -> list[str]:
    error = (got - right).abs().max().item() if got.numel() else 0.0
    # Not a number is wrong, too.
    return [] if error <= tolerance * max(1.0, largest) else [f"{what}: {error:.1e} off, of {largest:.1e}"]


def loss_difference(by_rank: list[Computed], right: float, tolerance: float) -> list[str]:
    """With ``shard_inputs``, the loss of a rank is the mean over its own labels."""
    losses = [math.nan if computed.loss is None else computed.loss for computed in by_rank]
    numbers = [computed.num_labels for computed in by_rank if computed.num_labels is not None]
    if numbers:
        losses = [sum(loss * number for loss, number in zip(losses, numbers, strict=True)) / sum(numbers)]
    wrong = [loss for loss in losses if not abs(loss - right) <= tolerance * max(1.0, abs(right))]
    return [f"loss {loss:.5f} instead of {right:.5f}" for loss in wrong[:1]]


def why_failed(outcomes: list[Outcome]) -> Verdict:
    """REFUSED if every rank raised an error of ring_backends, which names what it refuses."""
    for outcome in outcomes:
        if outcome.status == "no answer":
            return Verdict("HANG", f"rank {outcome.rank}: no answer {outcome.message}")
        if outcome.status == "died":
            return Verdict("CRASH", f"rank {outcome.rank} {outcome.message}")
    raised = [outcome for outcome in outcomes if outcome.status == "raised"]
    # A rank may also raise an error of the ring because of another rank.
    causes = [outcome for outcome in raised if not is_of_ring(outcome)] or raised
    for outcome in causes:
        if not is_refusal(outcome):
            return Verdict("CRASH", message_of(outcome))
    if len(raised) < len(outcomes):
        return Verdict("CRASH", f"only rank {raised[0].rank} raised {message_of(raised[0])}")
    return Verdict("REFUSED", causes[0].message)


def is_of_ring(outcome: Outcome) -> bool:
    return outcome.raised(RingMismatchError) or outcome.raised(RingPeerError)


def is_refusal(outcome: Outcome) -> bool:
    """Whether a function of ring_backends raised ValueError. Ranks that make the same call must not mismatch."""
    frames = re.findall(r'^  File "(.+)", line \d+', outcome.detail, re.MULTILINE)
    is_own = bool(frames) and Path(frames[-1]).is_relative_to(Path(ring_backends.__file__).parent)
    return is_own and outcome.raised(ValueError)


def message_of(outcome: Outcome) -> str:
    frames = re.findall(r'^  File "(.+)", line (\d+)', outcome.detail, re.MULTILINE)
    at = f" ({Path(frames[-1][0]).name}:{frames[-1][1]})" if frames else ""
    return f"{outcome.error_type or outcome.status}: {' '.join(outcome.message.split())[:300]}{at}"
