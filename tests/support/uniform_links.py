"""Links between any two ranks, as simple as they can be, for steps that are simulated."""

from __future__ import annotations

from dataclasses import dataclass, field

from cost_models.links import Link, Path


@dataclass(frozen=True)
class UniformLinks:
    """Links on which nothing is ever shared: a wire of its own from each rank to each other."""

    bandwidth_bytes_per_second: float
    latency_seconds: float = 0.0
    links: dict[str, Link] = field(default_factory=dict)

    def path(self, a: int, b: int) -> Path:
        """Return the wire from ``a`` to ``b``."""
        name = f"{a}>{b}"
        if name not in self.links:
            self.links[name] = Link(name, self.bandwidth_bytes_per_second, self.latency_seconds)
        return Path.over([self.links[name]])
