"""The processes of one run under torchrun: joining, sums over ranks, broadcasts from rank 0.

Every rank makes the same number of collective calls in the same order, whatever its share of a
batch; an empty share contributes zeros. With a single process the functions return their argument.
``same.py`` compares what the ranks must agree on.

A rank that waits for another longer than the timeout, or whose peer has ended, raises RankLost.
"""

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

# Its functions' defaults are the process group of the moment of this import. Imported later (by
# torch._dynamo, for one), they keep the group: its threads outlive ``leave``, and one that asks for
# the interpreter's lock while the interpreter ends aborts the process, after its work is done.
import torch.distributed.nn.functional
from torch import Tensor

from dpvision.devices import require_cuda
from dpvision.dp.clipped import ClippedSum, require_seal, seal
from dpvision.environment import PARENT
from dpvision.errors import CheckpointError, ConfigError, DPVisionError, PrivacyError
from dpvision.train.alive import signs_of_life, wait_for_others

_RUNS = itertools.count()
_RESUME = "--resume: steps charged since the last checkpoint are lost and count in epsilon"


class RankLost(CheckpointError):
    """Another rank ended, or did not answer in time."""


@dataclass(frozen=True)
class Group:
    """This process among the run's processes."""

    rank: int
    world_size: int
    device: torch.device
    store: dist.Store | None = field(default=None, repr=False, compare=False)
    """Shared by the ranks of a group that ``join`` made."""
    parent: int | None = None
    """Id of torchrun's agent, which started this process; None without torchrun."""

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def orphaned(self) -> bool:
        """bool: whether torchrun's agent, which ends this process when others fail, is gone."""
        return self.parent is not None and os.getppid() != self.parent

    def add_up(self, values: Tensor) -> None:
        """Replace ``values`` by their sum over all ranks (``dp.noise.Owners``)."""
        if self.world_size == 1:
            return
        moved = values.to(self.device).contiguous()
        _all_reduce(moved)
        if moved is not values:
            values.copy_(moved)
        else:  # which collectives do not count as a write, and seals would not see
            torch.autograd.graph.increment_version(values)


def join(device: str, timeout_s: float | None = None) -> Group:
    """Join the process group described by torchrun's environment, or make a group of one process.

    Args:
        device: 'auto', 'cpu' or 'cuda'.
        timeout_s: seconds that a rank waits for the others in a collective call; if None, torch's
            default.

    Raises:
        ConfigError: cuda is requested and not available, or there are more ranks than GPUs.
        PrivacyError: some ranks have a GPU and others do not.
    """
    kind = "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"
    # Float32 convolutions are TF32 on a GPU unless this is said: ten bits of mantissa, where the
    # bounds and a CPU have 23.
    torch.backends.cudnn.allow_tf32 = False
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    parent = PARENT if "TORCHELASTIC_RUN_ID" in os.environ else None
    store: dist.Store | None = None
    if world_size > 1 and not dist.is_initialized():
        # Compared before the process group is made: a backend would wait forever for ranks with
        # another backend.
        shared, rank, world_size = next(dist.rendezvous("env://"))
        # torchrun's store outlives an attempt, and a process may make several runs: none may read
        # the words of another.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"attempt {attempt}, run {next(_RUNS)}", shared)
        _check_devices(dist.PrefixStore("devices", store), rank, world_size, kind)
    if device == "cuda":
        require_cuda()
    if world_size == 1:
        return Group(0, 1, torch.device(kind), parent=parent)
    place = (
        torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        if kind == "cuda"
        else torch.device("cpu")
    )
    if kind == "cuda":
        if place.index >= torch.cuda.device_count():
            count = torch.cuda.device_count()
            raise ConfigError(
                f"ranks: LOCAL_RANK={place.index} with {count} GPUs; expected a GPU for each. "
                f"Pass --nproc-per-node {count}."
            )
        torch.cuda.set_device(place)
    if store is not None:
        backend = "nccl" if kind == "cuda" else "gloo"
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("group", store),
            rank=rank,
            world_size=world_size,
            timeout=None if timeout_s is None else timedelta(seconds=timeout_s),
        )
    return Group(dist.get_rank(), world_size, place, store, parent)


def _check_devices(store: dist.Store, rank: int, world_size: int, kind: str) -> None:
    """Refuse a run whose ranks have different kinds of device: their sums and their noise would
    differ in the last bits.
    """
    store.set(str(rank), kind)
    kinds = [store.get(str(other)).decode() for other in range(world_size)]
    store.set(f"{rank} has read", "")
    if rank == 0:  # the store may end with this process, so wait until all have read
        store.wait([f"{other} has read" for other in range(world_size)])
    if len(set(kinds)) > 1:
        said = f"ranks: devices {', '.join(kinds)} of ranks 0 to {world_size - 1}"
        raise PrivacyError(f"{said}; expected one kind. Pass --hardware.device cpu.")


def leave() -> None:
    """Leave the process group, if there is one, and end its threads. They live on only while the
    error of a collective call that was not made by ``answered`` is being handled.
    """
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def all_reduce_sum(total: ClippedSum, group: Group) -> ClippedSum:
    """Add up the ranks' clipped sums, on every rank, in float64; in place if ``total`` is in
    float64, so do not use it again. Norms, losses and ids remain those of this rank: buckets are
    disjoint.

    Raises:
        PrivacyError: a sum made or edited by hand.
    """
    if group.world_size == 1:
        return total
    require_seal(total, "clip", "Give the sum of ClippedSum.add_up.")
    grads = {name: total.grads[name].double() for name in sorted(total.grads)}
    for value in grads.values():
        group.add_up(value)
    count = int(
        all_reduce_vector(
            torch.tensor([float(total.num_records)], dtype=torch.float64), group
        ).item()
    )
    return seal(replace(total, grads=grads, num_records=count))


def all_reduce_vector(values: Tensor, group: Group) -> Tensor:
    """Add up a small float64 vector over the ranks."""
    if group.world_size == 1:
        return values
    moved = values.to(group.device)
    _all_reduce(moved)
    return moved.cpu()


def broadcast_bytes(value: bytes, size: int, group: Group) -> bytes:
    """Return rank 0's ``size`` bytes on every rank."""
    if group.world_size == 1:
        return value
    start = (
        torch.frombuffer(bytearray(value), dtype=torch.uint8)
        if group.is_main
        else torch.zeros(size, dtype=torch.uint8)
    )
    moved = start.to(group.device)
    answered(partial(dist.broadcast, moved, src=0))
    return bytes(moved.cpu().numpy())


def broadcast_int(value: int, group: Group) -> int:
    """Return rank 0's integer on every rank."""
    if group.world_size == 1:
        return value
    return int.from_bytes(
        broadcast_bytes(value.to_bytes(8, "little", signed=True), 8, group), "little", signed=True
    )


def _all_reduce(values: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
    answered(partial(dist.all_reduce, values, op=op))


def answered(call: Callable[[], object], remedy: str = _RESUME) -> None:
    """Make a collective call; the error of one that another rank did not take part in is RankLost.

    NCCL's is not raised here: its watchdog ends the process.
    """
    try:
        call()
        return
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        # Its frames hold the process group, which ``leave`` is to end.
        cause = error.with_traceback(None)
    reason = str(cause).strip().splitlines()[0][:200] if str(cause).strip() else "no reason"
    raise RankLost(
        f"ranks: another rank ended or did not answer ({reason}); expected all until the end "
        f"of the run. See the error of that rank, then {remedy}."
    ) from cause


def gather_texts(text: str, group: Group) -> list[str]:
    """Return the texts of all ranks, by rank, on every rank."""
    if group.world_size == 1:
        return [text]
    mine = torch.frombuffer(bytearray(text.encode() + b"\0"), dtype=torch.uint8)
    longest = torch.tensor([len(mine)], device=group.device)
    _all_reduce(longest, dist.ReduceOp.MAX)
    lines = torch.zeros(
        group.world_size, int(longest.item()), dtype=torch.uint8, device=group.device
    )
    lines[group.rank, : len(mine)] = mine.to(group.device)
    _all_reduce(lines)  # all other ranks have zeros in this rank's line
    return [bytes(line).rstrip(b"\0").decode() for line in lines.cpu().numpy()]


@contextlib.contextmanager
def together(group: Group, *, slow: str = "", doing: str = "works") -> Iterator[None]:
    """A block that succeeds on all ranks or raises on all: if one rank fails, the others must not
    wait for it forever.

    Collective calls inside the block must raise on all ranks or on none.

    Args:
        slow: name of a block, another each time, that may take one rank longer than the timeout of
            the group. The others then wait as long as that rank gives signs of life (``alive``).
        doing: what that rank does, for the others' log.

    Raises:
        DPVisionError: the block's own error; on a rank where the block succeeded, PrivacyError with
            the first failed rank's message. RankLost: another rank ended.
    """
    refused: Exception | None = None
    store = group.store if slow else None
    signs = contextlib.nullcontext() if store is None else signs_of_life(store, slow, group.rank)
    with signs:
        try:
            yield
        except RankLost:
            raise
        except (DPVisionError, OSError) as error:
            refused = error
    if store is not None:
        lost = None
        # The store ends with the agent of rank 0, which orphaned ranks outlive: they go on without.
        with contextlib.suppress(RuntimeError):
            lost = wait_for_others(store, slow, group.rank, group.world_size, doing)
        if lost is not None:
            raise RankLost(
                f"ranks: {lost}; expected all until the end of the run. See the error of that "
                "rank, then start again, or --resume: steps charged since the last checkpoint are "
                "lost and count in epsilon."
            ) from refused
    said = gather_texts("" if refused is None else str(refused) or type(refused).__name__, group)
    if refused is not None:
        raise refused
    for rank, words in enumerate(said):
        if words:
            raise PrivacyError(f"ranks: rank {rank} stopped, and all others with it: {words}")
