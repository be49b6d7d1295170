"""The fused attentions in CUDA builds of torch: FlashAttention 2 and memory-efficient attention (CUTLASS).

Each class states what its operator requires, and converts the arguments: it aligns vectors to 16 bytes, changes the
memory layout of out and LSE, and expands key/value heads if the operator does not support grouped heads. Every backward
has an argument for the dropout state of the forward, which it reads only with dropout.

The limits follow torch's own dispatcher (sdp_utils.cpp) and the operators' checks, for NVIDIA GPUs. A NaN or inf in a
key or value may reach rows of the same block that do not see it, unless the key is ignored. Unlike the CPU kernel,
these kernels have no workaround. They refuse documents: tiles would be cut at the ends of documents, and to know these,
the host would have to wait for the GPU.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from ring_backends.kernels.base import RAN_ON_ONE_GPU, Kernel, KernelInputs
from ring_backends.kernels.operators import replaced_flash
from ring_backends.kernels.per_tile import PerTileKernel, backward_tile, forward_tile
from ring_backends.kernels.tile import TileInputs, blank_rows, expand_heads, lse_for_backward, sum_heads

HALF = (torch.bfloat16, torch.float16)
MAX_ENTRIES = 65_535
"""The largest second dim of a CUDA grid, where FlashAttention and cuDNN have the batch."""

_MAX_OFFSET = 2**31
"""The end of the 32-bit offsets with which some operators find rows."""


class AtenCudaKernel(PerTileKernel):
    """Base of the fused CUDA kernels. A kernel needs its operators, and an NVIDIA GPU that supports the dtype."""

    device_types = ("cuda",)
    reads_ignored_keys = True
    unverified = RAN_ON_ONE_GPU
    min_capability: tuple[int, int]

    def not_supported_reasons(self, inputs: KernelInputs) -> list[str]:
        reasons = super().not_supported_reasons(inputs)
        if inputs.has_documents:
            reasons.append("with documents, the host would wait for the GPU at every tile")
        if inputs.device.type != "cuda":
            return reasons
        if torch.version.hip is not None:
            reasons.append("it runs NVIDIA's operators, which differ on ROCm")
        elif not torch.cuda.is_available():
            reasons.append(f"torch {torch.__version__} sees no CUDA device here")
        else:
            capability = torch.cuda.get_device_capability(inputs.device)
            reasons.extend(self.device_reasons(inputs, capability))
        return reasons

    def device_reasons(self, inputs: KernelInputs, capability: tuple[int, int]) -> list[str]:
        """Return the reasons that depend on the GPU and its compute capability (major, minor)."""
        if capability < self.min_capability:
            return [f"it needs compute capability {_dotted(self.min_capability)}, this is {_dotted(capability)}"]
        return []


class AtenCudaPartsKernel(AtenCudaKernel):
    """Base of the kernels for grouped heads without a key mask. They run a tile in parts if it is too large."""

    gathers_rows_outermost = True  # the backward would copy out and grad_out to this layout
    dtypes = HALF
    min_capability = (8, 0)
    max_head_dim: int

    def not_supported_reasons(self, inputs: KernelInputs) -> list[str]:
        reasons = super().not_supported_reasons(inputs)
        reason = self._dims_reason(inputs)
        if reason is not None:
            reasons.append(reason)
        if inputs.has_key_mask:
            reasons.append("it does not support a key mask")
        return reasons

    def forward(self, tile: TileInputs) -> tuple[Tensor, Tensor]:
        assert tile.key_mask is None
        other = self._kernel_instead(tile.query, tile.key, tile.value)
        if other is not None:
            return forward_tile(other, tile)
        attend = partial(self._attend, is_causal=tile.is_causal, scale=tile.scale)
        out, lse = in_parts(attend, tile.tensors, entries=MAX_ENTRIES)
        return out, lse

    def backward(self, tile: TileInputs, grad_out: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        assert tile.key_mask is None
        query, key, value = tile.tensors
        other = self._kernel_instead(query, key, value)
        if other is not None:
            return backward_tile(other, tile, grad_out, out, lse)
        differentiate = partial(self._differentiate, is_causal=tile.is_causal, scale=tile.scale)
        tensors = (grad_out.to(query.dtype), query, key, value, out.to(query.dtype), lse_for_backward(lse))
        entries, kv_heads = self._size_of_backward(query, key)
        grad_query, grad_key, grad_value = in_parts(differentiate, tensors, entries=entries, kv_heads=kv_heads)
        return grad_query, grad_key, grad_value

    @abstractmethod
    def _dims_reason(self, inputs: KernelInputs) -> str | None:
        """Why the operator does not support D and V; None if it does."""

    def _kernel_instead(self, query: Tensor, key: Tensor, value: Tensor) -> Kernel | None:
        """The kernel that runs a tile which the operator refuses; None if the operator runs it."""
        return None

    @abstractmethod
    def _size_of_backward(self, query: Tensor, key: Tensor) -> tuple[int, int]:
        """How many batch entries and key/value heads one backward may have."""

    @abstractmethod
    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float
    ) -> tuple[Tensor, ...]:
        """Out and LSE of one part, as :meth:`forward`."""

    @abstractmethod
    def _differentiate(self, *tensors: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, ...]:
        """The gradients of one part, as :meth:`backward`; LSE is +inf in rows that see no key."""


class AtenCudaFlashKernel(AtenCudaPartsKernel):
    """``aten::_scaled_dot_product_flash_attention``. It supports grouped heads, but no key mask.

    A program may replace the operator and its backward by FlashAttention 3 or 4, whose limits are others, and whose
    backward nobody has run with the LSE over keys of other tiles. The kernel then refuses every call.
    """

    name = "aten_cuda_flash"
    operators = ("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward")
    unverified = f"{AtenCudaPartsKernel.unverified}; it refuses calls while FlashAttention 3 or 4 is activated in torch"
    max_head_dim = 256

    def device_reasons(self, inputs: KernelInputs, capability: tuple[int, int]) -> list[str]:
        reasons = super().device_reasons(inputs, capability)
        if not torch.backends.cuda.is_flash_attention_available():
            reasons.append(f"torch {torch.__version__} was built without FlashAttention")
        if (implementation := replaced_flash()) is not None:
            reasons.append(
                f"the program has replaced torch's FlashAttention 2 by {implementation}, which was not tested with it; "
                "torch.nn.attention.restore_flash_attention_impl() undoes this"
            )
        small_shared_memory = (8, 6) <= capability <= (8, 9) or capability >= (12, 0)
        if inputs.needs_grad and max(inputs.dims) > 192 and small_shared_memory:
            reasons.append(
                f"its backward supports {inputs.widest} up to 192 on compute capability {_dotted(capability)}"
            )
        return reasons

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float
    ) -> tuple[Tensor, ...]:
        rows = map(aligned, (query, key, value))
        return torch.ops.aten._scaled_dot_product_flash_attention(*rows, 0.0, is_causal, False, scale=scale)[:2]  # type: ignore[no-any-return]

    def _differentiate(self, *tensors: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, ...]:
        grad_out, query, key, value, out, lse = tensors
        unused = unused_dropout_state(query)
        return torch.ops.aten._scaled_dot_product_flash_attention_backward(  # type: ignore[no-any-return]
            *map(aligned, (grad_out, query, key, value, out)),
            lse.contiguous(),  # the operator assumes a contiguous [B, H, S]
            None,
            None,
            query.shape[2],
            key.shape[2],
            0.0,
            is_causal,
            unused,
            unused,
            scale=scale,
        )

    def _dims_reason(self, inputs: KernelInputs) -> str | None:
        width = max(inputs.dims)  # the narrower rows are padded
        if width % 8 == 0 and width <= self.max_head_dim:
            return None
        return f"{inputs.widest} must be a multiple of 8 and at most {self.max_head_dim}"

    def _size_of_backward(self, query: Tensor, key: Tensor) -> tuple[int, int]:
        """The operator sums dQ in a buffer with padded rows, and some releases compute offsets in it in 32 bits."""
        _, num_heads, rows, head_dim = query.shape
        num_kv_heads = key.shape[1]
        per_head = num_heads // num_kv_heads * (rows + -rows % 128) * (head_dim + -head_dim % 64)
        kv_heads = min(num_kv_heads, _MAX_OFFSET // per_head)
        if kv_heads == 0:
            raise ValueError(
                f"query has {rows} rows in one tile of {num_heads // num_kv_heads} heads per key/value head: "
                "FlashAttention's backward supports at most 2^31 elements in them, counting its padding of rows and "
                'head_dim; pass kernel="triton_dilated".'
            )
        return min(MAX_ENTRIES, _MAX_OFFSET // (kv_heads * per_head)), kv_heads


class AtenCudaEfficientKernel(AtenCudaKernel):
    """``aten::_scaled_dot_product_efficient_attention``. It also supports fp32, key masks and older GPUs."""

    name = "aten_cuda_efficient"
    gathers_rows_outermost = True  # its backward would copy out and grad_out to this layout
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    takes_value_dim = True
    operators = ("_scaled_dot_product_efficient_attention", "_scaled_dot_product_efficient_attention_backward")
    min_capability = (5, 0)

    def device_reasons(self, inputs: KernelInputs, capability: tuple[int, int]) -> list[str]:
        reasons = super().device_reasons(inputs, capability)
        if inputs.dtype == torch.bfloat16 and capability < (8, 0):
            reasons.append(f"bf16 needs compute capability 8.0, this is {_dotted(capability)}")
        # Tensor cores read 16 bytes at a time. They support fp32 from Ampere on. GPUs before Volta have no tensor
        # cores.
        multiple = 1
        if inputs.dtype in HALF and capability >= (7, 0):
            multiple = 8
        elif inputs.dtype == torch.float32 and capability >= (8, 0):
            multiple = 4
        if any(dim % multiple for dim in inputs.dims):
            name = "head_dim" if inputs.head_dim % multiple else "value_dim"
            reasons.append(f"{name} must be a multiple of {multiple} for {inputs.dtype} on this GPU")
        return reasons

    def forward(self, tile: TileInputs) -> tuple[Tensor, Tensor]:
        query, key, value = tile.tensors
        num_heads, seq_q = query.shape[1:3]
        out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            aligned(query),
            _near(aligned(expand_heads(key, num_heads))),
            _near(aligned(expand_heads(value, num_heads))),
            _aligned_bias(tile.key_mask, query),
            True,
            0.0,
            tile.is_causal,
            scale=tile.scale,
        )
        return blank_rows(out, lse[:, :, :seq_q], tile)

    def backward(self, tile: TileInputs, grad_out: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = tile.tensors
        num_heads, num_kv_heads = query.shape[1], key.shape[1]
        unused = unused_dropout_state(query)
        grad_query, grad_key, grad_value, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            _rows_outermost(grad_out.to(query.dtype)),
            aligned(query),
            aligned(expand_heads(key, num_heads)),
            aligned(expand_heads(value, num_heads)),
            _aligned_bias(tile.key_mask, query),
            _rows_outermost(out.to(query.dtype)),
            _padded_lse(lse_for_backward(lse)),
            unused,
            unused,
            0.0,
            [True, True, True, False],
            tile.is_causal,
            scale=tile.scale,
        )
        return grad_query, sum_heads(grad_key, num_kv_heads), sum_heads(grad_value, num_kv_heads)


def in_parts(
    call: Callable[..., tuple[Tensor, ...]], tensors: Sequence[Tensor], *, entries: int, kv_heads: int | None = None
) -> tuple[Tensor, ...]:
    """Return the results of ``call(*tensors)``, called with parts of the batch and of the heads if they are too many.

    Args:
        tensors: [B, H, ...], where H is a multiple of the smallest number of heads, that of the key.
        call: a function of such tensors whose results are [B, H, ...] too.
        entries: the number of batch entries that one call may have.
        kv_heads: the number of key/value heads that one call may have; None for all.
    """
    batch, num_heads = tensors[0].shape[0], min(x.shape[1] for x in tensors)
    kv_heads = num_heads if kv_heads is None else kv_heads
    if batch <= entries and num_heads <= kv_heads:
        return call(*tensors)
    wholes: list[Tensor] = []
    for entry in range(0, batch, entries):
        for head in range(0, num_heads, kv_heads):

            def part(x: Tensor, entry: int = entry, head: int = head) -> Tensor:
                group = x.shape[1] // num_heads
                return x[entry : entry + entries, head * group : (head + kv_heads) * group]

            results = call(*map(part, tensors))
            if not wholes:
                wholes = [_whole(x, batch, num_heads, min(kv_heads, num_heads)) for x in results]
            for whole, result in zip(wholes, results, strict=True):
                part(whole).copy_(result)
    return tuple(wholes)


def _whole(part: Tensor, batch: int, num_heads: int, heads_of_part: int) -> Tensor:
    """A tensor for the results of all parts. Results with four dims have the memory layout [B, S, H, D]."""
    heads = part.shape[1] // heads_of_part * num_heads
    if part.dim() == 3:
        return part.new_empty(batch, heads, part.shape[2])
    return part.new_empty(batch, part.shape[2], heads, part.shape[3]).transpose(1, 2)


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def aligned(x: Tensor) -> Tensor:
    """Return ``x``, copied if needed, with stride 1 in its last dim and rows that begin at multiples of 16 bytes.

    Expanded dims are copied.
    """
    vector = 16 // x.element_size()
    offsets = (x.storage_offset(), *x.stride()[:-1])
    is_expanded = any(stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride(), strict=True))
    if x.stride(-1) == 1 and not is_expanded and all(offset % vector == 0 for offset in offsets):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _near(x: Tensor) -> Tensor:
    """Return ``x`` [B, H, S, D], copied if its rows lie so far apart that 32-bit offsets do not reach the last one."""
    if x.shape[2] * x.stride(2) < _MAX_OFFSET:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _rows_outermost(x: Tensor) -> Tensor:
    """Return ``x`` [B, H, S, D] with the memory layout [B, S, H, D], which the CUTLASS backward requires of out."""
    _, num_heads, rows, head_dim = x.shape
    return with_strides(x, (rows * num_heads * head_dim, head_dim, num_heads * head_dim, 1))


def with_strides(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Return ``x`` with these strides, also in dims of size 1, at an aligned address, copied if needed."""
    is_right = all(own == wanted or size == 1 for size, own, wanted in zip(x.shape, x.stride(), strides, strict=True))
    if is_right and (x.storage_offset() * x.element_size()) % 16 == 0:
        return x.as_strided(x.shape, strides)
    return x.new_empty_strided(x.shape, strides).copy_(x)


def _aligned_bias(key_mask: Tensor | None, query: Tensor) -> Tensor | None:
    """Convert the mask [B, Hk, Sk] to a bias [B, Hq, Sq, Sk], whose rows are padded to 16 elements in memory."""
    if key_mask is None:
        return None
    batch, num_heads, seq_q, _ = query.shape
    seq_k = key_mask.shape[2]
    mask = expand_heads(key_mask, num_heads).unsqueeze(2)
    bias = query.new_zeros(batch, num_heads, 1, seq_k + -seq_k % 16)[..., :seq_k]
    return bias.masked_fill_(mask, -torch.inf).expand(batch, num_heads, seq_q, seq_k)


def _padded_lse(lse: Tensor) -> Tensor:
    """LSE padded with +inf to a multiple of 32 rows, the shape that the CUTLASS forward returns."""
    return pad(lse, (0, -lse.shape[2] % 32), value=torch.inf).contiguous()


def unused_dropout_state(x: Tensor) -> Tensor:
    return torch.empty((), dtype=torch.int64, device=x.device)
