"""Copies of attention modules, which are distinguished from the original, and of models in mixed precision."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from ring_backends.errors import RingMismatchError
from ring_backends.testing.calls import difference, expected, local_call, new_attention
from ring_backends.testing.capabilities import AdapterSuite, core, requires
from ring_backends.testing.failing_calls import A_MOMENT, ODD_RANK, SHORT, Ended, ending
from ring_backends.testing.marks import matrix_but
from ring_backends.testing.models import unit_sgd
from ring_backends.testing.rings import FOUR, TWO, backend, new_ring, ring_here
from ring_backends.testing.strategies import AttentionCase
from ring_backends.testing.world import World

CASE = AttentionCase(16, (16,), (1,), num_heads=2, num_kv_heads=2, dtype=torch.float64)


def _through_pickle(attention: Any) -> Any:
    """Pickle and unpickle the module, then assign the ring."""
    made = pickle.loads(pickle.dumps(attention))
    made.ring = attention.ring
    return made


def _layers_of_a_transformer(attention: nn.Module) -> Any:
    """Copy the module like nn.TransformerEncoder, which clones its layer."""
    layer = nn.Sequential(attention)
    return nn.ModuleList(copy.deepcopy(layer) for _ in range(2))[1][0]  # type: ignore[index]


COPIES: dict[str, Callable[[Any], Any]] = {
    "deep": copy.deepcopy,
    "shallow": copy.copy,
    "of a copy": lambda attention: copy.deepcopy(copy.deepcopy(attention)),
    "pickled": _through_pickle,
    "layers": _layers_of_a_transformer,
}


def swap_calls(adapter: str, how: str) -> tuple[Tensor, Ended]:
    """One rank calls original and copy in the other order. Returns an earlier output of the copy, and the ending."""
    ring = new_ring(adapter, FOUR, SHORT)
    attention = new_attention(adapter, ring, CASE)
    attentions = [attention, COPIES[how](attention)]
    calls = [local_call(adapter, ring, CASE, gradients=False, attention=attention) for attention in attentions]
    outs = [call() for call in calls]
    if ring.rank == ODD_RANK:
        calls.reverse()
    return outs[1], ending(lambda: [call() for call in calls])


def copy_on_one_rank(adapter: str) -> Tensor:
    """One rank copies its module, as for a moving average. Then all ranks construct and call another module."""
    ring = new_ring(adapter, FOUR)
    attention = new_attention(adapter, ring, CASE)
    if ring.rank == ODD_RANK:
        copy.deepcopy(attention)
    out: Tensor = local_call(adapter, ring, CASE, gradients=False)()
    return out


def _saved_and_loaded(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


MODEL_COPIES: dict[str, Callable[[nn.Module], Any]] = {
    "deep": copy.deepcopy,
    "averaged": lambda model: AveragedModel(model).module,
    "saved": _saved_and_loaded,
    "pickled": lambda model: pickle.loads(pickle.dumps(model)),
}


def _wrapped(adapter: str, model: nn.Linear, weight: float, **options: Any) -> Any:
    """The training state of a linear layer whose weights have this value, without a bias."""
    nn.init.constant_(model.weight, weight)
    nn.init.zeros_(model.bias)
    ring = ring_here(adapter, TWO)
    return backend(adapter).parallelize(model, unit_sgd, ring, **options)


def copy_a_model(adapter: str, how: str, options: Mapping[str, Any]) -> tuple[float, torch.dtype, list[str]]:
    """Copy a wrapped model, then zero the original. Returns the output of the copy, its dtype, and parameter names."""
    model = nn.Linear(4, 1)
    state = _wrapped(adapter, model, 1.0, mixed_precision=torch.bfloat16, **options)
    copied = MODEL_COPIES[how](state.model)
    with torch.no_grad():
        nn.init.zeros_(model.weight)
        out = copied(torch.ones(1, 4))
    return float(out), out.dtype, sorted(name.rpartition(".")[2] for name, _ in copied.named_parameters())


def copy_in_every_way(adapter: str, options: Mapping[str, Any]) -> tuple[list[Ended], float]:
    """Copy a wrapped model in every way, then take a step. Returns the endings, and the change of a weight."""
    state = _wrapped(adapter, nn.Linear(4, 1), 0.0, **options)
    ways: list[Callable[[nn.Module], Any]] = [copy.copy, *MODEL_COPIES.values()]
    endings = [ending(partial(make, state.model)) for make in ways]
    state.backward(state.loss(state.model(torch.ones(1, 4)).sum(), 1))
    state.step()
    return endings, float(state.full_state_dict()["weight"][0, 0])


@requires("training")
class ModelCopyTests(AdapterSuite):
    def test_copies_of_a_wrapped_model_work_or_are_refused(self, world: World) -> None:
        for endings, moved in world.run(copy_in_every_way, self.adapter, self.framework_options):
            for ended in endings:
                if "copies of a wrapped model" not in self.without:
                    assert ended.error == "no error", ended
                    continue
                ended.check(TypeError, "state.model cannot be copied or pickled", "load state.full_state_dict()")
            assert moved == -1

    @requires("mixed precision", "copies of a wrapped model")
    @pytest.mark.parametrize("how", MODEL_COPIES)
    def test_a_copy_in_mixed_precision_has_its_own_weights(self, world: World, how: str) -> None:
        for value, dtype, names in world.run(copy_a_model, self.adapter, how, self.framework_options):
            assert value == 4.0
            assert dtype == torch.bfloat16
            assert names == ["bias", "weight"]


@core
class CopyTests(AdapterSuite):
    @pytest.mark.parametrize("how", matrix_but("layers", of=COPIES))
    def test_copies_of_a_module_are_distinguished(self, world: World, how: str) -> None:
        outs, endings = zip(*world.run(swap_calls, self.adapter, how), strict=True)
        assert difference(torch.cat(outs, 1), expected(CASE, gradients=False).out) <= 1e-10
        for ended in endings:
            ended.check(RingMismatchError, "order of calls", within=SHORT + A_MOMENT)

    def test_a_copy_on_one_rank_does_not_affect_the_others(self, world: World) -> None:
        outs = world.run(copy_on_one_rank, self.adapter)
        assert difference(torch.cat(outs, 1), expected(CASE, gradients=False).out) <= 1e-10
