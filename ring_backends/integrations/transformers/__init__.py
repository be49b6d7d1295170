"""Ring dilated attention for models of Hugging Face transformers::

    from ring_backends.integrations.transformers import register, shard_inputs

    model = AutoModelForCausalLM.from_pretrained(name)
    register(attention, model=model)  # of any adapter
    logits = model(**shard_inputs(attention.ring, input_ids=input_ids)).logits  # this rank's rows

Every rank has the whole model and its rows of the sequence. Only the attention uses the ring; layers that work row by
row (projections, norms, rotary embedding by ``position_ids``) stay unchanged. With :func:`use_ring` a model takes whole
batches instead, and :func:`generate` continues a text.
"""

from __future__ import annotations

from ring_backends.errors import importing

# Importing a module of this package imports the package first, so this covers all of them.
with importing("transformers cannot be imported", "hf"):
    from ring_backends.integrations.transformers.attention import describe
    from ring_backends.integrations.transformers.generation import generate
    from ring_backends.integrations.transformers.inputs import IGNORED, shard_inputs
    from ring_backends.integrations.transformers.local_rows import register
    from ring_backends.integrations.transformers.whole_batches import remove_ring, use_ring

__all__ = ["IGNORED", "describe", "generate", "register", "remove_ring", "shard_inputs", "use_ring"]
