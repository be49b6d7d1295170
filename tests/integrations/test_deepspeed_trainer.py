"""Hugging Face's Trainer on rings, with its DeepSpeed integration, equals the Trainer on one process."""

from __future__ import annotations

import pytest
from small_models import SIZES, VOCABULARY
from trainer_cases import assert_equal, run

from ring_backends.testing.world import World


@pytest.mark.matrix(reason="trains two models")
@pytest.mark.parametrize("stage", [2, 3])
def test_zero(stage: int) -> None:
    expected = run("llama", None)
    with World(2) as ranks:
        found = ranks.run(run, "llama", 2, "zigzag", f"zero{stage}")
    for results in (expected, *found):
        results.pop("flops")  # transformers does not count partitioned parameters
    assert_equal(found, expected)


def probe_partitioned_models() -> bool:
    """Whether parameters are partitioned again after the probe, which accepts one model and refuses another."""
    import transformers
    from transformers.integrations import HfDeepSpeedConfig

    from ring_backends.adapters import deepspeed as backend
    from ring_backends.integrations.transformers import use_ring

    ring = backend.initialize()
    settings = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1})
    llama = transformers.LlamaForCausalLM._from_config(transformers.LlamaConfig(**SIZES))
    own_sizes = {"d_model": 32, "decoder_layers": 1, "decoder_attention_heads": 4, "decoder_ffn_dim": 32}
    bart = transformers.BartForCausalLM._from_config(transformers.BartConfig(vocab_size=VOCABULARY, **own_sizes))
    assert settings.is_zero3()
    assert all(parameter.numel() == 0 for model in (llama, bart) for parameter in model.parameters())
    attention = backend.RingDilatedAttention([None], [1], ring=ring)
    use_ring(llama, attention)
    with pytest.raises(ValueError, match=r"BartForCausalLM: model\.decoder\.embed_positions"):
        use_ring(bart, attention)
    return all(parameter.numel() == 0 for model in (llama, bart) for parameter in model.parameters())


@pytest.mark.matrix(reason="starts DeepSpeed on two ranks")
def test_the_probe_gathers_partitioned_parameters() -> None:
    with World(2) as ranks:
        assert ranks.run(probe_partitioned_models) == [True, True]
