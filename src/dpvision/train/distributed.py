"""The processes of one run under torchrun: who am I, sum of clipped sums, one word from rank 0 to all.

Every rank makes the same number of collective calls in the same order, whatever its slice of a batch holds; an empty slice
contributes zeros. One process needs none of this, and the functions then return their argument.
"""

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from dpvision.dp.clip import ClippedSum
from dpvision.errors import ConfigError


@dataclass(frozen=True)
class Group:
    """This process among the run's processes."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def join(device: str) -> Group:
    """Join the process group that torchrun describes in the environment, or stand alone.

    Args:
        device: 'auto', 'cpu' or 'cuda'.

    Raises:
        ConfigError: cuda is asked for and there is none.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("hardware: device='cuda'; expected a CUDA device on this machine. Use --hardware.device auto.")
    use_cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1:
        return Group(0, 1, torch.device("cuda" if use_cuda else "cpu"))
    place = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(place)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if use_cuda else "gloo")
    return Group(dist.get_rank(), world_size, place)


def leave() -> None:
    """Leave the process group, if there is one."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def all_reduce_sum(total: ClippedSum, group: Group) -> ClippedSum:
    """Sum of the ranks' clipped sums, on every rank, in float64. Norms and losses stay those of the local part."""
    if group.world_size == 1:
        return total
    names = sorted(total.grads)
    flat = torch.cat([total.grads[name].flatten().double() for name in names] or [torch.zeros(0, dtype=torch.float64)]).to(group.device)
    dist.all_reduce(flat)
    pieces = flat.split([total.grads[name].numel() for name in names])
    grads = {name: piece.view_as(total.grads[name]) for name, piece in zip(names, pieces, strict=True)}
    count = all_reduce_vector(torch.tensor([float(total.num_records)], dtype=torch.float64), group)
    return ClippedSum(grads, int(count.item()), total.norms_B, total.losses_B, total.max_grad_norm)


def all_reduce_vector(values: Tensor, group: Group) -> Tensor:
    """Sum of a small float64 vector over the ranks."""
    if group.world_size == 1:
        return values
    moved = values.to(group.device)
    dist.all_reduce(moved)
    return moved.cpu()


def broadcast_bytes(value: bytes, size: int, group: Group) -> bytes:
    """Rank 0's ``size`` bytes, on every rank."""
    if group.world_size == 1:
        return value
    start = torch.frombuffer(bytearray(value), dtype=torch.uint8) if group.is_main else torch.zeros(size, dtype=torch.uint8)
    moved = start.to(group.device)
    dist.broadcast(moved, src=0)
    return bytes(moved.cpu().numpy())


def broadcast_int(value: int, group: Group) -> int:
    """Rank 0's integer, on every rank."""
    if group.world_size == 1:
        return value
    return int.from_bytes(broadcast_bytes(value.to_bytes(8, "little", signed=True), 8, group), "little", signed=True)


def check_same_everywhere(tensors: dict[str, Tensor], group: Group) -> None:
    """Assert that all ranks hold the same weights: each added the same noise to the same sum.

    A difference would be a bug of ours or a defective device, so this is an assertion, not an error of the user's.
    """
    if group.world_size == 1:
        return
    mark = torch.stack([t.double().sum() for t in tensors.values()]).to(group.device)
    low, high = mark.clone(), mark.clone()
    dist.all_reduce(low, op=dist.ReduceOp.MIN)
    dist.all_reduce(high, op=dist.ReduceOp.MAX)
    assert torch.equal(low, high), "ranks hold different weights; this run must not be used"
