"""``ClippedSum``: the secret sum of clipped gradients, in which a record is at most once; and the
seals that tell what the mechanism made from what was made or edited by hand.

A seal is a private attribute that ``dataclasses.replace`` and a constructor do not carry over. It
holds the tensors and how often each was written to, which torch counts, so checking it reads no
values and no device waits. It finds mistakes; docs/threat_model.md has its limits.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from dpvision.errors import PrivacyError


class Sealed(Protocol):
    """``ClippedSum`` or ``DPGradient``."""

    @property
    def grads(self) -> dict[str, Tensor]: ...


T = TypeVar("T", bound=Sealed)


def seal(made: T) -> T:
    """Seal an object and return it. Whoever calls this vouches for its contract: for this package,
    and for tests.

    Raises:
        PrivacyError: under ``torch.inference_mode``, whose tensors do not count how often they are
            written to.
    """
    if any(value.is_inference() for value in made.grads.values()):
        raise PrivacyError(
            f"clip: a {type(made).__name__} computed under torch.inference_mode; expected "
            "tensors that count the writes to them. Use torch.no_grad."
        )
    object.__setattr__(
        made, "_seal", [(name, value, value._version) for name, value in made.grads.items()]
    )
    return made


def require_seal(made: Sealed, where: str, remedy: str) -> None:
    """Refuse an object that was not sealed, or whose tensors were replaced or written to since.

    Raises:
        PrivacyError: with the last sentence ``remedy``.
    """
    sealed: list[tuple[str, Tensor, int]] | None = getattr(made, "_seal", None)
    if (
        sealed is None
        or len(sealed) != len(made.grads)
        or any(
            made.grads.get(name) is not value or value._version != writes
            for name, value, writes in sealed
        )
    ):
        raise PrivacyError(
            f"{where}: a {type(made).__name__} made or edited by hand; expected one as it was "
            f"returned. {remedy}"
        )


_REMEDY = "Use clipped_sum, and + or ClippedSum.add_up for several physical batches."


def no_records() -> np.ndarray:
    """Return no ids."""
    return np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, eq=False, repr=False)
class ClippedSum:
    """Sum of clipped gradients of some records: secret, and the only thing that ``noise.privatize``
    accepts.

    Made by ``clipped_sum``, ``+`` and ``add_up`` only: one that is made, replaced or edited by hand
    is refused (``seal``).
    """

    grads: dict[str, Tensor]
    """Sum by parameter name, float32 for one physical batch, float64 for several; a tied parameter
    appears once, under its first name.
    """
    num_records: int
    """Valid records in the sum (secret)."""
    norms_B: Tensor
    """Gradient norms of the valid records before the clip, float32; not finite for a record that
    was left out; empty without clipping.
    """
    losses_B: Tensor
    """Losses of the valid records, float32."""
    max_grad_norm: float | None
    """The clipping norm C, which must be the plan's; None if not clipped."""
    record_id_B: np.ndarray = field(default_factory=no_records, repr=False)
    """Ids of the valid records of this process, ascending and all different, int64 on the CPU
    (secret); empty without clipping.
    """
    rows: int | None = 0
    """Rows of the passes at which a record's bits were checked (``clip.check_bits``); None if they
    were not, 0 without passes.
    """
    step: int | None = None
    """Step of the key of its losses, the only one that it may be released in; None without
    passes.
    """

    def __repr__(self) -> str:
        return "<secret sum of clipped gradients>"

    def __add__(self, other: "ClippedSum") -> "ClippedSum":
        return _added(
            {name: value.to(torch.float64, copy=True) for name, value in self.grads.items()},
            self.max_grad_norm,
            [self, other],
            first=1,
        )

    @staticmethod
    def zeros(model: nn.Module, max_grad_norm: float | None) -> "ClippedSum":
        """Return the empty sum for the trained parameters of ``model``, in float64."""
        return ClippedSum.add_up(model, max_grad_norm, [])

    @staticmethod
    def add_up(
        model: nn.Module, max_grad_norm: float | None, parts: Iterable["ClippedSum"]
    ) -> "ClippedSum":
        """Add up the sums of several physical batches in float64, in place, one at a time, so that
        each may be freed.

        In float32 the rounding of a large batch's total would exceed a record's contribution.

        Raises:
            PrivacyError: the sums have different clipping norms, parameters or steps, a record is
                in two of them, or one was made or edited by hand.
        """
        params = {name: p for name, p in model.named_parameters() if p.requires_grad}
        grads = {
            name: torch.zeros_like(p, dtype=torch.float64, requires_grad=False)
            for name, p in params.items()
        }
        return _added(grads, max_grad_norm, parts)


def once(record_id_B: np.ndarray) -> np.ndarray:
    """Return ids in ascending order.

    Raises:
        PrivacyError: one occurs twice.
    """
    ids = np.sort(record_id_B, kind="stable")  # linear for parts in order, such as those of a sum
    ids.flags.writeable = False
    if (ids[1:] == ids[:-1]).any():
        raise PrivacyError(
            "clip: a record is twice in a sum, and would move it by twice the clipping norm; "
            "expected another record in each valid row of a step. Give each record its own id, "
            "add each batch once, and put several images of one record into one row, as its "
            "views."
        )
    return ids


def _added(
    grads: dict[str, Tensor],
    max_grad_norm: float | None,
    parts: Iterable[ClippedSum],
    *,
    first: int = 0,
) -> ClippedSum:
    """Add the gradients of ``parts[first:]`` to ``grads`` in place; counts, norms, losses and ids
    are those of all parts.
    """
    count, ids = 0, [no_records()]
    norms: list[Tensor] = []
    losses: list[Tensor] = []
    rows: int | None = 0
    step: int | None = None
    for part in parts:  # not enumerate, which would hold a part while the next one is made
        if part.max_grad_norm != max_grad_norm:
            raise PrivacyError(
                f"clip: a sum clipped to {max_grad_norm} and one clipped to "
                f"{part.max_grad_norm}; expected the same. Use the plan's max_grad_norm for all."
            )
        if rows and part.rows and rows != part.rows:
            raise PrivacyError(
                f"clip: sums of passes of {rows} and of {part.rows} rows; expected the same: a "
                "record's bits depend on it. Give one rows= to every clipped_sum of a run."
            )
        require_seal(part, "clip", _REMEDY)
        if part.grads.keys() != grads.keys() or any(
            part.grads[name].shape != value.shape for name, value in grads.items()
        ):
            raise PrivacyError(
                "clip: sums over parameters of other names or shapes; expected the same: a "
                "number that is added to every element moves the sum by more than the clipping "
                "norm. Add sums of one model, with the same parameters trained."
            )
        if None not in (step, part.step) and step != part.step:
            raise PrivacyError(
                f"clip: sums of steps {step} and {part.step}; expected one step. Give "
                "clipped_sum the StepKey of the step that was drawn."
            )
        rows = None if rows is None or part.rows is None else rows or part.rows
        step = part.step if step is None else step
        if len(norms) >= first:
            for name, value in grads.items():
                value.add_(part.grads[name])
        count += part.num_records
        norms.append(part.norms_B)
        losses.append(part.losses_B)
        ids.append(part.record_id_B)
        del part  # its gradients, 4 bytes a parameter, would live through the next pass
    device = next(iter(grads.values())).device if grads else torch.device("cpu")
    empty = torch.zeros(0, device=device)
    joined = torch.cat(norms) if norms else empty, torch.cat(losses) if losses else empty
    return seal(
        ClippedSum(grads, count, *joined, max_grad_norm, once(np.concatenate(ids)), rows, step)
    )
