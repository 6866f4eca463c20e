"""Seals: what the mechanism made is told from what was made or edited by hand.

A seal is a private attribute that ``dataclasses.replace`` and a constructor do not carry over. It
holds the tensors and how often each was written to, which torch counts, so checking it reads no
values and no device waits. It finds mistakes; docs/threat_model.md has its limits.
"""

from typing import Protocol, TypeVar

from torch import Tensor

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
