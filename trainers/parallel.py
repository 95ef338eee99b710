"""Training on one worker or many: what the workers tell each other, and how the model is sharded over them.

Every worker runs the same loop. It samples and trains on its own responses; weights and advantages come from the whole
rollout, and gradients are summed, so the number of workers changes nothing but speed and rounding.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from trainers.policy import Policy
from trainers.recipe import Recipe


@dataclass(frozen=True)
class World:
    """The workers of this run: as torch.distributed was set up, or this process alone."""

    rank: int = 0
    size: int = 1

    @classmethod
    def current(cls) -> "World":
        """The workers that a launcher has connected."""
        return cls(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else cls()

    @property
    def is_first(self) -> bool:
        """Whether this is the worker that writes what all share."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Every worker's value, by rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def sum(self, values: dict[str, float]) -> dict[str, float]:
        """Sums over the workers, equal on all of them."""
        if self.size == 1:
            return values
        gathered = self.gather(values)
        return {name: sum(other[name] for other in gathered) for name in values}

    def first(self, value: Any) -> Any:
        """The first worker's value, on all workers."""
        if self.size == 1:
            return value
        holder = [value]
        dist.broadcast_object_list(holder, src=0)
        return holder[0]

    def wait(self) -> None:
        """Return when every worker has come here."""
        if self.size > 1:
            dist.barrier()


def is_sharded(recipe: Recipe, world: World) -> bool:
    """Whether the model is wrapped: for several workers, and for mixed precision on any number."""
    return world.size > 1 or recipe.dtype == "bfloat16"


def shard(policy: Policy, recipe: Recipe, world: World, device: torch.device) -> None:
    """Spread parameters, gradients and optimizer state over the workers with FSDP2, a decoder layer at a time.

    The policy itself is the outermost unit, so that its forward pass gathers the embedding and the output layer.
    Gradients are summed over workers, not averaged: the loss is a sum whose weights already fit the whole batch.
    """
    if not is_sharded(recipe, world):
        return
    if not dist.is_initialized():
        dist.init_process_group("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl", store=dist.HashStore(),
                                rank=0, world_size=1)  # fmt: skip
    mesh = init_device_mesh(device.type, (world.size,))
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": mixed if recipe.dtype == "bfloat16" else MixedPrecisionPolicy(),
    }
    kinds = set(policy.model._no_split_modules or ())
    for module in policy.model.modules():
        if type(module).__name__ in kinds:
            fully_shard(module, **options)
    fully_shard(policy, **options)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no scaled sums


def whole(tensor: Tensor) -> Tensor:
    """A tensor put together from the workers' parts; all of them must ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def trainable(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that the optimizer updates."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]
