"""What a suite returns."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Measurement:
    """One side's turn: `events` in `seconds`."""

    what: str
    events: int
    seconds: float
    baseline: bool = False
    details: dict[str, object] = field(default_factory=dict)
