"""``info``: versions, devices, adapters, kernels, dtype advice and NCCL's settings for this machine."""

# ruff: noqa: RUF009 (the functions that declare options call dataclasses.field)

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from ring_backends.cli import options
from ring_backends.cli.devices import find_devices
from ring_backends.cli.options import Options, option
from ring_backends.cli.output import dtype_name, print_lines, print_table, write_json
from ring_backends.cost import local_probe
from ring_backends.cost.hardware import Hardware

# What auto_dtype decides, and why. The numbers are compute capabilities of NVIDIA GPUs.
DTYPE_ADVICE = (
    ("CPU", "fp32", "bf16 is faster where the CPU multiplies it in hardware (AMX, AVX-512 BF16)"),
    ("Pascal and older (below 7.0)", "fp32", "no tensor cores; no bf16"),
    ("Volta, Turing (7.0, 7.5)", "fp32", "no bf16; fp16 is faster, but training in it needs loss scaling"),
    ("Ampere, Ada, Hopper, Blackwell (8.0 and above)", "bf16", "has the range of fp32, needs no loss scaling"),
    ("XPU, MPS, HPU", "fp32", "`math` computes scores in fp32; not measured"),
)
HOPS = (
    ("gloo, CPU tensors", "sent directly over TCP"),
    ("gloo, CUDA tensors", "staged through pinned host memory, then over TCP"),
    ("gloo, tensors of XPU, MPS or HPU", "copied to the host, then over TCP; tested with a simulated device"),
    ("NCCL, CUDA tensors", "GPU to GPU, over NVLink, PCIe or the network"),
)

USUAL_CALL = "bfloat16, head_dim 128"
"""The call of :func:`choices` with which the short form compares the others."""


@dataclass(frozen=True, kw_only=True)
class InfoOptions(Options):
    """Show versions, devices, adapters, the kernels that run here, and what is missing."""

    verbose: bool = option(
        False,
        help="Also show every kernel and its tests, the kernels of more calls, dtype advice per GPU generation, how "
        "hops are transported, and NCCL's settings.",
    )
    probe: bool = option(
        False,
        help="Also start local ranks, and measure the latency and bandwidth of hops and the FLOP/s of tiles. "
        "`ring-backends plan --probe FILE` reads the file that --json writes.",
    )
    nproc_per_node: int = option(2, min=2, help="Ranks to measure on.")
    dtype: options.Dtype = option("auto", help="Dtype of the measurement. auto: the recommended dtype of the device.")
    device: options.Device = options.device(panel=None)
    json: Path | None = options.json(panel=None)


def run(chosen: InfoOptions) -> None:
    """Collect the information, show it, and write the file."""
    found = collect()
    if chosen.probe:
        found["probe"] = local_probe.measure(chosen.nproc_per_node, chosen.dtype, chosen.device)
    if chosen.verbose:
        _show_all(found)
    else:
        print_lines([*_summary(found), ("", "Pass --verbose for every kernel, dtype advice and NCCL's settings.")])
    if "probe" in found:
        _show_probe(found["probe"])
    if chosen.json is not None:
        write_json(chosen.json, found)


def choices(device_name: str) -> list[dict[str, str]]:
    """The kernels that ``"auto"`` takes on one device for some calls, and why."""
    import torch

    from ring_backends import score_mods
    from ring_backends.kernels import KernelInputs, explain_choice

    device, rows = torch.device(device_name), []
    calls: tuple[tuple[torch.dtype, int, str, dict[str, Any]], ...] = (
        (torch.bfloat16, 64, "", {}),
        (torch.bfloat16, 128, "", {}),
        (torch.bfloat16, 128, "dilated", {"is_dilated": True}),
        (torch.bfloat16, 256, "", {}),
        (torch.float32, 64, "", {}),
        (torch.bfloat16, 192, "value_dim 128", {"value_dim": 128}),
        (torch.bfloat16, 128, "key mask", {"has_key_mask": True}),
        (torch.bfloat16, 128, "documents", {"has_documents": True}),
        (torch.bfloat16, 128, "dropout", {"has_dropout": True}),
        (torch.bfloat16, 128, "score_mod", {"score_mod": score_mods.softcap(50.0)}),
    )
    for dtype, head_dim, what, needs in calls:
        name, why = explain_choice(KernelInputs(device, dtype, head_dim, **needs))
        call = ", ".join(filter(None, (dtype_name(dtype), f"head_dim {head_dim}", what)))
        rows.append({"device": device_name, "call": call, "kernel": name, "why": why})
    return rows


def collect() -> dict[str, Any]:
    """Collect the information about this machine, without the measurement, as plain values."""
    from ring_backends import available_adapters
    from ring_backends.kernels import available_kernels, kernels
    from ring_backends.releases import untested, versions
    from ring_backends.ring import nccl_settings

    devices = find_devices()
    reasons, installed = available_kernels(), versions()
    return {
        "versions": installed,
        "untested": untested(installed),
        "devices": devices,
        "adapters": available_adapters(),
        "kernels": {
            kernel.name: {"unusable": reasons[kernel.name], "unverified": kernel.unverified} for kernel in kernels()
        },
        "kernel_choice": [row for device in devices for row in choices(device["device"])],
        "dtype_advice": [dict(zip(("device", "dtype", "why"), row, strict=True)) for row in DTYPE_ADVICE],
        "hops": dict(HOPS),
        "nccl": nccl_settings.describe(),
    }


def _summary(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the headings and the texts of the short form. A text without a heading belongs to the one before it."""
    versions, adapters, kernels, nccl = (found[name] for name in ("versions", "adapters", "kernels", "nccl"))
    installed = ", ".join(f"{name} {number}" for name, number in versions.items() if number)
    absent = ", ".join(name for name, number in versions.items() if not number)
    yield "Versions", installed + (f"; not installed: {absent}" if absent else "")
    devices, choice = [], []
    for name, device, rows in _kinds_of_devices(found):
        devices.append(f"{name}: {device['name']}; recommended dtype: {device['dtype']}")
        choice.append(f"{name}: {_kernels_of(rows)}")
    yield from _lines("Devices", devices)
    yield "Adapters", ", ".join(name for name, reason in adapters.items() if reason is None) or "none"
    yield from _lines("Kernels", choice)
    if nccl["release"] is None:
        yield "NCCL", "none in this build of torch; hops go over gloo"
    else:
        advice = ", ".join(row["setting"] for row in nccl["advice"])
        yield "NCCL", nccl["release"] + (f"; advice: {advice}" if advice else "")
    unusable = {name: row["unusable"] for name, row in kernels.items()}
    yield from _lines("Missing", [*_by_reason("adapter", adapters), *_by_reason("kernel", unusable)])
    tested = {name: row["unverified"] for name, row in kernels.items() if row["unusable"] is None}
    releases = [f"{name}: {sentence}" for name, sentence in found["untested"].items()]
    yield from _lines("Tests", [*releases, *_by_reason("kernel", tested)])


def _lines(heading: str, texts: list[str]) -> list[tuple[str, str]]:
    return [("" if index else heading, text) for index, text in enumerate(texts)]


def _kinds_of_devices(found: dict[str, Any]) -> Iterator[tuple[str, dict[str, str], list[dict[str, str]]]]:
    """Yield the names of neighbouring equal devices as one text, one of the devices, and the kernels of its calls."""

    def kind(device: dict[str, str]) -> list[object]:
        calls = [(row["call"], row["kernel"]) for row in found["kernel_choice"] if row["device"] == device["device"]]
        return [device["name"], device["dtype"], calls]

    for _, equal in groupby(found["devices"], kind):
        first, *others = equal
        name = f"{first['device']} to {others[-1]['device']}" if others else first["device"]
        yield name, first, [row for row in found["kernel_choice"] if row["device"] == first["device"]]


def _kernels_of(rows: list[dict[str, str]]) -> str:
    """Name the kernel of the usual call, and the other kernels with what their calls have and the usual one has not."""
    (usual,) = (row for row in rows if row["call"] == USUAL_CALL)
    others: dict[str, list[str]] = {}
    for row in rows:
        if row["kernel"] != usual["kernel"]:
            special = [part for part in row["call"].split(", ") if part not in USUAL_CALL.split(", ")]
            others.setdefault(row["kernel"], []).append(" with ".join(special))
    return "; ".join([usual["kernel"], *(f"{kernel} for {', '.join(calls)}" for kernel, calls in others.items())])


def _by_reason(what: str, reasons: dict[str, str | None]) -> list[str]:
    """Return a text for each reason, with the names of the adapters or kernels that give it."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        if reason is not None:
            names.setdefault(reason, []).append(name)
    return [f"{what}{'s' * (len(its) > 1)} {', '.join(its)}: {reason}" for reason, its in names.items()]


def _show_all(found: dict[str, Any]) -> None:
    untested = found["untested"]
    versions = (
        (name, number or "not installed", untested.get(name, "-")) for name, number in found["versions"].items()
    )
    print_table("Versions", ("package", "version", "tests"), versions)
    devices = ((device["device"], device["name"], device["dtype"]) for device in found["devices"])
    print_table("Devices", ("device", "name", "recommended dtype"), devices)
    adapters = ((name, _usable(why)) for name, why in found["adapters"].items())
    print_table("Adapters", ("adapter", "usable here"), adapters)
    kernels = ((name, _usable(row["unusable"]), row["unverified"] or "-") for name, row in found["kernels"].items())
    print_table("Kernels", ("kernel", "usable here", "limits of the tests"), kernels)
    choices = (row.values() for row in found["kernel_choice"])
    print_table("What kernel='auto' takes here", ("device", "call", "kernel", "why"), choices)
    advice = (row.values() for row in found["dtype_advice"])
    print_table("Which dtype", ("device (compute capability)", "dtype", "why"), advice)
    print_table("How a hop travels", ("transport", "path"), found["hops"].items())
    _show_nccl(found["nccl"])


def _show_probe(probe: dict[str, Any]) -> None:
    hops = [
        (f"{local_probe.SMALL_HOP_BYTES >> 10} KiB both ways", f"{probe['latency_seconds'] * 1e3:.2f} ms"),
        ("16 MiB both ways", f"{probe['bytes_per_second'] / 2**30:.2f} GiB/s per direction"),
    ]
    ranks = "Two local ranks" if probe["ranks"] == 2 else f"{probe['ranks']} local ranks"
    print_table(f"{ranks}, {probe['transport']}, {probe['device']}", ("message", "measured"), hops)
    title = (
        f"Constants for plan, measured on all ranks at once: {probe['dtype']}, head dim {probe['head_dim']}, "
        f"{probe['kernel']}"
    )
    print_table(title, ("constant", "measured"), _constants(probe))


def _show_nccl(nccl: dict[str, Any]) -> None:
    if nccl["release"] is None:
        print_table("NCCL", ("usable here",), [("no: this build of torch has none; hops go over gloo",)])
        return
    settings = (row.values() for row in nccl["settings"])
    print_table(f"NCCL {nccl['release']}, settings around a ring", ("name", "value", "from", "effect"), settings)
    if nccl["advice"]:
        print_table("Advice for rings over NCCL", ("setting", "why"), (row.values() for row in nccl["advice"]))


def _constants(probe: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the names and values of the measured constants, as text."""
    hardware = Hardware.of(probe["hardware"])

    def rate(backward: bool, causal: bool) -> str:
        flops, keys = hardware.tile_rate(backward=backward, causal=causal)
        return f"{flops / 1e9:,.1f} GFLOP/s" + (f", {keys:,.0f} extra keys per row" if keys else "")

    launch, post = hardware.tile_seconds, hardware.post_seconds
    copies, memory = hardware.copy_bytes_per_second, hardware.memory_bytes
    shown = {
        "latency of a hop": f"{hardware.latency_seconds * 1e3:.3f} ms",
        "bandwidth, both ways at once": f"{hardware.bytes_per_second / 2**30:.2f} GiB/s per direction",
        "tile forward": rate(False, False),
        "tile backward": rate(True, False),
        "causal tile forward": rate(False, True),
        "causal tile backward": rate(True, True),
        "host time per tile launch": f"{launch * 1e6:.1f} µs" if launch else None,
        "host time per hop": f"{post * 1e6:.1f} µs" if post else None,
        "gathering and merging rows": None if copies is None else f"{copies / 2**30:.2f} GiB/s",
        "share of a hop that overlaps with tiles": f"{hardware.overlap:.0%}",
        "speed of one rank alone": f"{hardware.speed_alone:.2f} times its speed beside the other ranks",
        "memory per rank": None if memory is None else f"{memory / 2**30:,.1f} GiB",
    }
    return [(name, text) for name, text in shown.items() if text is not None]


def _usable(reason: str | None) -> str:
    return "yes" if reason is None else f"no: {reason}"
