"""LongNet as torchscale publishes it (arXiv 2307.02486): an encoder and a decoder whose weights load by name.

Pre-norm transformer layers with sub-layer norm (Magneto, arXiv 2210.06423) around dilated attention. Parameters have
torchscale's names, so that ``load_state_dict(strict=True)`` takes what its ``LongNetEncoder`` and ``LongNetDecoder``
saved; with ``DilatedPattern.torchscale`` the outputs are theirs too, on one device and on a ring. What differs there:

- The weights that mix the branches are constants in torchscale's gradient. Here the gradient is exact.
- A branch whose LSE is exactly 0 counts as absent in torchscale, as of a query that sees one key, of score 0. Here it
  counts.
- torchscale's encoder sets the embeddings of pads to zero, and its attention lets every query see them. A
  ``key_padding_mask`` here ignores them.
- The activation is computed in fp32 there. Here in fp32 at least, which differs in fp64 alone.
- Dropout and drop path, which eval() switches off there, do not exist here; attention dropout does if the attention is
  made with ``dropout_p``.
- Where w % r ≠ 0 and the sequence is longer than w, torchscale misplaces outputs, and ``DilatedPattern`` refuses.

Not supported, and refused by name where a checkpoint has it: mixture of experts, multiway, cross attention, xPos,
relative position bias, LayerNorm of the embedding, post-norm and DeepNorm.
"""

from __future__ import annotations

from ring_backends.longnet.model import LongNet, LongNetDecoder, LongNetEncoder

__all__ = ["LongNet", "LongNetDecoder", "LongNetEncoder"]
