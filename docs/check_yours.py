"""Checks the dilated attention and the context parallelism that are installed here, against their definitions in fp64.

Run it as ``python check_yours.py``. It needs torch only, and checks those of these packages that are installed:
torchscale with ``torchscale.component.dilated_attention``, dilated-attention-pytorch, and torch's ``context_parallel``.
docs/check-yours.md shows what it prints, and explains each line.

The code of these packages runs as it is, except for the kernels, which need a GPU. ``exact_kernel`` replaces them.
"""

from __future__ import annotations

import math
import os
import socket
import sys
import threading
import types
from collections.abc import Callable, Sequence
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from unittest import mock

import torch
import torch.multiprocessing
from torch import Tensor

HEADS, HEAD_DIM = 4, 8
TOLERANCE = 1e-9


def exact_kernel(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Attention and LSE of [batch, seq, heads, head_dim]; with ``is_causal``, the last query sees all keys."""
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) / math.sqrt(query.shape[3])
    if is_causal:
        hidden = torch.ones(scores.shape[2:], dtype=torch.bool).triu(1 + key.shape[1] - query.shape[1])
        scores = scores.masked_fill(hidden, -math.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(3), value), scores.logsumexp(3)


def definition(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    branches: Sequence[tuple[int, int]],
    offset: Callable[[int, int], int],
    is_causal: bool,
    is_pad: Tensor | None = None,
) -> Tensor:
    """Dilated attention: one softmax per head over the keys of all branches (LongNet, arXiv 2307.02486).

    Args:
        query, key, value: [batch, seq, heads, head_dim].
        branches: (segment length, dilation rate) of each branch.
        offset: (head, rate) -> the first position of a segment that the head covers.
        is_pad: bool [batch, seq]; True = no query may see this key.
    """
    position = torch.arange(query.shape[1])
    counts = torch.zeros(HEADS, len(position), len(position), dtype=query.dtype)
    for length, rate in branches:
        same_segment = position[:, None] // length == position // length
        for head in range(HEADS):
            covered = position % length % rate == offset(head, rate)
            counts[head] += same_segment & covered[:, None] & covered
    if is_causal:
        counts = counts.tril()
    counts = counts[None] if is_pad is None else counts[None].masked_fill(is_pad[:, None, None, :], 0)
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) / math.sqrt(query.shape[3])
    has_keys = (counts > 0).any(3, keepdim=True)  # a query without keys has output 0
    weights = (scores + counts.log()).masked_fill(~has_keys, 0).softmax(3) * has_keys
    return torch.einsum("bhqk,bkhd->bqhd", weights, value)


def inputs(seq_len: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, seq_len, HEADS, HEAD_DIM, dtype=torch.float64, requires_grad=True) for _ in range(3)]


def largest_difference(got: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest difference, as a fraction of the largest expected number of the same tensor."""
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(got, expected, strict=True))


def report(name: str, got: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Print whether the tensors are equal up to rounding."""
    error = largest_difference(got, expected)
    print(f"  {'right' if error < TOLERANCE else 'WRONG'}  {name}: off by {100 * error:.2g} %", flush=True)


def compare(name: str, seq_len: int, theirs: Callable[..., Tensor], ours: Callable[..., Tensor], grads: bool) -> None:
    """Report outputs, or with ``grads`` gradients, of two functions of query, key and value."""
    results = []
    for function in (theirs, ours):
        tensors = inputs(seq_len)
        out = function(*tensors)
        grad = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
        results.append(torch.autograd.grad(out, tensors, grad) if grads else [out.detach()])
    report(name, *results)


# --- torchscale -----------------------------------------------------------------------------------------------------


def check_torchscale() -> None:
    from torchscale.component import dilated_attention, multihead_attention

    def offset(head: int, rate: int) -> int:
        return head // math.ceil(HEADS / rate)

    def kernel(q: Tensor, k: Tensor, v: Tensor, *options: object) -> tuple[Tensor, Tensor]:
        return exact_kernel(q, k, v, is_causal=bool(options[-1]))

    def module(branches: Sequence[tuple[int, int]], seq_parallel: bool = False) -> torch.nn.Module:
        lengths, rates = zip(*branches, strict=True)
        pattern = {"segment_length": lengths, "dilated_ratio": rates, "multiway": False, "xpos_rel_pos": False}
        options = {"flash_attention": True, "seq_parallel": seq_parallel, "layernorm_eps": 1e-5}
        args = types.SimpleNamespace(**pattern, **options)
        made = dilated_attention.DilatedAttention(args, HEADS * HEAD_DIM, HEADS, self_attention=True).double()
        for projection in (made.q_proj, made.k_proj, made.v_proj, made.out_proj):
            torch.nn.init.eye_(projection.weight)
            torch.nn.init.zeros_(projection.bias)
        return made

    def theirs(branches: Sequence[tuple[int, int]], is_causal: bool, is_pad: Tensor | None = None) -> Callable:
        def call(*tensors: Tensor) -> Tensor:
            out, _ = module(branches)(*(x.flatten(2) for x in tensors), is_causal=is_causal, key_padding_mask=is_pad)
            return out.unflatten(2, (HEADS, HEAD_DIM))

        return call

    def ours(branches: Sequence[tuple[int, int]], is_causal: bool, is_pad: Tensor | None = None) -> Callable:
        return lambda *tensors: definition(*tensors, branches, offset, is_causal, is_pad)

    def on_two_ranks(branches: Sequence[tuple[int, int]]) -> list[Tensor]:
        """Causal outputs of two ranks with half of the sequence each. Two threads stand for the ranks."""
        here, barrier, sent = threading.local(), threading.Barrier(2), {}

        def all_gather(x: Tensor) -> Tensor:
            barrier.wait(60)
            sent[here.rank] = x
            barrier.wait(60)
            return torch.cat([sent[0], sent[1]])

        halves = [[half.flatten(2) for half in x.detach().chunk(2, dim=1)] for x in inputs(32)]
        outputs = {}

        def rank_main(rank: int) -> None:
            here.rank = rank
            rows = [half[rank] for half in halves]
            outputs[rank] = module(branches, seq_parallel=True)(*rows, is_causal=True)[0].detach()

        with (
            mock.patch.object(dilated_attention, "all_gather_func", all_gather),
            mock.patch.object(dilated_attention, "get_data_parallel_rank", side_effect=lambda: here.rank),
            mock.patch.object(dilated_attention, "get_data_parallel_world_size", return_value=2),
        ):
            threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        return [torch.cat([outputs[0], outputs[1]], dim=1).unflatten(2, (HEADS, HEAD_DIM))]

    one, two, uneven = [(8, 2)], [(8, 1), (16, 2)], [(6, 4)]
    with mock.patch.object(multihead_attention, "flash_attn_func", kernel):
        compare("outputs", 32, theirs(two, False), ours(two, False), grads=False)
        compare("outputs, causal", 32, theirs(two, True), ours(two, True), grads=False)
        compare("gradients, one branch", 32, theirs(one, True), ours(one, True), grads=True)
        compare("gradients, two branches", 32, theirs(two, True), ours(two, True), grads=True)
        name = "outputs, causal, segment length not a multiple of the dilation rate"
        compare(name, 24, theirs(uneven, True), ours(uneven, True), grads=False)
        name = "outputs, not causal, last segment not full"
        compare(name, 29, theirs(one, False), ours(one, False), grads=False)
        is_pad = (torch.arange(32) >= 27).expand(2, -1)
        compare("outputs, key_padding_mask", 32, theirs(one, False, is_pad), ours(one, False, is_pad), grads=False)
        for name, branches in (("segments within a rank", one), ("a segment over two ranks", [(32, 2)])):
            expected = ours(branches, True)(*inputs(32)).detach()
            report(f"sequence parallel, causal, {name}", on_two_ranks(branches), [expected])


# --- dilated-attention-pytorch --------------------------------------------------------------------------------------


def check_dilated_attention_pytorch() -> None:
    def attention(query: Tensor, key: Tensor, value: Tensor, op: object, attn_bias: object) -> Tensor:
        return exact_kernel(query, key, value, attn_bias is not None)[0]

    ops = types.SimpleNamespace(LowerTriangularMask=object, AttentionOp=object, memory_efficient_attention=attention)
    xformers = types.SimpleNamespace(ops=ops)
    with mock.patch.dict(sys.modules, {"xformers": xformers, "xformers.ops": ops}):
        from dilated_attention_pytorch.dilated_attention import DilatedAttention

        branches = [(8, 1), (16, 2)]
        module = DilatedAttention([length for length, _ in branches], [rate for _, rate in branches])
        tensors = [x.detach() for x in inputs(32)]

        def theirs(*changed: Tensor) -> Tensor:
            return module(*changed, is_causal=True)

        def ours(*changed: Tensor) -> Tensor:  # two heads per branch; branch i starts at position i % rate
            first = definition(*changed, branches[:1], lambda _, rate: 0, True)
            second = definition(*changed, branches[1:], lambda _, rate: 1 % rate, True)
            return torch.cat([first[:, :, :2], second[:, :, 2:]], dim=2)

        compare("outputs, causal", 32, theirs, ours, grads=False)
        later = [x.clone() for x in tensors]
        for x in later:
            x[:, 31] += 1
        name = "causal outputs at positions 0 to 30 do not depend on position 31"
        report(name, [theirs(*later)[:, :31]], [theirs(*tensors)[:, :31]])


# --- torch's context parallelism ------------------------------------------------------------------------------------


def check_context_parallel() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(listener.getsockname()[1]), WORLD_SIZE="2")
    torch.multiprocessing.spawn(_context_parallel_rank, nprocs=2)


def _context_parallel_rank(rank: int) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import context_parallel_unshard
    from torch.nn import functional as F

    os.environ["RANK"] = str(rank)
    device = "cuda" if torch.cuda.device_count() >= 2 else "cpu"
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    mesh = init_device_mesh(device, (2,))
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    for seq_len in (32, 30):
        whole = [x.detach().transpose(1, 2).to(device, dtype).requires_grad_() for x in inputs(seq_len)]
        expected = F.scaled_dot_product_attention(*whole, is_causal=True)
        grad = torch.randn_like(expected)
        dist.broadcast(grad, 0)
        expected_grads = torch.autograd.grad(expected, whole, grad)
        name = f"outputs and gradients, causal, {seq_len} positions on two ranks"
        try:
            buffers = [x.detach().clone() for x in (*whole, grad)]
            with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4):
                shards = [x.clone().requires_grad_() for x in buffers[:3]]
                out = F.scaled_dot_product_attention(*shards, is_causal=True)
                grads = torch.autograd.grad(out, shards, buffers[3].clone())
                results = context_parallel_unshard(mesh, [out.detach(), *grads], [2] * 4)
        except Exception as error:
            if rank == 0:
                print(f"  raises  {name}: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
        else:
            if rank == 0:
                worst = largest_difference(results, [expected.detach(), *expected_grads])
                is_right = worst < (0.02 if dtype == torch.bfloat16 else 1e-5)
                print(f"  {'right' if is_right else 'WRONG'}  {name}: off by {100 * worst:.2g} %", flush=True)
    dist.barrier()
    dist.destroy_process_group()


PACKAGES = {
    "torchscale": ("torchscale.component.dilated_attention", check_torchscale),
    "dilated-attention-pytorch": ("dilated_attention_pytorch", check_dilated_attention_pytorch),
    "torch context_parallel": ("torch.distributed.tensor.experimental", check_context_parallel),
}


def is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


if __name__ == "__main__":
    for title, (module, check) in PACKAGES.items():
        if not is_installed(module):
            print(f"{title}: {module} is not installed")
            continue
        distribution = packages_distributions()[module.partition(".")[0]][0]
        print(f"{title}: {distribution} {version(distribution)}", flush=True)
        check()
