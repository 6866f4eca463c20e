"""How a mistake is planted and what counts as catching it.

Every test of this folder has the same shape: a check passes on the code as it is; the mistake is planted in place of one name; the same
check must now fail, by its own assertion or by an error of the product's, with the expected words. An error of another kind (a
TypeError of a badly written mutant, say) is not a catch.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dpvision.errors import DPVisionError

CAUGHT = (AssertionError, DPVisionError)


@contextlib.contextmanager
def caught(match: str) -> Iterator[None]:
    """The block must fail with words that ``match``."""
    with pytest.raises(CAUGHT, match=match):
        yield


@contextlib.contextmanager
def planted(target: Any, name: str, mistake: Any, match: str) -> Iterator[None]:
    """``target.name`` is ``mistake`` within the block, which must then fail with words that ``match``."""
    with pytest.MonkeyPatch.context() as patch, caught(match):
        patch.setattr(target, name, mistake)
        yield


def assert_refused(action: Callable[[], object], what: str) -> None:
    """``action`` must end in an error of the product's."""
    try:
        action()
    except DPVisionError:
        return
    raise AssertionError(f"{what} was accepted")
