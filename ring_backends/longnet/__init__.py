"""LongNet as published in torchscale (arXiv 2307.02486): an encoder and a decoder that load torchscale's weights.

The models have pre-norm transformer layers with sub-layer norm (Magneto, arXiv 2210.06423) and dilated attention.
Parameters have torchscale's names: ``load_state_dict(strict=True)`` loads what its ``LongNetEncoder`` and
``LongNetDecoder`` saved. With ``DilatedPattern.torchscale`` the outputs are equal too, on one device and on a ring.
Differences from torchscale:

- torchscale treats the weights that mix the branches as constants in the gradient. Here the gradient is exact.
- torchscale ignores a branch whose LSE is exactly 0, for example if the query sees one key, with score 0. Here the
  branch counts.
- torchscale's encoder sets the embeddings of padding to zero, and queries see the padding. Here a ``key_padding_mask``
  hides the padding.
- torchscale computes the activation in fp32. Here fp64 inputs are computed in fp64.
- torchscale has dropout and drop path, which eval() switches off. Here there is only attention dropout: the
  ``dropout_p`` of the attention.
- Where w % r ≠ 0 and the sequence is longer than w, torchscale misplaces outputs. ``DilatedPattern`` refuses this.

Checkpoints with the following features are refused: mixture of experts, multiway, cross attention, xPos, relative
position bias, LayerNorm of the embedding, post-norm and DeepNorm.
"""

from __future__ import annotations

from ring_backends.longnet.model import LongNet, LongNetDecoder, LongNetEncoder

__all__ = ["LongNet", "LongNetDecoder", "LongNetEncoder"]
