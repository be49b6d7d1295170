"""Small Trainer and Accelerate runs, on one process and on rings. Each returns its losses, results and parameters."""

from __future__ import annotations

import contextlib
import os
import tempfile
from dataclasses import dataclass, field
from importlib import import_module
from inspect import signature
from typing import Any, Literal, get_args

import pytest
import torch
import torch.distributed as dist
from small_models import HAS_RECURRENT_LAYERS, VOCABULARY, build, transformers
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

pytest.importorskip("accelerate")

from accelerate import Accelerator, ParallelismConfig
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType

from ring_backends.integrations.accelerate import attach as attach_accelerator
from ring_backends.integrations.trainer import attach
from ring_backends.integrations.transformers import IGNORED
from ring_backends.testing.failing_calls import Ended, ending

N, STEPS = 45, 6

CausalKind = Literal["gpt2", "llama", "qwen3", "mistral", "gemma2", "gpt_oss", "qwen3_moe", "qwen3_next"]
Kind = Literal[CausalKind, "bert", "modernbert"]
Task = Literal["tokens", "sequence", "embedding"]
OWN_SIZES: dict[Kind, dict[str, Any]] = {
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "llama": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 8},
    "bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "modernbert": {"local_attention": 16, "attention_dropout": 0.0, "cls_token_id": 1, "sep_token_id": 2},
    "mistral": {"num_key_value_heads": 2, "sliding_window": 16},
    "gemma2": {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 16, "attn_logit_softcapping": 2.0},
    "qwen3_moe": {
        **{"num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": 16, "output_router_logits": True, "router_aux_loss_coef": 0.5},
    },
    "qwen3_next": {
        **{"layer_types": ["linear_attention", "full_attention"], "num_key_value_heads": 2, "head_dim": 8},
        **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8},
        **{"linear_value_head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        **{"shared_expert_intermediate_size": 16, "router_aux_loss_coef": 0.5},
    },
    "gpt_oss": {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 16, "num_local_experts": 4},
}

LORA_TARGETS = ["q_proj", "v_proj", "in_proj_qkvz"]


def make_model(kind: Kind, lora: bool = False, task: Task = "tokens", **fields: Any) -> Any:
    """A model. The test is skipped if PEFT is missing, or if this release of transformers cannot run the model."""
    if kind == "modernbert" and not transformers.ModernBertForMaskedLM._can_set_attn_implementation():
        pytest.skip("this release's ModernBERT has an attention of its own")
    if kind == "gpt2" and "cache" not in signature(transformers.GPT2LMHeadModel.forward).parameters:
        pytest.skip("GPT-2 of older releases does not pass the arguments of the model on to its attention")
    if kind == "qwen3_next" and not HAS_RECURRENT_LAYERS:
        pytest.skip("a ring refuses the recurrent layers of this release")
    head = "ForCausalLM" if kind in get_args(CausalKind) else "ForMaskedLM"
    head = {"tokens": head, "sequence": "ForSequenceClassification", "embedding": ""}[task]
    attention = "eager" if kind in ("gemma2", "gpt_oss") else "sdpa"
    # With a cache, transformers ignores position_ids that restart.
    model = build(kind, head, attention, **{**OWN_SIZES[kind], "use_cache": False, **fields})
    if lora:
        peft = pytest.importorskip("peft")
        options = {"init_lora_weights": False, "task_type": "SEQ_CLS" if task == "sequence" else None}
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=LORA_TARGETS, **options))
    return model


def document(index: int, padded: bool = True, every_label: bool = True, task: Task = "tokens") -> dict[str, Any]:
    """A document of some length, padded to N tokens or not."""
    generator = torch.Generator().manual_seed(index)
    length = int(torch.randint(9, N + 1, (), generator=generator))
    tokens = torch.randint(3, VOCABULARY, (length,), generator=generator)
    labels = tokens if every_label else tokens.masked_fill(torch.rand(length, generator=generator) < 0.7, IGNORED)
    if not padded:
        return {"input_ids": tokens.tolist(), "labels": labels.tolist()}
    missing = (0, N - length)
    return {
        "input_ids": F.pad(tokens, missing),
        "attention_mask": F.pad(torch.ones_like(tokens), missing),
        "labels": F.pad(labels, missing, value=IGNORED) if task == "tokens" else torch.tensor(index % 3),
    }


def documents(number: int, **options: Any) -> list[dict[str, Any]]:
    return [document(index, **options) for index in range(number)]


@dataclass(frozen=True)
class Case:
    """One run of a Trainer.

    Attributes:
        arguments: of TrainingArguments.
        loss_func: whether to pass a ``compute_loss_func``.
        fields: of the model's configuration.
        saved_on_cpu: whether tensors for the backward are saved by ``save_on_cpu``.
    """

    kind: Kind = "llama"
    lora: bool = False
    packed: bool = False
    loss_func: bool = False
    task: Task = "tokens"
    arguments: dict[str, Any] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)
    saved_on_cpu: bool = False


OFFLOAD = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"offload": True}}
KEEP_LABELS = {"remove_unused_columns": False, "label_names": ["labels"], "learning_rate": 0.001}
TEN_CHECKPOINTED_STEPS = {"gradient_checkpointing": True, "max_steps": 10}
CASES = {
    "llama": Case(),
    "qwen3-packed": Case("qwen3", packed=True),
    "bert": Case("bert"),
    "modernbert": Case("modernbert"),
    "mistral-packed": Case("mistral", packed=True),
    "gemma2": Case("gemma2"),
    "gpt-oss-lora": Case("gpt_oss", lora=True),
    "router-loss": Case("qwen3_moe"),
    "hybrid": Case("qwen3_next", fields={"output_router_logits": True}, arguments=TEN_CHECKPOINTED_STEPS),
    "hybrid-lora": Case("qwen3_next", lora=True, arguments=TEN_CHECKPOINTED_STEPS),
    "hybrid-rows": Case("qwen3_next"),
    "hybrid-packed": Case("qwen3_next", packed=True),
    # The Trainer counts the first label of a row of GPT-2, which its loss leaves out.
    "gpt2": Case("gpt2", arguments={"average_tokens_across_devices": False}),
    "accumulation": Case("qwen3", arguments={"gradient_accumulation_steps": 3}),
    "lora": Case(lora=True),
    "label-smoothing": Case(arguments={"label_smoothing_factor": 0.1}),
    "activation-checkpointing": Case("qwen3", arguments={"gradient_checkpointing": True}),
    "offloaded-activations": Case(arguments=OFFLOAD),
    "saved-on-cpu": Case("gpt_oss", saved_on_cpu=True),
    "loss-function": Case(loss_func=True, arguments={"gradient_accumulation_steps": 2}),
    "classifier": Case(task="sequence", fields={"num_labels": 3}, arguments={"gradient_accumulation_steps": 2}),
    "classifier-lora": Case(task="sequence", lora=True, fields={"num_labels": 3}),
    # As many classes as a rank of two has rows.
    "classifier-loss-function": Case(task="sequence", loss_func=True, fields={"num_labels": N // 2 + 1}),
    "bert-classifier": Case("bert", task="sequence", fields={"num_labels": 3}),
    "mean-classifier": Case("modernbert", task="sequence", fields={"num_labels": 3, "classifier_pooling": "mean"}),
    "embedding": Case("bert", task="embedding", loss_func=True, arguments=KEEP_LABELS),
}


def num_rings(ring_size: int | None) -> int:
    """The number of rings of this size in the world. ``ring_size`` None is one process without a ring."""
    return 1 if ring_size is None else int(os.environ["WORLD_SIZE"]) // ring_size


def reset_accelerate() -> None:
    """The state of an Accelerator is global. A new run begins without it."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def loss_of_next_tokens(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """A user's ``compute_loss_func``, over whole logits."""
    logits = outputs.logits[:, :-1].flatten(0, 1)
    return F.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch


def loss_of_embeddings(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """The embeddings of a sequence, the pooler's and the mean row, shall point to its label."""
    embeddings = torch.stack([outputs.pooler_output, outputs.last_hidden_state.mean(1)])
    return (embeddings - labels[:, None]).square().sum() / num_items_in_batch


def loss_of_classes(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return F.cross_entropy(outputs.logits, labels, reduction="sum") / num_items_in_batch


LOSSES = {"tokens": loss_of_next_tokens, "embedding": loss_of_embeddings, "sequence": loss_of_classes}


def settings(rings: int) -> dict[str, Any]:
    """Arguments of every trainer. It saves nothing."""
    sizes = dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size"), 4 // rings)
    options = {"use_cpu": True, "max_steps": STEPS, "learning_rate": 0.1, "optim": "sgd", "logging_steps": 1}
    unused = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "output_dir": tempfile.gettempdir()}
    return {**sizes, **options, **unused}


def make_trainer(case: Case, rings: int, **arguments: Any) -> Any:
    """A Trainer whose steps have 4 documents, over ``rings`` rings."""
    reset_accelerate()
    # Made before DeepSpeed would partition it, which draws other weights.
    model = make_model(case.kind, case.lora, case.task, **case.fields)
    collator = transformers.DataCollatorWithFlattening() if case.packed else None
    data = {"padded": not case.packed, "every_label": case.kind in get_args(CausalKind), "task": case.task}
    options = {**settings(rings), "lr_scheduler_type": "linear", "max_grad_norm": 0.5}
    if "deepspeed" in arguments:
        # Without GPUs and with DeepSpeed, Accelerate would take every process for the only one.
        import_module("ring_backends.adapters.deepspeed.ring_pass").start_deepspeed()  # without a compiler
        PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_CPU)
    if case.arguments is OFFLOAD:
        # A machine without GPUs has no pinned memory.
        vars(transformers.modeling_utils)["save_on_cpu"] = lambda **_: torch.autograd.graph.save_on_cpu()
    args = transformers.TrainingArguments(**{**options, **case.arguments, **arguments})
    if "fsdp" in arguments:
        # Accelerate refuses to shard on processes without GPUs. FSDP2 itself does not.
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    trainer = transformers.Trainer(
        model=model,
        args=args,
        train_dataset=documents(24, **data),
        eval_dataset=documents(10 if case.task == "tokens" else 8, **data),
        data_collator=collator,
        compute_loss_func=LOSSES[case.task] if case.loss_func else None,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def make_attached(
    case: Case,
    ring_size: int | None,
    layout: Any = "contiguous",
    *,
    ulysses_size: int = 1,
    **arguments: Any,
) -> Any:
    """A Trainer on rings of this size. The axes of Accelerate, if there are any, have their own ring size."""
    trainer = make_trainer(case, num_rings(ring_size), **arguments)
    if ring_size is not None:
        has_axes = "parallelism_config" in arguments
        ring = attach(trainer, ring_size=None if has_axes else ring_size, layout=layout, ulysses_size=ulysses_size)
        assert ring.ulysses_size == ulysses_size, ring
    return trainer


def results_of(trainer: Any, case: Case) -> dict[str, Any]:
    results = measures_of(trainer, "loss", "grad_norm")
    results["flops"] = torch.tensor(trainer.state.total_flos, dtype=torch.float64)
    # Trainer joins the logits of batches by padding, and packed batches differ in length.
    trainer.args.prediction_loss_only = case.packed
    if case.task == "sequence":
        results["predictions"] = torch.from_numpy(trainer.predict(documents(8, task=case.task)).predictions)
    elif case.task == "tokens" and not case.packed:
        found = trainer.predict(documents(5)).predictions
        logits = next(x for x in found if x.ndim == 3) if isinstance(found, tuple) else found  # beside router's logits
        is_real = torch.stack([found["attention_mask"] for found in documents(5)])
        results["predictions"] = torch.from_numpy(logits) * is_real.unsqueeze(-1)
    results["evaluation loss"] = torch.tensor(trainer.evaluate()["eval_loss"], dtype=torch.float64)
    return results | parameters_of(trainer.accelerator, trainer.model)


def measures_of(trainer: Any, *names: str) -> dict[str, Any]:
    """What a trainer has logged of each step."""
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {name: torch.tensor([entry[name] for entry in history], dtype=torch.float64) for name in names}


def parameters_of(accelerator: Any, model: Any) -> dict[str, Tensor]:
    """The whole parameters that are trained."""
    parameters = accelerator.unwrap_model(model).named_parameters()
    return {name: whole(value) for name, value in parameters if value.requires_grad}


def whole(parameter: Any) -> Tensor:
    if hasattr(parameter, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().clone()
    parameter = parameter.detach()
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter.clone()


def assert_equal(by_rank: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    """Compare the results of every rank with those of one process: within 1e-5, of values above 1 relatively."""
    for found in by_rank:
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            difference = (found[name] - value).abs().max().item()
            largest = value.abs().max().item()
            assert difference <= 1e-5 * max(1.0, largest), f"{name} differs by {difference}, of {largest}"


def run(
    name: str, ring_size: int | None, layout: Any = "contiguous", strategy: str = "ddp", ulysses_size: int = 1
) -> dict[str, Any]:
    """Train, predict and evaluate."""
    case = CASES[name]
    trainer = make_attached(case, ring_size, layout, ulysses_size=ulysses_size, **arguments_of(strategy, ring_size))
    with torch.autograd.graph.save_on_cpu() if case.saved_on_cpu else contextlib.nullcontext():
        trainer.train()
    return results_of(trainer, case)


def arguments_of(strategy: str, ring_size: int | None) -> dict[str, Any]:
    if strategy.startswith("zero"):
        zero = {"stage": int(strategy[-1]), "stage3_param_persistence_threshold": 0}
        automatic = "train_batch_size train_micro_batch_size_per_gpu gradient_clipping gradient_accumulation_steps"
        config = {"zero_optimization": zero, "zero_allow_untested_optimizer": True}
        return {"use_cpu": False, "deepspeed": config | dict.fromkeys(automatic.split(), "auto")}
    if strategy not in ("fsdp2", "cp"):
        return {}
    arguments: dict[str, Any] = {"fsdp": True, "fsdp_config": {"version": 2, "reshard_after_forward": True}}
    if strategy == "cp":
        assert ring_size is not None
        arguments["parallelism_config"] = ParallelismConfig(cp_size=ring_size, dp_shard_size=num_rings(ring_size))
    return arguments


def resume(folder: str, ring_size: int | None) -> list[dict[str, Any]]:
    """Train, and then again the second half, from the training checkpoint between both. Both results."""
    case = CASES["accumulation"]
    results = []
    for checkpoint in (None, f"{folder}/checkpoint-{STEPS // 2}"):
        trainer = make_attached(case, ring_size, output_dir=folder, save_strategy="steps", save_steps=STEPS // 2)
        trainer.train(resume_from_checkpoint=checkpoint)
        results.append(results_of(trainer, case))
    return results


def bf16_losses(ring_size: int | None) -> Any:
    trainer = make_attached(CASES["llama"], ring_size, bf16=True)
    trainer.train()
    return results_of(trainer, CASES["llama"])["loss"]


def run_accelerate(
    name: str, ring_size: int | None, layout: Any = "contiguous", ulysses_size: int = 1
) -> dict[str, Any]:
    """A loop of Accelerate: five steps of two micro-batches of 4 documents, and an evaluation."""
    reset_accelerate()
    case = CASES[name]
    rings = num_rings(ring_size)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = make_model(case.kind, case.lora)
    if ring_size is not None:
        ring = attach_accelerator(accelerator, model, ring_size=ring_size, layout=layout, ulysses_size=ulysses_size)
        assert ring.ulysses_size == ulysses_size, ring
    collator = transformers.DataCollatorWithFlattening() if case.packed else None
    data = DataLoader(documents(40, padded=not case.packed), batch_size=4 // rings, collate_fn=collator)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    losses = []
    batches = iter(data)
    for first in batches:
        step = (first, next(batches))
        counts = [(batch["labels"][:, 1:] != IGNORED).sum() for batch in step]
        num_items = accelerator.gather(torch.stack(counts).sum()).sum()
        total = torch.zeros(())
        for batch in step:
            with accelerator.accumulate(model):
                loss = model(**batch, num_items_in_batch=num_items).loss * rings
                accelerator.backward(loss * 2)  # accelerate divides it by the number of accumulation steps
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
            total += accelerator.gather(loss.detach()).mean()
        losses.append(total)
    model.eval()
    with torch.no_grad():
        summed = model(**next(iter(data)), num_items_in_batch=100).loss
    results = {"losses": torch.stack(losses), "evaluated": accelerator.gather(summed).sum()}
    return results | parameters_of(accelerator, model)


def evaluation_of_embeddings(ring_size: int) -> float:
    """The evaluation loss of 3 sequences, the last of which fills up the batch of the second ring."""
    trainer = make_attached(CASES["embedding"], ring_size)
    return float(trainer.evaluate(documents(3, task="embedding"))["eval_loss"])


def loss_without_labels(ring_size: int) -> Ended:
    """How a call of a classifier without labels ends."""
    trainer = make_attached(CASES["classifier"], ring_size)
    inputs = {name: value[None] for name, value in document(0).items() if name != "labels"}
    return ending(trainer.compute_loss, trainer.model, inputs)


def evaluations(ring_size: int | None, kind: Kind, average: bool, loss_func: bool) -> list[float]:
    """Evaluation losses of data sets whose last batches are not full."""
    trainer = make_attached(Case(kind, loss_func=loss_func), ring_size, average_tokens_across_devices=average)
    return [trainer.evaluate(documents(number))["eval_loss"] for number in (10, 5, 3, 1)]


def evaluation_of_other_weights(ring_size: int | None) -> float:
    """The evaluation loss, before training, of a model that has other weights on each rank."""
    trainer = make_trainer(Case(), num_rings(ring_size))
    if ring_size is not None:
        with torch.no_grad():
            trainer.model.lm_head.weight += dist.get_rank()
        ring = attach(trainer, ring_size=ring_size, buffer_bytes=4096, ulysses_size="auto")
        assert (ring.buffer_bytes, ring.ulysses_size) == (4096, ring_size), ring
    return float(trainer.evaluate()["eval_loss"])


def packed_row(index: int) -> dict[str, Tensor]:
    """A row that holds three documents."""
    tokens = torch.randint(3, VOCABULARY, (N,), generator=torch.Generator().manual_seed(index))
    positions = torch.cat([torch.arange(length) for length in (9, 11, N - 20)])
    return {"input_ids": tokens, "position_ids": positions, "labels": tokens}


def evaluation_of_packed_rows(ring_size: int | None) -> tuple[float, int]:
    """The evaluation loss, and the number of labels, of a data set whose last batch is not full."""
    results = make_attached(Case(), ring_size).predict([packed_row(index) for index in range(5)])
    return results.metrics["test_loss"], int((results.label_ids != IGNORED).sum())
