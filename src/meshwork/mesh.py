"""The layout of a job: four degrees whose product is the number of ranks."""

from dataclasses import astuple, dataclass
from typing import Any

from meshwork.config import ConfigError, Parallel

AXES = ("dp_replicate", "dp_shard", "tp", "pp")
# Stages a rank holds of a pipeline under each schedule.
STAGES_PER_RANK = {
    "GPipe": 1,
    "1F1B": 1,
    "Interleaved1F1B": 2,
    "InterleavedZeroBubble": 2,
    "ZBVZeroBubble": 2,
}
SPLIT_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble")


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism. Ranks are numbered with tp fastest, then dp_shard, dp_replicate,
    pp."""

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    pp: int = 1

    @classmethod
    def resolve(cls, asked: Parallel, world_size: int) -> "Layout":
        """Fill the degree that is -1; raises ConfigError where the product is not the world
        size."""
        degrees = {axis: getattr(asked, axis) for axis in AXES}
        shown = " x ".join(f"{axis}={n}" for axis, n in degrees.items())
        fill = [axis for axis, n in degrees.items() if n == -1]
        if len(fill) > 1 or any(n < 1 and n != -1 for n in degrees.values()):
            raise ConfigError(
                f"{shown} for WORLD_SIZE={world_size}: each parallel degree is 1 or more, "
                "and one of them may be -1 to take the ranks that are left"
            )
        product = 1
        for n in degrees.values():
            product *= max(n, 1)
        if fill and world_size % product == 0:
            degrees[fill[0]] = world_size // product
        elif product != world_size:
            down, up = world_size // product * product, (world_size // product + 1) * product
            start = (
                f"start {down or up} or {up if down else 2 * up} processes"
                if fill
                else f"start {product} processes"
            )
            command = f"torchrun --standalone --nproc-per-node={product} train.py"
            start = f"type {command} ..." if world_size == 1 else start
            raise ConfigError(
                f"WORLD_SIZE={world_size} cannot be split as {shown} (= {product}): {start}, "
                "or change these degrees of parallel"
            )
        return cls(**degrees)

    @property
    def data_ranks(self) -> int:
        """How many ways the global batch is split."""
        return self.dp_replicate * self.dp_shard

    def data_rank(self, rank: int) -> int:
        """Data-parallel coordinate of a rank: ranks that share it see the same samples."""
        return rank // self.tp % self.data_ranks

    def pp_rank(self, rank: int) -> int:
        """Pipeline coordinate of a rank."""
        return rank // (self.tp * self.data_ranks)

    def tp_rank(self, rank: int) -> int:
        """Tensor-parallel coordinate of a rank: ranks that share the other ones split weights."""
        return rank % self.tp

    @property
    def shards(self) -> bool:
        """Whether FSDP2 is at work: DDP serves where dp_replicate is the only degree above 1."""
        return self.dp_shard > 1 or (self.dp_replicate > 1 and self.tp * self.pp > 1)

    def mesh(self, device_type: str) -> Any:
        """The ranks as a DeviceMesh with named axes; a collective."""
        from torch.distributed.device_mesh import init_device_mesh

        shape = (self.pp, self.dp_replicate, self.dp_shard, self.tp)
        names = ("pp", "dp_replicate", "dp_shard", "tp")
        return init_device_mesh(device_type, shape, mesh_dim_names=names)

    def __str__(self) -> str:
        parts = [f"{axis} {n}" for axis, n in zip(AXES, astuple(self), strict=True) if n > 1]
        return " x ".join(parts) or "one process, nothing to split"
