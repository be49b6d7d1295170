"""The constants of a rank's device and links on which the cost of a ring depends. This module imports no torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_MAY_BE_ZERO = ("latency_seconds", "row_keys", "causal_row_keys", "overlap")


@dataclass(frozen=True)
class Hardware:
    """The constants of the cost model, for one rank while all other ranks are busy too.

    Measured by :mod:`ring_backends.cost.probe`, or given by the user.

    Attributes:
        latency_seconds: time of a hop without its bytes.
        bytes_per_second: bandwidth in each direction while both are in use.
        forward_flops_per_second: rate of the two matrix products of a long tile, over its pairs of query and key.
        backward_flops_per_second: rate of its five matrix products in backward.
        causal_forward_flops_per_second, causal_backward_flops_per_second: rates of a causal tile, over its visible
            pairs. None: the rates of other tiles.
        row_keys, causal_row_keys: extra keys that each query row of a tile costs, because kernels compute in blocks.
            They matter in short tiles.
        copy_bytes_per_second: rate of gathering and merging dilated rows, over bytes read and written. None: no cost.
        overlap: the share of a hop during which tiles run at full speed: 1 if a separate device moves the bytes, 0 if
            the computing cores do.
        speed_alone: speed of a rank that has the machine to itself, over its speed beside the other ranks; 1 if every
            rank has a device of its own.
        memory_bytes: memory of one rank. None: unknown.

    Raises:
        ValueError, TypeError: a constant is not a finite number, is negative, or is 0 although it divides; or
            ``overlap`` is above 1.
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
                raise ValueError(f"{field.name} = {value}: must be finite and {rule}; give another number.")
        if self.overlap > 1:
            raise ValueError(f"overlap = {self.overlap}: must be at most 1; give a share from 0 to 1.")

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Hardware:
        """Read the constants from the result of ``dataclasses.asdict``, possibly through JSON.

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
        """FLOP/s of one kind of tile, and the extra keys that each of its query rows costs."""
        rate = self.backward_flops_per_second if backward else self.forward_flops_per_second
        of_causal = self.causal_backward_flops_per_second if backward else self.causal_forward_flops_per_second
        if not causal:
            return rate, self.row_keys
        return rate if of_causal is None else of_causal, self.causal_row_keys
