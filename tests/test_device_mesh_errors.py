"""What RingDilated and context_parallel do not support is an error by name, on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from types import MethodType
from typing import Any

import pytest
import torch
from device_mesh_cases import InnerAttention, N, make_model, mesh_of, put
from native_ranks import world_of
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from ring_backends import RingDilatedAttention
from ring_backends.adapters import native
from ring_backends.integrations.device_mesh import RingDilated, context_parallel, ring_of
from ring_backends.multihead import RingDilatedMultiheadAttention
from ring_backends.testing.failing_calls import Ended, ending
from ring_backends.testing.world import World

FULL = ([N], [1])


two = world_of(2)


def check(of_ranks: list[list[Ended]], messages: Iterable[str]) -> None:
    """Every rank raised errors with these messages. An empty message stands for no error."""
    for of_rank in of_ranks:
        for ended, message in zip(of_rank, messages, strict=True):
            assert message in ended.message, (message, ended)
            assert (ended.error == "no error") == (message == ""), (message, ended)


class NoCausal(nn.Module):
    def forward(self, xq: Tensor, xk: Tensor, xv: Tensor, window: int = 0) -> Tensor:
        raise NotImplementedError


class WithDropout(InnerAttention):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.1)


class WithSink(InnerAttention):
    def __init__(self) -> None:
        super().__init__()
        self.sink = nn.Parameter(torch.zeros(4))


def dilated() -> Any:
    return native.RingDilatedAttention([4], [1])


def with_own_forward() -> nn.Module:
    module = InnerAttention()
    module.forward = MethodType(InnerAttention.forward, module)  # type: ignore[method-assign]
    return module


MODULES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "linear": (lambda: nn.Linear(2, 2), "module = Linear: not an attention that RingDilated can put on a ring"),
    "model": (lambda: make_model("decoder"), "module = Decoder: not an attention"),
    "sink": (WithSink, "module = WithSink: has the parameters or buffers sink"),
    "dropout": (WithDropout, r"module = WithDropout: has an nn.Dropout with p = 0.1"),
    "causal": (NoCausal, "is_causal is not given, and the forward of NoCausal has no such argument"),
    "replaced": (with_own_forward, "module = InnerAttention: its forward was replaced on the instance"),
    "twice": (lambda: put(InnerAttention(), RingDilated(*FULL)), "module = InnerAttentionOnRing: is on a ring already"),
    "pattern": (dilated, "segment_lengths: NativeRingDilatedAttention has its own; leave this out of its style"),
    "bias_kv": (lambda: nn.MultiheadAttention(8, 2, add_bias_kv=True), "add_bias_kv and add_zero_attn"),
    "zero_attn": (lambda: nn.MultiheadAttention(8, 2, add_zero_attn=True), "add_bias_kv and add_zero_attn"),
}


class OtherAttention(RingDilatedAttention):
    def ring_pass(self, outgoing: Any, incoming: Any, tag: int) -> Any:
        raise NotImplementedError


OWN: dict[str, Callable[[], Any]] = {
    "is_causal, scale: NativeRingDilatedAttention has its own": lambda: put(
        dilated(), RingDilated(is_causal=True, scale=1.0)
    ),
    "module = NativeRingDilatedAttention: is on a ring already": lambda: put(
        put(dilated(), RingDilated()), RingDilated()
    ),
    "backend = 'native': its attention is NativeRingDilatedAttention, and RingDilatedMultiheadAttention computes": (
        lambda: put(RingDilatedMultiheadAttention(8, 2, OtherAttention([4], [1])), RingDilated())
    ),
    "segment_lengths is not given: InnerAttention has no pattern of its own": lambda: put(
        InnerAttention(), RingDilated()
    ),
}


def own_here() -> list[Ended]:
    return [ending(call) for call in OWN.values()]


def test_own_modules(two: World) -> None:
    check(two.run(own_here), OWN)


def module_here(name: str) -> Ended:
    module = MODULES[name][0]()
    return ending(lambda: put(module, RingDilated(*FULL)))


@pytest.mark.parametrize("name", MODULES)
def test_modules(two: World, name: str) -> None:
    for of_rank in two.run(module_here, name):
        assert of_rank.is_a(TypeError if "not an attention" in MODULES[name][1] else ValueError), of_rank
        assert MODULES[name][1] in of_rank.message, of_rank


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"segment_lengths": [4, 8]}, "segment_lengths"),
        ({"segment_lengths": None}, "segment_lengths = None and dilation_rates = .*: give both, or neither"),
        ({"layout": "striped"}, "'striped'"),
        ({"timeout": 3}, "timeout = 3: expected a datetime.timedelta"),
        ({"timeout": timedelta(0)}, "timeout = 0:00:00: must be above 0"),
        ({"backend": "mpi"}, "backend = 'mpi': no such adapter"),
        ({"seq_dim": 3}, "seq_dim = 3: expected 2 for"),
        ({"is_causal": 1}, "is_causal = 1: expected True, False, or None"),
        ({"scale": "x"}, "scale = 'x'"),
        ({"window": 3}, "window"),
        ({"ring": None}, "ring"),
    ],
)
def test_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        RingDilated(**{"segment_lengths": [4], "dilation_rates": [1], **options})


def meshes_here() -> list[Ended]:
    put(InnerAttention(), RingDilated(*FULL))
    return [ending(lambda call=call: call(mesh_of((1, 2)))) for call, _ in MESHES]


def parallelize(mesh: DeviceMesh, **options: Any) -> None:
    parallelize_module(InnerAttention(), mesh, RingDilated(*FULL, **options))


MESHES: list[tuple[Callable[[Any], Any], str]] = [
    (
        lambda mesh: parallelize(mesh["ring"], layout="zigzag"),
        "layout = 'zigzag': the ring of this mesh axis has layout = 'contiguous', from the first style",
    ),
    (
        lambda mesh: parallelize(mesh["ring"], timeout=timedelta(seconds=9)),
        "timeout = datetime.timedelta(seconds=9): the ring of this mesh axis has timeout = ",
    ),
    (lambda mesh: parallelize(mesh), "mesh has 2 axes, ('data', 'ring'): expected one"),
    (lambda mesh: ring_of(mesh), "mesh has 2 axes"),
    (lambda mesh: ring_of("ring"), "mesh = str: expected one axis of a DeviceMesh"),  # type: ignore[arg-type]
    (lambda mesh: ring_of(mesh["data"]), "mesh: no RingDilated has been applied on its axis data"),
    (
        lambda mesh: context_parallel(mesh["data"], buffers=[torch.ones(N)], buffer_seq_dims=[0]).__enter__(),
        "mesh: no RingDilated has been applied on its axis data",
    ),
    (
        lambda mesh: put(nn.MultiheadAttention(8, 2), RingDilated(*FULL, dropout_p=0.1)),
        "dropout_p is given: MultiheadAttention has dropout = 0.0",
    ),
    (lambda mesh: parallelize(mesh["ring"]), ""),
]


def test_meshes(two: World) -> None:
    check(two.run(meshes_here), [message for _, message in MESHES])


def row(heads: int = 4, n: int = N) -> Tensor:
    return torch.ones(2, heads, n, 8)


def rows() -> list[Tensor]:
    """Query, key and value."""
    return [row(), row(), row()]


ATTN_MASK = torch.ones(N, N, dtype=torch.bool)
CALLS: dict[str, Callable[[Any], Any]] = {
    "attn_mask is given: masks of pairs are not supported by a ring": lambda a: a(*rows(), attn_mask=ATTN_MASK),
    "enable_gqa = False with 4 query heads and 2 key heads": lambda a: a(row(), row(2), row(2)),
    f"key has {N - 1} rows and query {N}: cross-attention": lambda a: a(row(), row(n=N - 1), row(n=N - 1)),
    "query has shape [4, 45, 8]: expected [batch, heads, local seq, head_dim], by RingDilated(seq_dim=2)": (
        lambda a: a(row()[0], row()[0], row()[0])
    ),
    "key = NoneType: expected a plain torch.Tensor": lambda a: a(row(), None, row()),
    "value = NoneType: expected a plain torch.Tensor": lambda a: a(row(), row()),
    "q is given twice": lambda a: a(*rows(), q=row()),
    "4 arguments are given by position": lambda a: a(*rows(), None),
    "set RingDilated(scale=1.0)": lambda a: a(*rows(), scale=1.0),
    "is_causal = None: expected True": lambda a: a(*rows(), is_causal=None),
    "window is given: a ring does not have": lambda a: a(*rows(), window=3),
    "but with seq_len = 44 rank": lambda a: in_context(a, row()),
}

x = torch.ones(3, 2, 8)
MULTIHEAD_CALLS: dict[str, Callable[[Any], Any]] = {
    "need_weights is given: a ring has no matrix of weights": lambda a: a(x, x, x),
    "attn_mask is given: masks of pairs": lambda a: a(x, x, x, need_weights=False, attn_mask=torch.ones(3, 3)),
    "query has shape [2, 8]: expected [local seq, batch, features]": (
        lambda a: a(x[0], x[0], x[0], need_weights=False)
    ),
    "query has shape [3, 2, 7]: expected [local seq, batch, features] with 8 features": (
        lambda a: a(x[..., :7], x, x, need_weights=False)
    ),
    "key has 2 rows and query 3": lambda a: a(x, x[1:], x[1:], need_weights=False),
    "key_padding_mask is torch.float32 with values other than 0 and −inf": (
        lambda a: a(x, x, x, need_weights=False, key_padding_mask=torch.full((2, 3), 0.5))
    ),
}


def in_context(attention: nn.Module, tensor: Tensor) -> None:
    with context_parallel(mesh_of((1, 2))["ring"], buffers=[torch.ones(N - 1)], buffer_seq_dims=[0]):
        attention(tensor, tensor, tensor)


CALLS_OF = {"inner": CALLS, "multihead": MULTIHEAD_CALLS}


def calls_here(kind: str) -> list[Ended]:
    module = InnerAttention() if kind == "inner" else nn.MultiheadAttention(8, 2)
    attention = put(module, RingDilated(*FULL, timeout=timedelta(seconds=60)))
    return [ending(lambda call=call: call(attention)) for call in CALLS_OF[kind].values()]


@pytest.mark.parametrize("kind", CALLS_OF)
def test_calls(two: World, kind: str) -> None:
    check(two.run(calls_here, kind), CALLS_OF[kind])


def one_refuses_here() -> Ended:
    """Only rank 0 passes a mask."""
    attention = put(InnerAttention(), RingDilated(*FULL, timeout=timedelta(seconds=60)))
    mask = None if mesh_of((1, 2)).get_rank() else torch.ones(N, N)
    return ending(lambda: attention(*rows(), attn_mask=mask))


def test_an_error_on_one_rank_reaches_the_other(two: World) -> None:
    first, second = two.run(one_refuses_here)
    assert first.is_a(ValueError), first
    assert second.error == "RingMismatchError", second
    assert "attn_mask is given" in second.message


def entering(buffers: Any, dims: Any, **options: Any) -> Ended:
    return ending(lambda: context_parallel(ring_mesh(), buffers=buffers, buffer_seq_dims=dims, **options).__enter__())


def ring_mesh() -> DeviceMesh:
    return mesh_of((1, 2))["ring"]


def contexts_here() -> dict[str, Ended]:
    put(InnerAttention(), RingDilated(*FULL))
    ones, weight = torch.ones(2, N), torch.ones(N, requires_grad=True)

    def backward_outside() -> None:
        with context_parallel(ring_mesh(), buffers=[ones], buffer_seq_dims=[1]):
            out = (weight[: ones.shape[1]] * ones).sum()
        out.backward()

    def open_twice() -> None:
        context = context_parallel(ring_mesh(), buffers=[ones], buffer_seq_dims=[1])
        with context, context_parallel(ring_mesh(), buffers=[torch.ones(3)], buffer_seq_dims=[0]):
            pass

    def broadcast_by_ddp() -> None:
        plain = make_model("decoder")
        plain.freqs = plain.freqs[: N - 1].clone()  # of a length that the ring size divides
        parallelize_module(plain, ring_mesh(), {"layers.*.inner_attention": RingDilated(*FULL)})
        model = nn.parallel.DistributedDataParallel(plain)
        tokens = torch.zeros(1, N - 1, dtype=torch.long)
        with context_parallel(ring_mesh(), buffers=[tokens, plain.freqs], buffer_seq_dims=[1, 0]):
            model(tokens, tokens)

    return {
        "buffers has 1 tensors and buffer_seq_dims 0 numbers": entering([ones], None),
        "buffers = Tensor: expected a list": entering(ones, [0]),
        "buffer_seq_dims = int: expected a list": entering([ones], 0),
        "buffers[0] = str: expected a plain torch.Tensor": entering(["tokens"], [0]),
        "buffer_seq_dims[0] = 2: expected a dimension of buffers[0], which is [2, 45]": entering([ones], [2]),
        "buffer_seq_dims[0] = 'seq'": entering([ones], ["seq"]),
        "buffers[1] is in the list twice": entering([ones, ones], [0, 1]),
        "buffers have the lengths [2, 45] along buffer_seq_dims = [0, 1]": entering([ones, torch.ones(1, N)], [0, 1]),
        "buffers have the lengths [0]": entering([ones[:0]], [0]),
        "buffers[0] is a Parameter [2, 45]": entering([nn.Parameter(ones.clone())], [1]),
        "buffers[0] requires a gradient": entering([weight], [0]),
        "no_restore_buffers has a tensor that is not in buffers": entering([ones], [1], no_restore_buffers={weight}),
        "a context_parallel of this axis is open": ending(open_twice),
        "modified by an inplace operation": ending(backward_outside),
        "DistributedDataParallel has copied rank 0's rows of a buffer": ending(broadcast_by_ddp),
    }


def test_contexts(two: World) -> None:
    for of_rank in two.run(contexts_here):
        check([[*of_rank.values()]], of_rank)
