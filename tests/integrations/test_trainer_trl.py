"""TRL's trainers on rings equal those on one process: losses, metrics, evaluation and parameters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import trainer_cases as cases
from native_ranks import world_of
from small_models import build, transformers
from trainer_cases import Kind, assert_equal, num_rings

pytest.importorskip("trl")

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from ring_backends.integrations.trainer import attach
from ring_backends.testing.rings import LAYOUTS
from ring_backends.testing.world import World

pytestmark = pytest.mark.matrix(reason="only the environments of the matrix have TRL")

PRELOAD = ["trl", "transformers.models.llama.modeling_llama", "ring_backends.integrations.trainer"]
two, three, four = (world_of(size) for size in (2, 3, 4))

WORDS = 18
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ' ' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + ' end ' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + ' ' }}{% endif %}{% endfor %}"
)


def make_tokenizer() -> Any:
    names = ["pad", "unknown", "end", "user", "assistant", *(f"w{number}" for number in range(WORDS))]
    numbers = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="unknown"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "pad", "eos_token": "end", "unk_token": "unknown"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE, **special)


def words(index: int, longest: int = 40) -> str:
    generator = torch.Generator().manual_seed(index)
    length = int(torch.randint(4, longest, (), generator=generator))
    return " ".join(f"w{int(number)}" for number in torch.randint(WORDS, (length,), generator=generator))


def text(index: int) -> dict[str, Any]:
    return {"text": words(index)}


def completion(index: int) -> dict[str, Any]:
    return {"prompt": words(index, 20), "completion": " " + words(index + 99, 20)}


def conversation(index: int) -> dict[str, Any]:
    roles = ("user", "assistant", "user", "assistant")
    return {"messages": [{"role": role, "content": words(7 * index + turn, 12)} for turn, role in enumerate(roles)]}


def pair(index: int) -> dict[str, Any]:
    """A preferred and another completion."""
    chosen, rejected = (" " + words(index + other, 20) for other in (99, 999))
    return {"prompt": words(index, 20), "chosen": chosen, "rejected": rejected}


def judged(index: int) -> dict[str, Any]:
    """A completion, every second one good."""
    return {**completion(index), "label": index % 2 == 0}


METRICS: dict[Any, tuple[str, ...]] = {
    SFTTrainer: ("mean_token_accuracy", "entropy", "num_tokens"),
    DPOTrainer: ("rewards/margins", "logps/chosen", "mean_token_accuracy", "entropy", "logits/chosen", "num_tokens"),
    KTOTrainer: ("kl", "entropy", "rewards/chosen", "logps/rejected", "num_tokens"),
    RewardTrainer: ("accuracy", "margin", "mean_reward", "num_tokens"),
}
CONFIGS = {SFTTrainer: SFTConfig, DPOTrainer: DPOConfig, KTOTrainer: KTOConfig, RewardTrainer: RewardConfig}


@dataclass(frozen=True)
class Case:
    """One run of a trainer. ``data`` makes an example of its number, ``config`` are arguments of its configuration."""

    data: Any = text
    kind: Kind = "llama"
    lora: bool = False
    config: dict[str, Any] = field(default_factory=dict)
    trainer: Any = SFTTrainer


PACKED = {"packing": True, "max_length": 48, "eval_packing": True}
CASES = {
    "text": Case(config={"gradient_accumulation_steps": 2}),
    "packing": Case(config=PACKED),
    "padding-free": Case(kind="mistral", config={"padding_free": True, "max_length": None}),
    "completion-only": Case(completion),
    "assistant-only": Case(conversation, config={"assistant_only_loss": True}),
    "lora": Case(completion, lora=True, config={"learning_rate": 1.0}),
    "dft": Case(config={"loss_type": "dft"}),
    "router-loss": Case(kind="qwen3_moe"),
    "hybrid": Case(completion, kind="qwen3_next", config={"gradient_checkpointing": True}),
    "dpo": Case(pair, "mistral", trainer=DPOTrainer),
    "dpo-lora": Case(pair, lora=True, trainer=DPOTrainer, config={"learning_rate": 1.0, "loss_type": ["ipo", "sft"]}),
    "kto": Case(judged, trainer=KTOTrainer),
    "reward": Case(pair, "qwen3", trainer=RewardTrainer, config={"center_rewards_coefficient": 0.1}),
}


def make_trainer(case: Case, ring_size: int | None, layout: Any = "contiguous", **options: Any) -> Any:
    """A trainer on rings of this size; None is one process without a ring."""
    cases.reset_accelerate()
    is_reward = case.trainer is RewardTrainer
    task = "ForSequenceClassification" if is_reward else "ForCausalLM"
    sizes = {"vocab_size": WORDS + 5, **cases.OWN_SIZES[case.kind], "num_labels": 1 if is_reward else 2}
    model, reference = (build(case.kind, task, "eager", seed, **sizes).float() for seed in (0, 1))
    off = dict.fromkeys(("bf16", "gradient_checkpointing"), False)
    settings = {**cases.settings(num_rings(ring_size)), **off, "max_length": 64}
    if case.lora:
        import peft

        options["peft_config"] = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    elif case.trainer in (DPOTrainer, KTOTrainer):
        options["ref_model"] = reference
    trainer = case.trainer(
        model=model,
        args=CONFIGS[case.trainer](**{**settings, **case.config}),
        train_dataset=Dataset.from_list([case.data(index) for index in range(48)]),
        eval_dataset=Dataset.from_list([case.data(index) for index in range(8)]),
        processing_class=make_tokenizer(),
        **options,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    if ring_size is not None:
        attach(trainer, ring_size=ring_size, layout=layout)
    return trainer


def run(name: str, ring_size: int | None, layout: Any = "contiguous") -> dict[str, Any]:
    """Train and evaluate."""
    case = CASES[name]
    trainer = make_trainer(case, ring_size, layout)
    trainer.train()
    results = cases.measures_of(trainer, "loss", "grad_norm", *METRICS[case.trainer])
    evaluated = trainer.evaluate()
    measures = ("eval_loss", f"eval_{METRICS[case.trainer][0]}")
    results |= {name: torch.tensor(evaluated[name]) for name in measures if name in evaluated}
    return results | cases.parameters_of(trainer.accelerator, trainer.model)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks(two: World, name: str) -> None:
    assert_equal(two.run(run, name, 2, LAYOUTS[len(name) % 2]), run(name, None))


def test_three_ranks(three: World) -> None:
    assert_equal(three.run(run, "packing", 3, "zigzag"), run("packing", None))


def test_two_by_two(four: World) -> None:
    """Two rings. Every text has labels of equal number in both, so that TRL's mean over processes is that of one."""
    expected = run("text", None)
    found = four.run(run, "text", 2, "zigzag")
    for results in (expected, *found):
        for name in ("eval_loss", "eval_mean_token_accuracy"):  # TRL takes the mean over processes
            results.pop(name)
    assert_equal(found, expected)


def with_a_loss_function(ring_size: int | None) -> dict[str, Any]:
    trainer = make_trainer(Case(), ring_size, compute_loss_func=cases.loss_of_next_tokens)
    trainer.train()
    return cases.measures_of(trainer, "loss")


def test_a_loss_function(two: World) -> None:
    assert_equal(two.run(with_a_loss_function, 2), with_a_loss_function(None))


def test_what_is_refused() -> None:
    smoothed = make_trainer(Case(config={"label_smoothing_factor": 0.1}), None)
    with pytest.raises(ValueError, match=r"label_smoothing_factor with a trainer of TRL: not supported by a ring"):
        attach(smoothed)

    class Own(SFTTrainer):  # type: ignore[misc]
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs)

    own = make_trainer(Case(), None)
    own.__class__ = Own
    with pytest.raises(ValueError, match=r"(?s)Own\.compute_loss: .*Trainer\(…, compute_loss_func=loss\)"):
        attach(own)
