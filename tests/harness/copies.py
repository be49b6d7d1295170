"""Copies of attention modules, which are distinguished from the original, and of models in mixed precision."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from ring_backends.errors import RingMismatchError
from ring_backends.testing.capabilities import AdapterSuite, core, requires
from ring_backends.testing.failing_calls import A_MOMENT, ODD_RANK, SHORT, ending, shorten
from ring_backends.testing.marks import matrix_but
from ring_backends.testing.strategies import AttentionCase
from ring_backends.testing.world import on_every_rank

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
    "pickled": _through_pickle,
    "layers": _layers_of_a_transformer,
}


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


def linear(weight: float) -> nn.Linear:
    """A layer of width 4 to 1 whose weights have this value, without a bias."""
    model = nn.Linear(4, 1)
    nn.init.constant_(model.weight, weight)
    nn.init.zeros_(model.bias)
    return model


@requires("training")
class ModelCopyTests(AdapterSuite):
    @on_every_rank
    def test_copies_of_a_wrapped_model_work_or_are_refused(self) -> None:
        state = self.parallelize(linear(0.0))
        ways: list[Callable[[nn.Module], Any]] = [copy.copy, *MODEL_COPIES.values()]
        for make in ways:
            ended = ending(make, state.model)
            if "copies of a wrapped model" not in self.without:
                assert ended.error == "no error", ended
            else:
                ended.check(TypeError, "state.model cannot be copied or pickled", "load state.full_state_dict()")
        state.backward(state.loss(state.model(torch.ones(1, 4)).sum(), 1))
        state.step()
        torch.testing.assert_close(state.full_state_dict()["weight"], -torch.ones(1, 4), rtol=0, atol=0)

    @requires("mixed precision", "copies of a wrapped model")
    @pytest.mark.parametrize("how", MODEL_COPIES)
    @on_every_rank
    def test_a_copy_in_mixed_precision_has_its_own_weights(self, how: str) -> None:
        model = linear(1.0)
        copied = MODEL_COPIES[how](self.parallelize(model, mixed_precision=torch.bfloat16).model)
        with torch.no_grad():
            nn.init.zeros_(model.weight)
            out = copied(torch.ones(1, 4))
        torch.testing.assert_close(out, torch.full((1, 1), 4.0, dtype=torch.bfloat16))
        names = sorted(name.rpartition(".")[2] for name, _ in copied.named_parameters())
        assert names == ["bias", "weight"], names


@core
class CopyTests(AdapterSuite):
    @pytest.mark.parametrize("how", matrix_but("layers", of=COPIES))
    @on_every_rank
    def test_copies_of_a_module_are_distinguished(self, how: str) -> None:
        """One rank calls original and copy in the other order."""
        original = self.new_call(case=CASE)
        calls = [original, replace(original, attention=COPIES[how](original.attention))]
        for call in calls:
            call.check()
        shorten(original.attention.ring)
        if original.attention.ring.rank == ODD_RANK:
            calls.reverse()
        ended = ending(lambda: [call() for call in calls])
        ended.check(RingMismatchError, "order of calls", within=SHORT + A_MOMENT)

    @on_every_rank
    def test_an_unpickled_ring_says_what_to_do(self) -> None:
        call = self.call(CASE)
        twin = pickle.loads(pickle.dumps(call.attention))
        call_of_twin = replace(call, attention=twin)
        ending(call_of_twin).check(RuntimeError, "initialize()")
        twin.ring = call.attention.ring
        call_of_twin.check()
