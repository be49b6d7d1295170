"""All kernels. ``"auto"`` takes the first kernel that can run a call.

Each kernel judges device, dtype and options in its own ``not_supported_reasons``. Its ``auto_order`` may move it to the
front for some calls. On a GPU, :mod:`ring_backends.kernels.choice` orders the others by their speed.
"""

from __future__ import annotations

import torch

from ring_backends.kernels.aten_cpu import AtenCpuFlashKernel
from ring_backends.kernels.aten_cuda import AtenCudaEfficientKernel, AtenCudaFlashKernel
from ring_backends.kernels.aten_cudnn import AtenCudaCudnnKernel
from ring_backends.kernels.base import Kernel, KernelInputs
from ring_backends.kernels.choice import NO_PREFERENCE, preference
from ring_backends.kernels.math import MathKernel
from ring_backends.kernels.triton_dilated import TritonDilatedKernel

_KERNELS: tuple[Kernel, ...] = (
    AtenCudaFlashKernel(),
    AtenCudaCudnnKernel(),
    AtenCudaEfficientKernel(),
    TritonDilatedKernel(),
    AtenCpuFlashKernel(),
    MathKernel(),
)


def kernels() -> tuple[Kernel, ...]:
    """All kernels, in the order in which ``"auto"`` tries them unless another order is faster."""
    return _KERNELS


def kernel_names() -> tuple[str, ...]:
    """The names that :func:`select_kernel` takes besides ``"auto"``."""
    return tuple(kernel.name for kernel in _KERNELS)


def select_kernel(name: str, inputs: KernelInputs) -> Kernel:
    """The kernel called ``name``, or with ``"auto"`` the first that can run ``inputs``.

    If ``name`` is not ``"auto"``, no other kernel is tried.

    Raises:
        ValueError: no kernel has this name, or no kernel that was tried can run. The message gives each kernel's
            reasons.
    """
    if name != "auto" and name not in kernel_names():
        choices = ", ".join(repr(choice) for choice in ("auto", *kernel_names()))
        raise ValueError(f"kernel = {name!r}: there is no such kernel; use one of {choices}.")
    refusals = []
    for kernel in _in_order(inputs) if name == "auto" else _KERNELS:
        if name in ("auto", kernel.name):
            reasons = kernel.not_supported_reasons(inputs)
            if name == "auto" and kernel.auto_order(inputs) is None:
                reasons.append("'auto' does not choose it on this device")
            if not reasons:
                return kernel
            refusals.append(f"  {kernel.name}: {'; '.join(reasons)}")
    way_out = "change device, dtype or head_dim" if name == "auto" else "use kernel='auto' or change the inputs"
    raise ValueError(
        f"kernel = {name!r}: no kernel can run {inputs}:\n" + "\n".join(refusals) + f"\nTo fix this, {way_out}."
    )


def _in_order(inputs: KernelInputs) -> list[Kernel]:
    """The kernels in the order in which ``"auto"`` tries them."""
    names = preference(inputs).names
    places = {name: place for place, name in enumerate(names)}

    def place(kernel: Kernel) -> tuple[bool, int, int]:
        order = kernel.auto_order(inputs)
        return order is None, order or 0, places.get(kernel.name, len(names))

    return sorted(_KERNELS, key=place)


def explain_choice(inputs: KernelInputs) -> tuple[str, str]:
    """The name of the kernel that ``"auto"`` takes for a call, and why, in words.

    Raises:
        ValueError: as :func:`select_kernel`.
    """
    chosen, preferred = select_kernel("auto", inputs), preference(inputs)
    if chosen.auto_order(inputs) == 0:
        return chosen.name, "it computes key masks, documents, dropout and score_mods in the same launch"
    names = preferred.names
    is_preferred = chosen.name in names
    reason = preferred.reason if is_preferred or not names else NO_PREFERENCE.reason
    earlier = names[: names.index(chosen.name)] if is_preferred else names
    refusals = [
        f"{kernel.name} cannot: {', '.join(kernel.not_supported_reasons(inputs))}"
        for kernel in _KERNELS
        if kernel.name in earlier
    ]
    return chosen.name, "; ".join([reason, *refusals])


def available_kernels() -> dict[str, str | None]:
    """Map each kernel, in the order of ``kernels()``, to None if this machine can run it, else to the reasons.

    Each kernel is asked about its first device type, its first dtype, and a head dim of 64.
    """
    answers: dict[str, str | None] = {}
    for kernel in _KERNELS:
        device = torch.device("cpu" if kernel.device_types is None else kernel.device_types[0])
        reasons = kernel.not_supported_reasons(KernelInputs(device, kernel.dtypes[0], head_dim=64))
        answers[kernel.name] = "; ".join(reasons) or None
    return answers
