"""Small models for the suites: with and without transformer blocks, and attention for a single process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ring_backends.testing.reference import reference_attention
from ring_backends.testing.strategies import AttentionCase
from ring_backends.training import chunked_cross_entropy

VOCABULARY = 11
MAX_LEN = 32
_WIDTH, _HEADS = 12, 6

MakeAttention = Callable[[], nn.Module]


def randomize(parameters: Iterable[tuple[str, nn.Parameter]], seed: int, scale: float = 1.0) -> None:
    """Give the parameters random values, in their order."""
    generator = torch.Generator().manual_seed(seed)
    for _, parameter in parameters:
        parameter.data = torch.randn(parameter.shape, generator=generator) * scale


class DenseAttention(nn.Module):
    """The dense reference, with the call signature of an adapter's attention, on a whole sequence."""

    def __init__(self, case: AttentionCase) -> None:
        super().__init__()
        self.options = case.options()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, seq_len: int) -> Tensor:
        assert query.shape[1] == seq_len
        options = {**self.options, "is_causal": is_causal}
        return reference_attention(query, key, value, **options)[0].to(query.dtype)


class Block(nn.Module):
    """A residual block: projections and attention."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.projections = nn.Linear(_WIDTH, 3 * _WIDTH, bias=False)
        self.attention = attention
        self.output = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: Tensor, seq_len: int) -> Tensor:
        query, key, value = self.projections(self.norm(x)).unflatten(-1, (3, _HEADS, -1)).unbind(-3)
        attended = self.attention(query, key, value, is_causal=True, seq_len=seq_len)
        added: Tensor = self.output(attended.flatten(-2))
        return x + added


class LanguageModel(nn.Module):
    """A language model. Its input is tokens [batch, local seq] and their global positions, its output logits."""

    def __init__(self, make_attention: MakeAttention, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, _WIDTH)
        self.places = nn.Embedding(MAX_LEN, _WIDTH)
        self.blocks = nn.ModuleList(Block(make_attention()) for _ in range(2))
        self.head = nn.Linear(_WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, positions: Tensor, seq_len: int) -> Any:
        x = self.embedding(tokens) + self.places(positions)
        for block in self.blocks:
            x = block(x, seq_len)
        return self.head(x)


class OddModel(nn.Module):
    """A language model without blocks. It has root parameters, a buffer, and names that wrappers also use."""

    def __init__(self, make_attention: MakeAttention) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(VOCABULARY, _WIDTH))
        self.module = nn.Linear(_WIDTH, 3 * _WIDTH, bias=False)
        self.add_module("the head", nn.Linear(_WIDTH, VOCABULARY))
        self._forward_module = nn.ModuleDict({"module": nn.Embedding(MAX_LEN, _WIDTH)})
        self.attention = make_attention()
        self.register_buffer("module_scale", torch.tensor([0.5, 2.0, 1.0]).repeat_interleave(_WIDTH // 3))

    def forward(self, tokens: Tensor, positions: Tensor, seq_len: int) -> Any:
        x = nn.functional.embedding(tokens, self.weight) + self._forward_module["module"](positions)
        query, key, value = self.module(x).unflatten(-1, (3, _HEADS, -1)).unbind(-3)
        attended = self.attention(query, key, value, is_causal=True, seq_len=seq_len)
        return self.get_submodule("the head")(attended.flatten(-2) * self.module_scale)


class Experts(nn.Module):
    """A residual block of width 4 that applies one of its experts, or none. It has one unused parameter."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 4)) for width in widths
        )
        self.unused = nn.Parameter(torch.empty(3))

    def forward(self, x: Tensor, expert: int | None) -> Tensor:
        normal: Tensor = self.norm(x)
        return x + normal if expert is None else x + self.experts[expert](normal)


class BlocksOfExperts(nn.Module):
    """Two blocks of experts and a linear layer from width 4 to 1. Both blocks use the expert with the same index."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Experts(widths) for _ in range(2))
        self.out = nn.Linear(4, 1)
        randomize(self.named_parameters(), 5, 0.5)

    def forward(self, x: Tensor, expert: int | None) -> Any:
        for block in self.blocks:
            x = block(x, expert)
        return self.out(x)


class TwoLayers(nn.Module):
    """Two parallel layers of width 4. ``first`` chooses the order of their calls, ``layers`` which are called."""

    def __init__(self, places: Sequence[int] = (0, 1), tied: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for place in places:  # the order of registration
            self.layers.add_module(str(place), nn.Linear(4, 4))
        if tied:
            first, second = self.layers.children()
            second.weight = first.weight
        randomize(sorted(self.named_parameters()), 3, 0.5)

    def forward(self, x: Tensor, first: int, layers: Sequence[int] = (0, 1)) -> Tensor:
        order = reversed(layers) if first else layers
        outs = {index: self.layers.get_submodule(str(index))(x) for index in order}
        return torch.stack([torch.sin((index + 1) * outs[index]) for index in layers]).sum(0)


class WithExtraState(TwoLayers):
    """A model with a value in its state_dict that is no tensor."""

    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


class Normalized(nn.Module):
    """A model with running statistics and with a buffer that is not in its state_dict."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.out = nn.Linear(4, 1)
        self.register_buffer("own", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Any:
        return self.out(self.norm(x))


class PlacedBlock(nn.Module):
    """A residual block of width 4 that looks up rows of a table by floating-point coordinates."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.table, self.out = nn.LayerNorm(4), nn.Embedding(5000, 4), nn.Linear(4, 4)
        self.places: list[int] = []

    def forward(self, x: Tensor, coords: Tensor) -> Tensor:
        places = torch.floor(coords).long()
        self.places = places.tolist()
        added: Tensor = self.out(self.norm(x) + self.table(places))
        return x + added


class PlacedModel(nn.Module):
    """Two blocks whose input is projected features, or zeros, added to an fp32 buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(3, 4)
        self.blocks = nn.ModuleList(PlacedBlock() for _ in range(2))
        self.norm = nn.LayerNorm(4)
        self.register_buffer("waves", torch.linspace(0, 1, 4).sin())
        randomize(self.named_parameters(), 7)

    def forward(self, coords: Tensor, features: Tensor | None) -> Any:
        """Map coordinates [n] and features [n, 3] to rows [n, 4]."""
        if features is None:
            features = self.projection.weight.new_zeros(len(coords), 3)
        x = self.projection(features) + self.waves
        for block in self.blocks:
            x = block(x, coords=coords)
        return self.norm(x)


class OneParameter(nn.Module):
    """A model with one parameter, whose gradient is the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


class ChunkedLoss(nn.Module):
    """Returns the cross entropy of a head. The labels are 0."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 32)
        randomize(self.named_parameters(), 0)

    def forward(self, rows: Tensor, chunk_rows: int) -> Any:
        return chunked_cross_entropy(rows, self.head, rows.new_zeros(rows.shape[:2]).long(), chunk_rows=chunk_rows)


def unit_sgd(parameters: Any) -> torch.optim.Optimizer:
    """An optimizer whose step is the gradient."""
    return torch.optim.SGD(parameters, lr=1.0)


def weight_of(state: Any) -> float:
    """The parameter of :class:`OneParameter` in a training state. It is 0 before the first step."""
    return float(state.full_state_dict()["weight"])


def make_model(kind: str, make_attention: MakeAttention, dtype: torch.dtype, seed: int) -> nn.Module:
    """Construct a model of this kind. Equal seeds give equal parameters, rounded to ``dtype``."""
    assert kind in ("blocks", "tied", "frozen", "odd"), kind
    tied = kind == "tied"
    model = OddModel(make_attention) if kind == "odd" else LanguageModel(make_attention, tied=tied)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        numbers = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data = (numbers / 2).to(dtype)
    if kind == "frozen":
        model.get_parameter("places.weight").requires_grad_(False)
    return model.to(dtype)
