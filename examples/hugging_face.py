"""Fine-tune a Hugging Face model on one long sequence that is sharded over a ring of ranks.

    torchrun --nproc-per-node 2 examples/hugging_face.py --steps 20 --seq-len 4096

The model is a tiny Llama with random weights, so nothing is downloaded. A model of ``from_pretrained`` does as well.
Plain ``python`` instead of ``torchrun`` trains on one rank. For another framework, change the import of ``backend``.
"""

from pathlib import Path

import torch
import transformers
import typer
from torch import Tensor, nn

from ring_backends.adapters import native as backend
from ring_backends.integrations.transformers import IGNORED, register, shard_inputs


def make_model() -> nn.Module:
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, use_cache=False)
    return transformers.AutoModelForCausalLM.from_config(config)


def read_document() -> Tensor:
    """Read some of torch's source files. Each byte is a token."""
    files = sorted(Path(nn.__file__).parent.glob("modules/*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()


def main(steps: int = 20, seq_len: int = 4096, learning_rate: float = 3e-3, seed: int = 0) -> None:
    torch.manual_seed(seed)  # the same initial parameters on every rank
    ring = backend.initialize()
    segment_lengths, dilation_rates = [seq_len // 16, seq_len // 4, seq_len], [1, 4, 16]
    model = make_model()
    register(backend.RingDilatedAttention(segment_lengths, dilation_rates, ring=ring), model=model)
    state = backend.parallelize(model, lambda parameters: torch.optim.AdamW(parameters, lr=learning_rate), ring)
    document, losses = read_document(), []
    for step in range(1, steps + 1):
        start = (step - 1) * seq_len % (len(document) - seq_len)
        input_ids = document[start : start + seq_len].unsqueeze(0)
        inputs = shard_inputs(ring, input_ids=input_ids, labels=input_ids)
        labels = inputs.pop("labels")  # shard_inputs has shifted them, so the loss needs no rows of other ranks
        del inputs["shift_labels"]
        logits = state.model(**inputs).logits
        token_losses = nn.functional.cross_entropy(
            logits.transpose(1, 2), labels, reduction="none", ignore_index=IGNORED
        )
        state.backward(state.loss(token_losses.sum(), (labels != IGNORED).sum()))
        state.step()
        losses.append(ring.unshard(token_losses.detach(), seq_len=seq_len).sum().item() / (seq_len - 1))
        if ring.rank == 0:
            print(f"step {step}: loss {losses[-1]:.6f}", flush=True)
    if ring.rank == 0:
        print(f"{losses[0]:.4f} -> {losses[-1]:.4f} on {ring.size} ranks; rank 0 sent {ring.traffic.bytes:,} bytes")


if __name__ == "__main__":
    typer.run(main)
