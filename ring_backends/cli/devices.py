"""The devices of this machine that ``info`` lists: CPU, GPUs of NVIDIA and AMD, and other accelerators of torch."""

from __future__ import annotations


def find_devices() -> list[dict[str, str]]:
    """The torch name (``device``), a description (``name``) and the recommended dtype (``dtype``) of each device."""
    import os

    import torch

    from ring_backends.cli.output import dtype_name
    from ring_backends.kernels import auto_dtype

    found = {"cpu": f"{os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads"}
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        kind = f"compute capability {properties.major}.{properties.minor}"
        if torch.version.hip is not None:
            kind = f"{properties.gcnArchName}, ROCm {torch.version.hip}, not covered by the tests"
        found[f"cuda:{index}"] = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, {kind}"
    other = torch.accelerator.current_accelerator(check_available=True)
    if other is not None and other.type != "cuda":
        for index in range(torch.accelerator.device_count()):
            name = getattr(torch.get_device_module(other), "get_device_name", lambda _: other.type.upper())(index)
            found[f"{other.type}:{index}"] = f"{name}, not covered by the tests"
    return [{"device": device, "name": name, "dtype": dtype_name(auto_dtype(device))} for device, name in found.items()]
