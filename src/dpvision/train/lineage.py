"""What a run inherits from the weights it starts from, and which parents a private run refuses (guarantee.md, rule 7)."""

from typing import Any

from dpvision.data.store import Store
from dpvision.errors import PrivacyError


def inherit(parent: dict[str, Any], store: Store, guarantee: str) -> list[dict[str, Any]]:
    """Lineage taken over from a parent's manifest.

    Args:
        parent: the parent checkpoint's manifest.
        store: the store this run trains on.
        guarantee: this run's PrivacyConfig.guarantee.

    Returns:
        The parent's entries, oldest first; the statement adds up those that share a store.

    Raises:
        PrivacyError: this run is private and the parent touched this store, or any private one, without a guarantee.
    """
    lineage = parent["lineage"]
    if guarantee != "dp":
        return lineage
    for entry in lineage:
        if entry["guarantee"] is not None:
            continue
        if entry["visibility"] == "private" or entry["store_id"] == store.store_id:
            raise PrivacyError(
                f"lineage: init_from touched store {entry['store_id'][:8]} ({entry['visibility']}) without a guarantee; expected a parent "
                "trained on public stores or with differential privacy. Start from another checkpoint, or from scratch."
            )
    return lineage
