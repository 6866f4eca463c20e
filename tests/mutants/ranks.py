"""Two ranks as two threads of this process, whose collective calls meet at a barrier: seconds less
than two processes.
"""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dpvision.train.distributed import Group

_TIMEOUT_S = 900
_REDUCE = {
    dist.ReduceOp.SUM: torch.sum,
    dist.ReduceOp.MIN: torch.amin,
    dist.ReduceOp.MAX: torch.amax,
}


class Ranks:
    """Stands in for torch.distributed's ``all_reduce`` and ``broadcast`` among ``size`` threads."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=_TIMEOUT_S)
        self._slots: list[Any] = [None] * size
        self._local = threading.local()

    def run(self, work: Callable[[Group], Any]) -> list[Any]:
        """``work(group)`` on every rank at once; results by rank. The first error, if there is one,
        is raised here.
        """
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []

        def rank(number: int) -> None:
            self._local.rank = number
            try:
                results[number] = work(Group(number, self.size, torch.device("cpu")))
            except threading.BrokenBarrierError:
                pass  # another rank failed; its error is raised below
            except BaseException as error:
                errors.append(error)
                self._barrier.abort()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "all_reduce", self._all_reduce)
            patch.setattr(dist, "broadcast", self._broadcast)
            threads = [threading.Thread(target=rank, args=(number,)) for number in range(self.size)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if errors:
            raise errors[0]
        assert not self._barrier.broken, "the ranks made different numbers of collective calls"
        return results

    def _all(self, tensor: Tensor) -> list[Tensor]:
        self._slots[self._local.rank] = tensor.clone()
        self._barrier.wait()
        values = list(self._slots)
        self._barrier.wait()
        return values

    def _all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        tensor.copy_(_REDUCE[op](torch.stack(self._all(tensor)), 0))

    def _broadcast(self, tensor: Tensor, src: int) -> None:
        tensor.copy_(self._all(tensor)[src])
