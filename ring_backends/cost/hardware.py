"""The hardware constants of the cost model: speed of a rank's device and links. This module imports no torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_MAY_BE_ZERO = (
    *("latency_seconds", "host_latency_seconds", "row_keys", "causal_row_keys", "tile_seconds", "post_seconds"),
    "overlap",
)

DEFAULT_TILE_SECONDS = 120e-6
"""Time that the host needs to launch a tile on a GPU, if it was not measured.

On the machine of an H100, the host of a replayed rank of 8 took 3.5 ms for the 29 tiles of a forward.
"""

DEFAULT_POST_SECONDS = 200e-6
"""Time that the host needs to post a hop over NCCL and to wait for it, if it was not measured. Estimated."""


@dataclass(frozen=True)
class Hardware:
    """The constants of the cost model, for one rank while the other ranks are busy too.

    :mod:`ring_backends.cost.probe` measures them, or the user gives them.

    Attributes:
        latency_seconds: fixed time of a hop, whatever its size.
        bytes_per_second: bandwidth of a link in each direction, while both directions are in use.
        host_latency_seconds, host_bytes_per_second: the same of a link between two ranks of one host, over which groups
            of ranks exchange rows for heads. None: as of other links.
        forward_flops_per_second: FLOP/s of a long tile in forward, which has two matrix products.
        backward_flops_per_second: FLOP/s of a long tile in backward, which has five matrix products.
        causal_forward_flops_per_second, causal_backward_flops_per_second: FLOP/s of a long causal tile. Only visible
            pairs of query and key count as FLOPs. None: as for other tiles.
        row_keys, causal_row_keys: a tile takes as long as if each query row had this many more keys. Kernels compute
            in blocks, which makes short tiles slower.
        tile_seconds: time that the host needs to launch one forward tile, with its copies and its merge. A GPU that
            computes tiles faster than this waits for the host. 0: the host computes the tiles itself.
        post_seconds: time that the host needs to post a hop and to wait for it, in which it launches no tile. 0: a hop
            takes no time of the host besides its own.
        copy_bytes_per_second: rate at which dilated rows are gathered and merged, in bytes read and written. None:
            gathering and merging take no time.
        overlap: the share of a hop during which tiles run at full speed. It is 1 if a separate device moves the bytes,
            and 0 if the computing cores move them.
        speed_alone: speed of a rank that runs alone, divided by its speed beside the other ranks. It is 1 if every
            rank has its own device.
        memory_bytes: memory of one rank. None: unknown.

    Raises:
        TypeError: a constant is not a number.
        ValueError: a constant is infinite, NaN or negative; a constant that the model divides by is 0; or ``overlap``
            is above 1.
    """

    latency_seconds: float
    bytes_per_second: float
    forward_flops_per_second: float
    backward_flops_per_second: float
    causal_forward_flops_per_second: float | None = None
    causal_backward_flops_per_second: float | None = None
    row_keys: float = 0.0
    causal_row_keys: float = 0.0
    tile_seconds: float = 0.0
    post_seconds: float = 0.0
    copy_bytes_per_second: float | None = None
    overlap: float = 1.0
    speed_alone: float = 1.0
    memory_bytes: int | None = None
    host_latency_seconds: float | None = None
    host_bytes_per_second: float | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is None and field.default is None:
                continue
            if not isinstance(value, (int, float)) or isinstance(value, bool):
                raise TypeError(f"{field.name} = {value!r}: expected a number; convert it with float().")
            may_be_zero = field.name in _MAY_BE_ZERO
            if not math.isfinite(value) or value < 0 or (value == 0 and not may_be_zero):
                rule = "not negative" if may_be_zero else "above 0"
                raise ValueError(f"{field.name} = {value}: must be finite and {rule}; give another number.")
        if self.overlap > 1:
            raise ValueError(f"overlap = {self.overlap}: must be at most 1; give a share from 0 to 1.")

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Hardware:
        """Make the constants from the result of ``dataclasses.asdict``, for example one that was read from JSON.

        Raises:
            ValueError, TypeError: a constant is missing, unknown or invalid.
        """
        fields = {field.name: field for field in dataclasses.fields(cls)}
        unknown = sorted(set(values) - set(fields))
        missing = [n for n, field in fields.items() if field.default is dataclasses.MISSING and n not in values]
        if unknown or missing:
            wrong = ", ".join(
                [*(f"{name} is unknown" for name in unknown), *(f"{name} is missing" for name in missing)]
            )
            raise ValueError(f"hardware: {wrong}; give {', '.join(fields)}.")
        return cls(**values)

    def tile_rate(self, *, backward: bool, causal: bool) -> tuple[float, float]:
        """Return the FLOP/s and the ``row_keys`` of one kind of tile."""
        rate = self.backward_flops_per_second if backward else self.forward_flops_per_second
        of_causal = self.causal_backward_flops_per_second if backward else self.causal_forward_flops_per_second
        if not causal:
            return rate, self.row_keys
        return rate if of_causal is None else of_causal, self.causal_row_keys
