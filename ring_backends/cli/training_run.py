"""One rank of ``train``: the training loop, its checkpoints, its output and the JSON file.

The adapter hides the differences between frameworks behind ``initialize``, ``RingDilatedAttention`` and
``parallelize``. Step k depends only on k, the options and the training state. So a resumed run has the same losses as
an uninterrupted run.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from torch import Tensor

from ring_backends.cli.language_model import LongNetLM, make_optimizer
from ring_backends.cli.options import parse_ulysses_size
from ring_backends.cli.output import describe_branches, dtype_name, write_json
from ring_backends.cli.train import TrainOptions, options_path
from ring_backends.cost.machine import device_name, peak_memory_bytes, select_device
from ring_backends.kernels import resolve_dtype
from ring_backends.registry import load_adapter
from ring_backends.releases import versions
from ring_backends.ring.collectives import agree, do_on_rank0
from ring_backends.ring.rendezvous import world_ring
from ring_backends.training.checkpoint_files import check_place, replace_file
from ring_backends.training.losses import cross_entropy_sum

WARMUP_STEPS = 4
_LINES_OFF_TERMINAL = 20
_LONGEST_SILENCE = 10.0  # seconds between two lines, if no step takes longer

# Options that may differ between a run and its continuation.
_MAY_DIFFER_ON_RESUME = (
    *("steps", "device", "nproc_per_node", "ring_size", "layout", "timeout", "kernel", "activation_checkpointing"),
    *("buffer_bytes", "ulysses_size", "save", "save_every", "resume", "json"),
)


def run(options: TrainOptions) -> None:
    """Train on one rank. The environment variable RANK says which one.

    Raises:
        ValueError, AdapterUnavailableError: an option cannot work.
        RingMismatchError: the ranks made different calls.
        RingPeerError: another rank failed or did not answer in time.
    """
    device = select_device(options.device)
    backend = load_adapter(options.backend)
    ring = backend.initialize(
        ring_size=options.ring_size,
        layout=options.layout,
        timeout=timedelta(seconds=options.timeout),
        buffer_bytes=options.buffer_bytes,
        ulysses_size=parse_ulysses_size(options.ulysses_size, options.ring_size, options.num_heads),
    )
    TrainingRun(options, backend, ring, device).train()
    if dist.is_initialized():
        dist.destroy_process_group()


class TrainingRun:
    """One rank of a training run."""

    def __init__(self, options: TrainOptions, backend: Any, ring: Any, device: torch.device) -> None:
        self.options, self.ring, self.device = options, ring, device
        self.document = options.document()
        self.world_size = ring.size * ring.data_size
        self.world = world_ring(ring)
        self.is_first = not dist.is_initialized() or dist.get_rank() == 0
        self.console = Console(quiet=not self.is_first, highlight=False, soft_wrap=True)
        self.last_line = time.monotonic()
        self.options_are_own = options.resume  # whether the options beside the checkpoint are those of this run
        self.dtype = resolve_dtype(options.dtype, device)
        torch.manual_seed(options.seed)
        model = LongNetLM(options, backend, ring).to(device, self.dtype)
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        make = make_optimizer(options, self.dtype)
        self.state = backend.parallelize(model, make, ring, max_grad_norm=options.max_grad_norm)

    def train(self) -> None:
        """Resume, train, save, evaluate, and report."""
        options = self.options
        self._print_header()
        self._check_documents_are_equal()
        self._resume()
        self.ring.traffic.reset()
        steps: list[dict[str, Any]] = []
        columns = (MofNCompleteColumn(), BarColumn(bar_width=16), TextColumn("{task.description}"))
        is_bar = self.is_first and self.console.is_terminal
        progress = Progress(*columns, console=self.console, disable=not is_bar)
        with progress if is_bar else contextlib.nullcontext():
            progress.add_task("", total=options.steps, completed=self.state.step_count)
            for step in range(self.state.step_count, options.steps):
                record = self._step(step)
                steps.append(record)
                self._show(record, progress)
                if options.save_every and (step + 1) % options.save_every == 0 and step + 1 < options.steps:
                    self._save()
        bytes_sent, messages_sent = self._all_gather(self.ring.traffic.bytes, self.ring.traffic.messages)
        if options.save is not None and steps:
            self._save()
        evaluation_loss = self._evaluate()
        (peaks,) = self._all_gather(peak_memory_bytes(self.device))
        timed = steps[1:] or steps  # the first step also computes plans and opens connections
        seconds = sum(record["seconds"] for record in timed)
        result = {
            "steps": steps,
            "evaluation_loss": evaluation_loss,
            "bytes_sent": [*map(int, bytes_sent)],
            "messages_sent": [*map(int, messages_sent)],
            "peak_memory_bytes": [*map(int, peaks)],
            "tokens_per_second": len(timed) * self._tokens_per_step / seconds if seconds else None,
            "num_parameters": self.num_parameters,
            "parameters_sha256": None if options.json is None else parameters_sha256(self.state.full_state_dict()),
            "device": device_name(self.device),
            "dtype": dtype_name(self.dtype),
            "world_size": self.world_size,
            "ring_size": self.ring.size,
            "versions": versions(),
            "options": self._plain_options(),
        }
        if options.json is not None and self.is_first:
            write_json(options.json, result)
        self._print_summary(result)

    def _check_documents_are_equal(self) -> None:
        (fingerprints,) = self._all_gather(self.document.fingerprint())
        if len(set(fingerprints)) > 1:
            different = [rank for rank, fingerprint in enumerate(fingerprints) if fingerprint != fingerprints[0]]
            raise ValueError(
                f"text: ranks {different} read another document than rank 0; pass the same files to --text on every "
                "host."
            )

    @property
    def _tokens_per_step(self) -> int:
        return self.options.seq_len * self.options.batch_size * int(self.ring.data_size)

    def _step(self, step: int) -> dict[str, Any]:
        started = time.perf_counter()
        for group in self.state.optimizer.param_groups:
            group["lr"] = self.options.lr * min(1.0, (step + 1) / WARMUP_STEPS)
        first = (step * self.ring.data_size + self.ring.data_rank) * self.options.batch_size
        windows = [self.document.window(first + index) for index in range(self.options.batch_size)]
        self.state.model.train()
        local_sum, count = self._loss_sum(windows)
        loss = self.state.loss(local_sum, count)
        self.state.backward(loss)
        self.state.step()
        sums, counts, peaks = self._all_gather(local_sum.item(), count, peak_memory_bytes(self.device))
        return {
            "step": step + 1,
            "loss": sum(sums) / sum(counts),
            "seconds": time.perf_counter() - started,
            "peak_memory_bytes": [*map(int, peaks)],
        }

    def _evaluate(self) -> float:
        """Compute the mean loss on the evaluation window. Every rank returns the same value."""
        self.state.model.eval()
        with torch.no_grad():
            local_sum, count = self._loss_sum([self.document.evaluation_window()])
        sums, counts = self._all_gather(local_sum.item(), count)
        return sum(sums) / sum(counts)

    def _loss_sum(self, windows: list[bytes]) -> tuple[Tensor, int]:
        """Return the sum of the cross-entropy over this rank's labels, and the number of these labels."""
        window = torch.frombuffer(bytearray(b"".join(windows)), dtype=torch.uint8).view(len(windows), -1)
        # Shift before sharding: the label of a shard's last token is the next rank's first token.
        tokens = self.ring.shard(window[:, :-1], dim=1).to(self.device, torch.int64)
        labels = self.ring.shard(window[:, 1:], dim=1).to(self.device, torch.int64)
        logits = self.state.model(tokens, self.options.seq_len)
        return cross_entropy_sum(logits, labels), labels.numel()

    def _all_gather(self, *values: float) -> list[tuple[float, ...]]:
        """Gather each value from all ranks, by global rank. It is sent as fp64, exact for integers up to 2⁵³."""
        return [*zip(*agree(self.world, "train", None, values), strict=True)]

    # A checkpoint is the adapter's checkpoint, and a file beside it with the options of the run.

    def _save(self) -> None:
        path = self.options.save
        assert path is not None
        # A run can be killed at any point, and a checkpoint must never lie beside the options of another run. So the
        # options are written before a new checkpoint. The options of an earlier run are deleted before its checkpoint
        # is replaced.
        if self.is_first and not path.exists():
            self._write_options(path)
        elif self.is_first and not self.options_are_own:
            options_path(path).unlink(missing_ok=True)
        self.state.save(path)
        if self.is_first:
            self._write_options(path)
        self.options_are_own = True

    def _write_options(self, checkpoint: Path) -> None:
        text = json.dumps(self._plain_options(), indent=2) + "\n"
        replace_file(options_path(checkpoint), lambda file: file.write(text.encode()))

    def _resume(self) -> None:
        path = self.options.save
        if path is None:
            return
        do_on_rank0(self.world, "save", lambda: check_place(path, name="save"))
        if not self.options.resume:
            if path.exists():
                self.console.print(f"{path} exists and will be overwritten; pass --resume to continue from it.")
            return
        if not self.state.has_checkpoint(path):
            self.console.print(f"{path} does not exist; training starts at step 1.")
            return
        saved = read_saved(path, "save", "give another --save, or leave --resume out")
        for name, value in self._plain_options().items():
            if name not in _MAY_DIFFER_ON_RESUME and saved.get(name) != value:
                raise ValueError(
                    f"{name} = {value!r}: the run that saved {path} had {saved.get(name)!r}; give that value to "
                    "continue the run, or give another --save."
                )
        self.state.load(path)
        self.console.print(f"resumed {path} after step {self.state.step_count}.")

    def _plain_options(self) -> dict[str, Any]:
        """Return the options, the number of rings and the hash of the text, as values that JSON can store."""
        values = {
            **dataclasses.asdict(self.options),
            **dataclasses.asdict(self.options.pattern()),  # without windows, window_lengths is None
            "data_size": self.ring.data_size,
            "text_fingerprint": self.document.fingerprint(),
        }
        return cast(dict[str, Any], json.loads(json.dumps(values, default=str)))

    # Output.

    def _print_header(self) -> None:
        options, ring = self.options, self.ring
        source = "files of --text" if options.text else "the Python standard library's sources"
        ranks = f"{ring.data_size} ring{'s' if ring.data_size > 1 else ''} of {ring.size}"
        self.console.print(
            f"{options.backend} adapter, {ranks}, {device_name(self.device)}, {dtype_name(self.dtype)}; "
            f"{self.num_parameters:,} parameters; {options.seq_len:,} tokens per sequence, {options.layout}; "
            f"branches {describe_branches(options.pattern())}; text: {source}, {self.document.num_bytes:,} bytes."
        )
        if self.dtype == torch.float16:
            self.console.print(
                "fp16 is used without loss scaling, so small gradients become 0; bf16 and fp32 are safer."
            )
        if options.nproc_per_node not in (1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))):
            self.console.print(
                f"--nproc-per-node {options.nproc_per_node} is not used, because a launcher has started the ranks."
            )

    def _show(self, record: dict[str, Any], progress: Progress) -> None:
        """Show one step: in the progress bar on a terminal, otherwise in a line every few steps.

        A line is also due if the next step would make the time since the last one longer than ten seconds.
        """
        step, steps, now = record["step"], self.options.steps, time.monotonic()
        is_due = now + record["seconds"] > self.last_line + _LONGEST_SILENCE
        if not progress.disable:
            progress.update(progress.task_ids[0], completed=step, description=self._describe(record))
        elif is_due or step % min(50, max(1, steps // _LINES_OFF_TERMINAL)) == 0 or step == steps:
            self.last_line = now
            self.console.print(f"step {step}/{steps}  {self._describe(record)}")

    def _describe(self, record: dict[str, Any]) -> str:
        speed = self._tokens_per_step / record["seconds"]
        return f"loss {record['loss']:.4f}  {speed:,.0f} tokens/s  peak {_mebibytes(record['peak_memory_bytes'])} MiB"

    def _print_summary(self, result: dict[str, Any]) -> None:
        steps = result["steps"]
        reached = "no steps were left"
        if steps:
            reached = f"loss {steps[0]['loss']:.4f} → {steps[-1]['loss']:.4f} in {len(steps)} steps"
        speed = result["tokens_per_second"]
        self.console.print(
            f"{reached}; evaluation loss {result['evaluation_loss']:.4f}; "
            + (f"{speed:,.0f} tokens/s; " if speed else "")
            + f"peak memory {_mebibytes(result['peak_memory_bytes'])} MiB per rank; "
            f"sent {_per_rank([f'{sent:,}' for sent in result['bytes_sent']])} bytes per rank."
        )


def read_saved(checkpoint: Path, name: str, advice: str) -> dict[str, Any]:
    """Read the options of the run that saved a checkpoint.

    Args:
        name, advice: the option that names the checkpoint, and what to do if ``train`` did not write it.

    Raises:
        ValueError: the file with the options is missing or is not JSON.
    """
    path = options_path(checkpoint)
    try:
        saved: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(
            f"{name} = {str(checkpoint)!r}: {path} is missing, so `train` did not write this checkpoint; {advice}."
        ) from None
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{name} = {str(checkpoint)!r}: {path} is not valid JSON ({error}); train the model again."
        ) from None
    return saved


def parameters_sha256(state: Mapping[str, Tensor]) -> str:
    """Compute the SHA-256 hash of names, dtypes, shapes and bytes. The tensors lie on the CPU."""
    digest = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        tensor = tensor.contiguous()
        digest.update(f"{name} {tensor.dtype} {[*tensor.shape]}\n".encode())
        digest.update(ctypes.string_at(tensor.data_ptr(), tensor.nbytes))
    return digest.hexdigest()


def _mebibytes(sizes: list[int]) -> str:
    return _per_rank([f"{size / 2**20:,.0f}" for size in sizes])


def _per_rank(values: list[str]) -> str:
    """Join the values of all ranks: ``"12 / 13"``. For more than eight ranks, keep the first three and the last."""
    if len(values) > 8:
        return f"{' / '.join(values[:3])} / … / {values[-1]} ({len(values)} ranks)"
    return " / ".join(values)
