"""Reading the records of a user's data set, each alone, for ``own_loop``.

Legend: B records.
"""

import contextlib
import functools
import logging
import random
from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten
from torch.utils.data import DataLoader, Dataset

from dpvision.data.batch import Batch
from dpvision.data.keys import StepKey
from dpvision.errors import OPERATOR_ONLY, DataError, PrivacyError

_LOG = logging.getLogger("dpvision")


@dataclass(frozen=True)
class Form:
    """What a record is: the structure of its batch, and its tensors' shapes and types."""

    spec: TreeSpec
    tensors: tuple[tuple[torch.Size, torch.dtype], ...]

    @classmethod
    def of(cls, batch: Any) -> "tuple[Form, list[Tensor]]":
        """Return the form of a batch as the collate function gives it, and its tensors."""
        values, spec = tree_flatten(batch)
        wrong = [type(value).__name__ for value in values if not isinstance(value, Tensor)]
        if wrong or len({len(value) if value.ndim else -1 for value in values}) != 1:
            raise TypeError(
                f"a batch of {', '.join(wrong) or 'tensors of several lengths'} where tensors with "
                "one row per record are expected"
            )
        return cls(spec, tuple((value.shape[1:], value.dtype) for value in values)), values

    def zeros(self) -> list[Tensor]:
        """Return a record of zeros."""
        return [torch.zeros(1, *shape, dtype=dtype) for shape, dtype in self.tensors]


def as_batch(values: list[Tensor]) -> Batch:
    """Return tensors as a batch for ``dp``, of valid records with ids from 1."""
    num = len(values[0])
    kind = _records_type(len(values))
    return kind(torch.arange(1, num + 1), torch.ones(num, dtype=torch.bool), *values)


@functools.cache
def _records_type(num_tensors: int) -> Any:
    names = [f"value_{i}" for i in range(num_tensors)]
    return namedtuple("Records", ["record_id_B", "valid_B", *names])  # type: ignore[misc]


class _Job(NamedTuple):
    """A pass to read."""

    step: int
    places: np.ndarray
    form: Form | None
    """If None, that of the first record, which must be readable."""


class _Read(NamedTuple):
    """A pass as a worker read it."""

    form: Form
    values: list[Tensor]
    valid_B: Tensor
    error: str | None
    """Why the first of the records that are not valid is not."""


@dataclass(eq=False)
class _Records(Dataset[_Read]):
    """The data set by passes."""

    data: Any
    collate_fn: Callable[[list[Any]], Any]

    def __getitem__(self, job: _Job) -> _Read:
        # A record's random numbers are keyed by its position, so that its transforms draw the same
        # whatever other records are read, and by whichever worker.
        keys = StepKey(0, job.step).bits(torch.from_numpy(job.places), "transform", 1)[:, 0]
        form, read, valid, error = job.form, list[list[Tensor]](), list[bool](), None
        with _random_state_kept():
            for place, number in zip(job.places.tolist(), keys.tolist(), strict=True):
                _set_seeds(number)
                try:
                    found, values = Form.of(self.collate_fn([self.data[place]]))
                    if found != (form or found):
                        raise ValueError(f"{found}; the first record has {form}")
                    valid.append(True)
                except Exception as failed:
                    if form is None:
                        raise
                    found, values = form, form.zeros()
                    valid.append(False)
                    error = error or f"record {place}: {type(failed).__name__}: {failed}"
                form = form or found
                read.append(values)
        assert form is not None
        values = [torch.cat(column) for column in zip(*read, strict=True)]
        return _Read(form, values, torch.tensor(valid), error)


@contextlib.contextmanager
def _random_state_kept() -> Iterator[None]:
    """Restore the global random numbers of Python, NumPy and torch afterwards."""
    python, numpy, pytorch = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(pytorch)


def _set_seeds(number: int) -> None:
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.default_generator.manual_seed(number)


def _as_read(read: Any) -> Any:
    return read


@dataclass(eq=False)
class Reader:
    """Reads the passes of a step with torch's ``DataLoader``."""

    form: Form
    num_records: int
    _jobs: list[_Job]
    _loader: DataLoader[_Read]
    _told: bool = False
    """Whether the operator was told of a record that contributes zero."""

    @classmethod
    def start(
        cls, data: Any, collate_fn: Callable[[list[Any]], Any], workers: int, public_batch: Any
    ) -> Self:
        """Start the workers, and read a record or two of the first step to see that all is well.

        Raises:
            DataError: the first record cannot be read, or differs when it is read in other company.
        """
        jobs = list[_Job]()
        loader = DataLoader(
            _Records(data, collate_fn),
            batch_size=None,
            sampler=jobs,
            num_workers=workers,
            persistent_workers=workers > 0,
            collate_fn=_as_read,
            generator=torch.Generator(),  # else it takes a number of the global one at each step
        )
        form = None
        try:
            if public_batch is not None:
                form = Form.of(public_batch)[0]
            jobs[:] = [_Job(0, np.array([0]), form)]
            (alone,) = loader
            if alone.error is not None:
                raise ValueError(alone.error)
            jobs[:] = [_Job(0, np.array([len(data) - 1, 0]), alone.form)]
            (beside,) = loader
        except Exception as error:
            raise DataError(
                f"loop: {OPERATOR_ONLY}the first record cannot be used "
                f"({str(error).splitlines()[-1]}); expected tensors or numbers, alone, in tuples, "
                "lists or dicts. Change the data set, collate_fn= or public_batch=."
            ) from error
        pairs = zip(alone.values, beside.values, strict=True)
        if not all(bool(((a[0] == b[-1]) | (a[0] != a[0])).all()) for a, b in pairs):
            raise PrivacyError(
                "loop: the first record differs when it is read after another one; expected a "
                "function of the record and of the global random numbers of torch, NumPy or "
                "Python, which are keyed by record. Use no generator or counter of the data set's "
                "own."
            )
        return cls(alone.form, len(data), jobs, loader)

    def read(self, step: int, parts: list[np.ndarray]) -> Iterator[Batch]:
        """Yield the batch of each part of a step's records, on the CPU."""
        self._jobs[:] = [_Job(step, part, self.form) for part in parts]
        for part, found in zip(parts, self._loader, strict=True):
            if found.error is not None and not self._told:
                _LOG.warning("loop: %s%s; it contributes zero", OPERATOR_ONLY, found.error)
                self._told = True
            yield as_batch(found.values)._replace(
                record_id_B=torch.from_numpy(part), valid_B=found.valid_B
            )
