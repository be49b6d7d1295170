"""Hugging Face's Trainer on rings, with its DeepSpeed integration, equals the Trainer on one process."""

from __future__ import annotations

import pytest
import torch
from tiny_models import tiny_fields
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
    names = ["LlamaForCausalLM", "FNetForMaskedLM", "BertForMaskedLM", "JambaForCausalLM"]
    classes = [getattr(transformers, name) for name in names]
    models = [model._from_config(model.config_class(**tiny_fields(model.config_class))) for model in classes]
    assert settings.is_zero3()
    parameters = [parameter for model in models for parameter in model.parameters()]
    assert all(parameter.numel() == 0 for parameter in parameters)
    llama, fnet, *others = models
    ones = torch.ones(99)  # too few for the numbers with which the probe tries models that number rows
    llama.model.norm.register_forward_hook(lambda module, args, x: x * ones[torch.arange(x.shape[1])][:, None])
    use_ring(llama, backend.RingDilatedAttention([None], [1], ring=ring))
    with pytest.raises(ValueError, match=r"FNetForMaskedLM: .*FNetBasicFourierTransform"):
        use_ring(fnet, ring)
    for model in others:  # modules that share a bias, and that read the weights of modules within them
        use_ring(model, ring)
    return all(parameter.numel() == 0 for parameter in parameters)


@pytest.mark.matrix(reason="starts DeepSpeed on two ranks")
def test_the_probe_gathers_partitioned_parameters() -> None:
    with World(2) as ranks:
        assert ranks.run(probe_partitioned_models) == [True, True]
