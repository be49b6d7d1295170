"""Hugging Face's Trainer on rings, with one more line in a script::

    trainer = Trainer(model=model, args=args, train_dataset=dataset)  # or one of TRL, such as SFTTrainer
    attach(trainer)
    trainer.train()

Start the script with ``torchrun`` or ``accelerate launch``. The ranks of a ring count as one process of data
parallelism: they read the same batches, and the losses that the Trainer logs are those of one device.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from ring_backends.errors import importing
from ring_backends.integrations.accelerate import expect, join, make_attention, replace_methods
from ring_backends.integrations.transformers.inputs import IGNORED, documents_of
from ring_backends.integrations.transformers.probe import inner_model
from ring_backends.integrations.transformers.whole_batches import (
    LABELS,
    ShardedForward,
    is_sequence_classifier,
    labels_of_rows,
    put_on_ring,
    share_parameters,
)
from ring_backends.ring.ring import Ring
from ring_backends.ring.topology import UlyssesSize
from ring_backends.schedule.layout import LayoutKind

with importing("transformers' Trainer cannot be imported", "hf"):
    from transformers import Trainer
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

__all__ = ["attach"]

_REFUSED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "model_init": (lambda trainer: trainer.model_init is not None, "pass a model instead"),
    "neftune_noise_alpha": (lambda trainer: bool(trainer.args.neftune_noise_alpha), "leave it out"),
    "use_liger_kernel with a trainer of TRL": (
        lambda trainer: _is_of_trl(trainer) and trainer.args.use_liger_kernel,
        "leave it out; the head that TRL adds makes no logits either",
    ),
    "use_cache": (lambda trainer: getattr(trainer.args, "use_cache", False), "leave it out; a ring has no cache"),
    "predict_with_generate": (lambda trainer: getattr(trainer.args, "predict_with_generate", False), "leave it out"),
    "eval_use_gather_object": (lambda trainer: trainer.args.eval_use_gather_object, "gather tensors instead"),
    "train_sampling_strategy = 'batch_rebalance'": (
        lambda trainer: getattr(trainer.args, "train_sampling_strategy", None) == "batch_rebalance",
        "its batches differ between the ranks of a ring; choose another strategy",
    ),
    "label_names": (lambda trainer: trainer.label_names not in ([], ["labels"]), "the loss is that of labels"),
    "label_smoothing_factor with a sequence classifier": (
        lambda trainer: trainer.args.label_smoothing_factor and is_sequence_classifier(inner_model(trainer.model)),
        "leave it out",
    ),
    "label_smoothing_factor with a trainer of TRL": (
        lambda trainer: _is_of_trl(trainer) and bool(trainer.args.label_smoothing_factor),
        "leave it out",
    ),
    "DataParallel": (lambda trainer: trainer.args.n_gpu > 1, "start one process per GPU with torchrun"),
    "a wrapped model": (lambda trainer: trainer.model_wrapped is not trainer.model, "call attach() before train()"),
}
"""What a Trainer must not have. Each maps to a test, and to what the user can do."""


def attach(
    trainer: Any,
    segment_lengths: Sequence[int | None] | None = None,
    dilation_rates: Sequence[int] | None = None,
    *,
    ring_size: int | None = None,
    layout: LayoutKind = "contiguous",
    timeout: timedelta | float = timedelta(seconds=300),
    buffer_bytes: int | None = None,
    ulysses_size: UlyssesSize = 1,
    probe: bool = True,
    **options: Any,
) -> Ring:
    """Put a Trainer and its model on rings. Every process makes this call, after ``Trainer(…)`` and before ``train()``.

    Training, evaluation, prediction, saving and resuming then work as without a ring, on ``ring.data_size`` processes.
    A batch of the Trainer is one batch per ring: ``per_device_train_batch_size`` is the number of sequences per ring.
    ``predict`` returns whole sequences. ``compute_loss_func`` gets the whole logits on every rank.

    Args:
        trainer: a ``transformers.Trainer`` with a causal or masked language model, a token or sequence classifier, or,
            with a ``compute_loss_func``, a model without a head; or TRL's ``SFTTrainer``, ``DPOTrainer``,
            ``KTOTrainer`` or ``RewardTrainer``. The model may be within a ``PeftModel``. A reference model is put on
            the ring, too.
        segment_lengths, dilation_rates, ring_size, layout, timeout, buffer_bytes, ulysses_size, probe, options: as in
            :func:`ring_backends.integrations.accelerate.attach`.

    Returns:
        The ring.

    Raises:
        TypeError, ValueError: an argument is invalid, or the model or an argument of the Trainer is not supported.
        AdapterUnavailableError: this release of transformers or accelerate lacks, or has changed, a part that the ring
            needs. The message names it.
    """
    _check_trainer(trainer)
    ring = join(trainer.accelerator, ring_size, layout, timeout, buffer_bytes, ulysses_size)
    attention = make_attention(segment_lengths, dilation_rates, ring, options)
    share_parameters(ring, trainer.model)
    sharded = put_on_ring(trainer.model, attention, trainer.args.label_smoothing_factor, probe)
    if trainer.args.label_smoothing_factor:
        _check_smoothed_labels(trainer, sharded)
    reference = getattr(trainer, "ref_model", None)
    if reference is not None:
        reference = trainer.accelerator.unwrap_model(reference)
        share_parameters(ring, reference)
        put_on_ring(reference, attention, 0.0, probe)
    attached = _Attached(trainer, ring, sharded)
    batch_size, num_flops = trainer.get_total_train_batch_size, trainer.floating_point_ops
    replace_methods(
        trainer,
        compute_loss=attached.compute_loss,
        prediction_step=attached.prediction_step,
        get_total_train_batch_size=lambda args: batch_size(args) // ring.size,
        floating_point_ops=lambda inputs: num_flops(inputs) // ring.size,
    )
    attached.check()
    return ring


def _check_trainer(trainer: Any) -> None:
    if not isinstance(trainer, Trainer):
        raise TypeError(f"trainer = {type(trainer).__name__}: expected a transformers.Trainer.")
    if type(trainer).compute_loss is not Trainer.compute_loss and not _is_of_trl(trainer):
        raise ValueError(
            f"{type(trainer).__name__}.compute_loss: the loss of a ring is computed over the rows of all ranks, so "
            "attach() replaces this method; use a Trainer that does not override it, with a function of whole logits "
            "and labels:\n"
            "    def loss(outputs, labels, num_items_in_batch=None):\n"
            "        return …\n"
            "    trainer = Trainer(…, compute_loss_func=loss)"
        )
    for name, (is_refused, instead) in _REFUSED.items():
        if is_refused(trainer):
            raise ValueError(f"{name}: not supported by a ring; {instead}.")


def _check_smoothed_labels(trainer: Any, sharded: ShardedForward) -> None:
    """Check that the Trainer's label smoothing, which goes by the class of the model, has the labels of its loss."""
    name = type(sharded.inner).__name__
    shifts = name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    if shifts != (sharded.label_of == "next"):
        sharded.remove()
        does = "shifts" if shifts else "does not shift"
        raise ValueError(
            f"label_smoothing_factor = {trainer.args.label_smoothing_factor}: the Trainer {does} the labels of {name} "
            "for it, unlike the model's own loss; set it to 0."
        )


def _is_of_trl(trainer: Any) -> bool:
    """Whether a trainer has a loss of TRL over results of whole sequences, the same on all ranks of a ring.

    These are the log-probabilities of the head that TRL adds to language models, and the logits of a reward model.
    """
    for name in ("SFT", "DPO", "KTO", "Reward"):
        module: Any = sys.modules.get(f"trl.trainer.{name.lower()}_trainer")
        if module is not None and type(trainer).compute_loss is getattr(module, f"{name}Trainer").compute_loss:
            return name == "Reward" or hasattr(module, "add_fused_lm_head")  # from TRL 1.15 on
    return False


class _Attached:
    """The methods of a Trainer that a ring replaces."""

    def __init__(self, trainer: Any, ring: Ring, sharded: ShardedForward) -> None:
        self.trainer, self.ring, self.label_of = trainer, ring, sharded.label_of
        self.original_prediction_step, self.original_compute_loss = trainer.prediction_step, trainer.compute_loss
        self.is_evaluating = False
        self.is_of_trl, self.is_pooled = _is_of_trl(trainer), sharded.has_own_loss
        if self.is_of_trl and trainer.compute_loss_func is not None:
            trainer.compute_loss_func = self._over_whole_logits(trainer.compute_loss_func)
        takes_num_items, smoother = sharded.takes_num_items, trainer.label_smoother
        # Some models, and the label smoother of older releases, ignore num_items_in_batch.
        if smoother is not None:
            takes_num_items = "num_items_in_batch" in inspect.signature(type(smoother).__call__).parameters
        elif takes_num_items is None:  # without a probe
            takes_num_items = "loss_function" in inspect.unwrap(type(sharded.inner).forward).__code__.co_names
        self.takes_num_items = trainer.model_accepts_loss_kwargs and takes_num_items

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The loss of the whole batch, as :meth:`transformers.Trainer.compute_loss` returns it on one device."""
        trainer, inputs = self.trainer, dict(inputs)
        is_mean_of_rings = trainer.args.average_tokens_across_devices
        if self.is_of_trl:
            # TRL multiplies the loss by the number of processes over this size. A ring counts as one process.
            trainer.get_tp_size = lambda: self.ring.size
            try:
                return self.original_compute_loss(model, inputs, return_outputs, num_items_in_batch)
            finally:
                del trainer.get_tp_size
        if self.is_evaluating and not is_mean_of_rings:
            # A ring may have no label, so the loss is that of all rings. Their labels count as the Trainer counts them,
            # which includes the first label of a row for models such as GPT-2.
            is_mean_of_rings = True
            if num_items_in_batch is not None:
                num_items_in_batch = trainer.accelerator.gather(num_items_in_batch).sum()
        if trainer.compute_loss_func is not None:
            labels: Any = inputs.pop("labels", None)
            shape = inputs["input_ids"].shape
            outputs = model(**inputs)
            outputs = outputs if self.is_pooled else self._whole(outputs, shape)
            loss = trainer.compute_loss_func(outputs, labels, num_items_in_batch=num_items_in_batch)
            is_mean_of_rings = is_mean_of_rings and num_items_in_batch is not None
        elif all(inputs.get(name) is None for name in LABELS):
            raise ValueError(f"the batch has {', '.join(inputs)}, and no labels: there is no loss; add labels.")
        elif self.is_pooled:  # the head computes the mean over the sequences of this ring
            outputs = model(**inputs)
            loss, is_mean_of_rings = outputs["loss"], False
        else:
            labels = labels_of_rows(inputs, self.label_of)
            if not self.takes_num_items or num_items_in_batch is None:
                num_items_in_batch = (labels != IGNORED).sum()
                if is_mean_of_rings:  # as one device would count, which has the sequences of all rings in its batch
                    num_items_in_batch = trainer.accelerator.gather(num_items_in_batch).sum()
            outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
            loss = outputs["loss"]
        if is_mean_of_rings:
            loss = loss * self.ring.data_size  # the mean over the processes divides by it
        return (loss, outputs) if return_outputs else loss

    def prediction_step(self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, **options: Any) -> Any:
        """The loss over the batches of all rings, the logits of the whole sequences, and the labels."""
        if self.is_pooled:
            return self.original_prediction_step(model, inputs, prediction_loss_only, **options)
        inputs, trainer = self._without_repetitions(inputs), self.trainer
        self.is_evaluating = True
        try:
            loss, logits, labels = self.original_prediction_step(model, inputs, prediction_loss_only, **options)
        finally:
            self.is_evaluating = False
        if loss is not None:
            loss = trainer.accelerator.gather(loss).mean()
        if self.is_of_trl or trainer.compute_loss_func is None or loss is None:
            logits = self._whole(logits, inputs["input_ids"].shape)
        return loss, logits, labels

    def _without_repetitions(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Ignore the labels of rows of the sequences that fill up the last batch of a data set.

        Accelerate takes them from the beginning of the data set, and removes their results, so that only the loss would
        count them. With one ring there are none.
        """
        state, size = self.trainer.accelerator.gradient_state, self.trainer.args.eval_batch_size
        names = [name for name in LABELS & inputs.keys() if inputs[name].shape == inputs["input_ids"].shape]
        if self.ring.data_size == 1 or not state.end_of_dataloader or state.remainder < 1 or not names:
            return inputs
        input_ids = inputs["input_ids"]
        sequences = torch.arange(len(input_ids), device=input_ids.device).unsqueeze(1)
        if len(input_ids) < size:  # a collator has packed the sequences into one
            sequences = documents_of(inputs)
            found = int(sequences.max()) + 1
            if found != size:
                raise ValueError(
                    f"the last batch holds {found} documents of {size} sequences in one row, of which some repeat the "
                    "first ones of the data set, and a ring cannot tell which documents a sequence had; choose "
                    f"per_device_eval_batch_size so that {self.ring.data_size} rings × its value divides the number of "
                    "sequences, or evaluate on one ring."
                )
        is_repeated = sequences >= state.remainder - self.ring.data_rank * size
        return {**inputs, **{name: inputs[name].masked_fill(is_repeated, IGNORED) for name in names}}

    def _over_whole_logits(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A ``compute_loss_func`` that gets the outputs of one rank."""
        return lambda outputs, labels, **options: function(self._whole(outputs, labels.shape), labels, **options)

    def _whole(self, outputs: Any, shape: torch.Size) -> Any:
        """The whole of every tensor of rows [batch, rows, …] or [batch × rows, …]; ``shape`` is [batch, seq]."""
        if isinstance(outputs, dict):
            rows = {name: value for name, value in outputs.items() if name != "pooler_output"}
            return type(outputs)(**{**outputs, **{name: self._whole(value, shape) for name, value in rows.items()}})
        if isinstance(outputs, (tuple, list)):
            return type(outputs)(self._whole(value, shape) for value in outputs)
        batch, seq_len = shape
        local_len = self.ring.layout(seq_len).local_len(self.ring.rank)
        if not isinstance(outputs, Tensor) or outputs.dim() < 2:
            return outputs
        if outputs.shape[:2] == (batch, local_len):
            return self.ring.unshard(outputs, seq_len=seq_len)
        if len(outputs) == batch * local_len:
            return self.ring.unshard(outputs.unflatten(0, (batch, -1)), seq_len=seq_len).flatten(0, 1)
        return outputs

    def check(self) -> None:
        """Try what the Trainer itself computes from the number of processes.

        Raises:
            AdapterUnavailableError: it is not what one device with ``data_size`` processes computes.
        """
        trainer, args, rings = self.trainer, self.trainer.args, self.ring.data_size
        batch_size = args.train_batch_size * args.gradient_accumulation_steps * rings
        expect("Trainer.get_total_train_batch_size", trainer.get_total_train_batch_size(args), batch_size)
        labels = torch.ones((1, 3), dtype=torch.int64, device=args.device)
        num_items = trainer._get_num_items_in_batch([{"labels": labels}], args.device)
        if num_items is not None:
            num_labels = 3 - getattr(trainer, "_loss_shifts_labels", False)
            expected = num_labels * (rings if args.average_tokens_across_devices else 1)
            expect("Trainer._get_num_items_in_batch", int(num_items), expected)
