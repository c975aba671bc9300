"""What gathers between two lines of metrics."""

import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from meshwork.distributed import World


@dataclass
class Meter:
    """What has gathered since the last line: sums on the device, times on the clock."""

    shares: dict[str, Tensor] = field(default_factory=dict)
    steps: int = 0
    samples: int = 0
    wait_s: float = 0.0
    since: float = field(default_factory=time.perf_counter)

    def add(self, shares: dict[str, Tensor], samples: int, wait_s: float) -> None:
        for name, value in shares.items():
            self.shares[name] = self.shares[name] + value if self.steps else value
        self.steps += 1
        self.samples += samples
        self.wait_s += wait_s

    def means(self, world: World) -> dict[str, float]:
        """Means over the steps and the whole job; one small reduction."""
        sums = world.sum(torch.stack([v.cpu().double() for v in self.shares.values()]))
        return dict(zip(self.shares, (sums / self.steps).tolist(), strict=True))
