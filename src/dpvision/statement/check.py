"""Results of ``verify``'s checks."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Check:
    """The result of one check. Failed and unverified ones make a statement that must not be relied
    on.
    """

    name: str
    status: Literal["ok", "failed", "not checked", "declared", "unverified"]
    detail: str


def ok(name: str, detail: str) -> Check:
    """Return a passed check."""
    return Check(name, "ok", detail)


def failed(name: str, detail: str) -> Check:
    """Return a failed check: the statement, or a file behind it, contradicts its claim."""
    return Check(name, "failed", detail)


def not_checked(name: str, why: str) -> Check:
    """Return a check that could not be made."""
    return Check(name, "not checked", why)


def listed(name: str, what: str) -> Check:
    """Return what the statement declares: no file of it alone determines these values."""
    return Check(name, "declared", what)


def unverified(name: str, why: str) -> Check:
    """Return a figure that could not be recomputed."""
    return Check(name, "unverified", why)


class Tally:
    """Values that were compared, and the places of the wrong ones."""

    def __init__(self) -> None:
        self.number, self.wrong = 0, list[str]()

    def count(self, where: str, right: bool) -> None:
        self.number += 1
        if not right:
            self.wrong.append(where)

    def check(self, name: str, passed: str, why: str) -> Check:
        more = ", ..." if len(self.wrong) > 5 else ""
        return (
            failed(name, f"{why}: {', '.join(self.wrong[:5])}{more}")
            if self.wrong
            else ok(name, f"{self.number} {passed}")
        )


def compared(name: str, pairs: Iterable[tuple[str, Any, Any]], passed: str) -> Check:
    """Return one check of several equalities, given as (name, stated, found)."""
    wrong = [
        f"{what}: {stated!r} stated, {found!r} found"
        for what, stated, found in pairs
        if not same(stated, found)
    ]
    return failed(name, "; ".join(wrong)) if wrong else ok(name, passed)


def differences(stated: Any, found: Any, where: str = "") -> list[str]:
    """Return the places where two nested values differ, such as "history.lineage[0].run_id"; floats
    agree within 1e-6 of their value.
    """
    if isinstance(stated, dict) and isinstance(found, dict):
        names = [f"{where}.{key}".lstrip(".") for key in stated.keys() ^ found.keys()]
        return names + [
            d
            for key in stated.keys() & found.keys()
            for d in differences(stated[key], found[key], f"{where}.{key}".lstrip("."))
        ]
    if isinstance(stated, list) and isinstance(found, list) and len(stated) == len(found):
        return [
            d
            for i, pair in enumerate(zip(stated, found, strict=True))
            for d in differences(*pair, f"{where}[{i}]")
        ]
    if isinstance(stated, float) and isinstance(found, float):
        return [] if math.isclose(stated, found, rel_tol=1e-6, abs_tol=1e-12) else [where]
    return (
        [] if stated == found and isinstance(stated, bool) == isinstance(found, bool) else [where]
    )


def same(stated: Any, found: Any) -> bool:
    """Return whether two values are equal, numbers up to rounding."""
    numbers = (
        isinstance(stated, int | float)
        and isinstance(found, int | float)
        and not isinstance(stated, bool)
    )
    return math.isclose(stated, found, rel_tol=1e-9, abs_tol=1e-15) if numbers else stated == found
