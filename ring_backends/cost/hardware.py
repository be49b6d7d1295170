"""What a rank's device and its links can do, as far as the cost of a ring depends on it.

Plain numbers, measured (:mod:`ring_backends.cost.probe`) or given by the user; this module imports no torch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_MAY_BE_ZERO = ("latency_seconds", "row_keys", "causal_row_keys", "overlap")


@dataclass(frozen=True)
class Hardware:
    """The constants of the cost model, as one rank has them while all the others are at work too.

    Attributes:
        latency_seconds: what one hop costs besides its bytes.
        bytes_per_second: in either direction, with both in use.
        forward_flops_per_second: of a long tile's two matrix products, over the pairs of query and key it computes.
        backward_flops_per_second: of its five.
        causal_forward_flops_per_second, causal_backward_flops_per_second: the same of a causal tile, over the pairs
            that are visible. None: as of other tiles.
        row_keys, causal_row_keys: how many more keys than it sees a query row of a tile costs, since a kernel works in
            blocks and begins each row anew. Of weight in short tiles.
        copy_bytes_per_second: read and written while dilated rows are gathered, and merged. None: costs nothing.
        overlap: the share of a hop's time in which a tile is computed as fast as without it: 1 where a device of its
            own moves the bytes, 0 where that takes the very cores that compute.
        speed_alone: how many times as fast a device computes that it shares with no other rank, since ranks on one
            machine share its cores; 1 where every rank has a device of its own.
        memory_bytes: what one rank has. None: not known.

    Raises:
        ValueError, TypeError: a number is not finite, negative, or 0 where it divides; or ``overlap`` is above 1.
    """

    latency_seconds: float
    bytes_per_second: float
    forward_flops_per_second: float
    backward_flops_per_second: float
    causal_forward_flops_per_second: float | None = None
    causal_backward_flops_per_second: float | None = None
    row_keys: float = 0.0
    causal_row_keys: float = 0.0
    copy_bytes_per_second: float | None = None
    overlap: float = 1.0
    speed_alone: float = 1.0
    memory_bytes: int | None = None

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
                raise ValueError(f"{field.name} = {value}: must be finite and {rule}; measure it, or give another.")
        if self.overlap > 1:
            raise ValueError(f"overlap = {self.overlap}: is a share; give a number from 0 to 1.")

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Hardware:
        """From what ``dataclasses.asdict`` made, by way of JSON.

        Raises:
            ValueError, TypeError: a constant is missing, unknown or breaks its rule.
        """
        fields = {field.name: field for field in dataclasses.fields(cls)}
        unknown = sorted(set(values) - set(fields))
        missing = [n for n, field in fields.items() if field.default is dataclasses.MISSING and n not in values]
        if unknown or missing:
            wrong = ", ".join(
                [*(f"{name} is unknown" for name in unknown), *(f"{name} is missing" for name in missing)]
            )
            raise ValueError(f"hardware: {wrong}; it has {', '.join(fields)}.")
        return cls(**values)

    def tile_rate(self, *, backward: bool, causal: bool) -> tuple[float, float]:
        """FLOP/s of one kind of tile, and the keys that a query row of it costs besides those it sees."""
        rate = self.backward_flops_per_second if backward else self.forward_flops_per_second
        of_causal = self.causal_backward_flops_per_second if backward else self.causal_forward_flops_per_second
        if not causal:
            return rate, self.row_keys
        return rate if of_causal is None else of_causal, self.causal_row_keys
