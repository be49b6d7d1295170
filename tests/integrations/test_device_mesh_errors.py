"""What RingDilated and context_parallel do not support is an error by name, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
from device_mesh_cases import InnerAttention, N, make_model, mesh_of, put
from native_ranks import world_of
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from ring_backends import RingDilatedAttention, RingMismatchError
from ring_backends.adapters import native
from ring_backends.integrations.device_mesh import RingDilated, context_parallel, ring_of
from ring_backends.multihead import RingDilatedMultiheadAttention
from ring_backends.testing.failing_calls import Ended, ending
from ring_backends.testing.marks import THOROUGH
from ring_backends.testing.world import on_every_rank

FULL = ([N], [1])


world = world_of(2)


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
ZIGZAG = "layout = 'zigzag': the ring of this mesh axis has layout = 'contiguous', from the first style"


class OtherAttention(RingDilatedAttention):
    def ring_pass(self, outgoing: Any, incoming: Any, tag: int) -> Any:
        raise NotImplementedError


def own_modules_here() -> dict[str, Ended]:
    plain, scaled = RingDilated(), RingDilated(is_causal=True, scale=1.0)
    return {
        "is_causal, scale: NativeRingDilatedAttention has its own": ending(put, dilated(), scaled),
        "module = NativeRingDilatedAttention: is on a ring already": ending(put, put(dilated(), plain), plain),
        "backend = 'native': its attention is NativeRingDilatedAttention, and RingDilatedMultiheadAttention computes": (
            ending(put, RingDilatedMultiheadAttention(8, 2, OtherAttention([4], [1])), plain)
        ),
        "segment_lengths is not given: InnerAttention has no pattern of its own": ending(put, InnerAttention(), plain),
    }


@pytest.mark.parametrize("name", MODULES)
@on_every_rank
def test_modules(name: str) -> None:
    make, message = MODULES[name]
    refused = ending(put, make(), RingDilated(*FULL))
    refused.check(TypeError if "not an attention" in message else ValueError, message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"segment_lengths": [4, 8]}, "segment_lengths"),
        ({"segment_lengths": None}, "segment_lengths = None and dilation_rates = .*: give both, or neither"),
        ({"layout": "striped"}, "'striped'"),
        ({"timeout": "3"}, "timeout = '3': expected a number of seconds or a datetime.timedelta"),
        ({"timeout": timedelta(0)}, "timeout = 0:00:00: must be above 0"),
        ({"buffer_bytes": -1}, "buffer_bytes = -1"),
        ({"ulysses_size": 0}, "ulysses_size = 0"),
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


def parallelized(mesh: DeviceMesh, **options: Any) -> Ended:
    return ending(parallelize_module, InnerAttention(), mesh, RingDilated(*FULL, **options))


def meshes_here() -> dict[str, Ended]:
    put(InnerAttention(), RingDilated(*FULL))
    mesh, nine, multihead = mesh_of((1, 2)), timedelta(seconds=9), nn.MultiheadAttention(8, 2)
    ring, dropout = mesh["ring"], RingDilated(*FULL, dropout_p=0.1)
    return {
        ZIGZAG: parallelized(ring, layout="zigzag"),
        f"timeout = {nine!r}: the ring of this mesh axis has timeout = ": parallelized(ring, timeout=nine),
        "buffer_bytes = 9: the ring of this mesh axis has buffer_bytes = None": parallelized(ring, buffer_bytes=9),
        "ulysses_size = 2: the ring of this mesh axis has ulysses_size = 1": parallelized(ring, ulysses_size=2),
        "mesh has 2 axes, ('data', 'ring'): expected one": parallelized(mesh),
        "mesh has 2 axes": ending(ring_of, mesh),
        "mesh = str: expected one axis of a DeviceMesh": ending(ring_of, "ring"),
        "mesh: no RingDilated has been applied on its axis data": ending(ring_of, mesh["data"]),
        "dropout_p is given: MultiheadAttention has dropout = 0.0": ending(put, multihead, dropout),
        "": parallelized(ring),
    }


def row(heads: int = 4, n: int = N) -> Tensor:
    return torch.ones(2, heads, n, 8)


def calls_here() -> dict[str, Ended]:
    call = partial(ending, put(InnerAttention(), RingDilated(*FULL, timeout=timedelta(seconds=60))))
    rows, one, short = (row(), row(), row()), row()[0], row(n=N - 1)
    mask = torch.ones(N, N, dtype=torch.bool)
    return {
        "attn_mask is given: masks of pairs are not supported by a ring": call(*rows, attn_mask=mask),
        "enable_gqa = False with 4 query heads and 2 key heads": call(row(), row(2), row(2)),
        f"key has {N - 1} rows and query {N}: cross-attention": call(row(), short, short),
        "query has shape [4, 45, 8]: expected [batch, heads, local seq, head_dim], by RingDilated(seq_dim=2)": (
            call(one, one, one)
        ),
        "key = NoneType: expected a plain torch.Tensor": call(row(), None, row()),
        "value = NoneType: expected a plain torch.Tensor": call(row(), row()),
        "q is given twice": call(*rows, q=row()),
        "4 arguments are given by position": call(*rows, None),
        "set RingDilated(scale=1.0)": call(*rows, scale=1.0),
        "is_causal = None: expected True": call(*rows, is_causal=None),
        "window is given: a ring does not have": call(*rows, window=3),
        "but with seq_len = 44 rank": call_in_context(call, *rows),
    }


def call_in_context(call: Callable[..., Ended], *rows: Tensor) -> Ended:
    with context_parallel(ring_mesh(), buffers=[torch.ones(N - 1)], buffer_seq_dims=[0]):
        return call(*rows)


def multihead_calls_here() -> dict[str, Ended]:
    call = partial(ending, put(nn.MultiheadAttention(8, 2), RingDilated(*FULL, timeout=timedelta(seconds=60))))
    without = partial(call, need_weights=False)
    x = torch.ones(3, 2, 8)
    return {
        "need_weights is given: a ring has no matrix of weights": call(x, x, x),
        "attn_mask is given: masks of pairs": without(x, x, x, attn_mask=torch.ones(3, 3)),
        "query has shape [2, 8]: expected [local seq, batch, features]": without(x[0], x[0], x[0]),
        "query has shape [3, 2, 7]: expected [local seq, batch, features] with 8 features": without(x[..., :7], x, x),
        "key has 2 rows and query 3": without(x, x[1:], x[1:]),
        "key_padding_mask is torch.float32 with values other than 0 and −inf": (
            without(x, x, x, key_padding_mask=torch.full((2, 3), 0.5))
        ),
    }


@on_every_rank
def test_an_error_on_one_rank_reaches_the_other() -> None:
    """Only rank 0 passes a mask."""
    attention = put(InnerAttention(), RingDilated(*FULL, timeout=timedelta(seconds=60)))
    rank = mesh_of((1, 2)).get_rank()
    refused = pytest.raises(RingMismatchError if rank else ValueError, match="attn_mask is given")
    with context_parallel(ring_mesh(), seq_len=N), refused:
        attention(*[row(n=N // 2 + 1 - rank)] * 3, attn_mask=None if rank else torch.ones(N, N))


def entering(buffers: Any, dims: Any, axis: str = "ring", **options: Any) -> Ended:
    context = partial(context_parallel, mesh_of((1, 2))[axis], buffers=buffers, buffer_seq_dims=dims, **options)
    return ending(lambda: context().__enter__())


def ring_mesh() -> DeviceMesh:
    return mesh_of((1, 2))["ring"]


OUTSIDE = "seq_len is not given, and no context_parallel is open"


def calls_outside_here() -> dict[str, Ended]:
    """An evaluation on whole tensors, for example. A step of decoding needs no length."""
    x = torch.ones(2, N, 8)
    inner, multihead = put(InnerAttention(), RingDilated(*FULL)), nn.MultiheadAttention(8, 2, batch_first=True)
    attention, own = put(dilated(), RingDilated()), RingDilatedMultiheadAttention(8, 2, dilated())
    own = put(own, RingDilated())
    heads = x.unflatten(2, (2, 4))
    return {
        OUTSIDE: ending(inner, row(), row(), row()),
        f"{OUTSIDE}, so the rows may": ending(put(multihead, RingDilated(*FULL)), x, x, x, need_weights=False),
        f"{OUTSIDE}, so the rows may be": ending(attention, heads, heads, heads),
        f"{OUTSIDE}, so the rows may be the whole": ending(own, x),
        "": ending(own, x[:, :1], cache=own.attention.new_cache(), is_causal=True),
    }


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
        "mesh: no RingDilated has been applied on its axis data": entering([torch.ones(N)], [0], axis="data"),
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
        "seq_len = 44: the buffers have the length 45": entering([ones], [1], seq_len=N - 1),
        "seq_len = 0": entering(None, None, seq_len=0),
        "modified by an inplace operation": ending(backward_outside),
        "DistributedDataParallel has copied rank 0's rows of a buffer": ending(broadcast_by_ddp),
    }


@THOROUGH
@pytest.mark.parametrize(
    "calls_by_message",
    [own_modules_here, meshes_here, calls_here, calls_outside_here, multihead_calls_here, contexts_here],
)
@on_every_rank
def test_every_rank_raises(calls_by_message: Callable[[], dict[str, Ended]]) -> None:
    """An empty message stands for no error."""
    for message, ended in calls_by_message().items():
        assert message in ended.message, (message, ended)
        assert (ended.error == "no error") == (message == ""), (message, ended)
