"""What a run inherits from the weights it starts from, and which parents a private run refuses (guarantee.md, rule 7)."""

from typing import Any

from dpvision.data.store import Store
from dpvision.errors import PrivacyError
from dpvision.privacy.plan import DPPlan


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
                f"lineage: the parent touched store {entry['store_id'][:8]} ({entry['visibility']}) without a guarantee; expected a parent "
                "trained on public stores or with differential privacy. Start from another checkpoint, or from scratch."
            )
    return lineage


def own_entry(plan: DPPlan, store: Store, run_id: str | None, steps: int) -> dict[str, Any]:
    """Lineage entry of a run itself, after ``steps`` charged steps of ``plan`` on ``store``."""
    guarantee = None
    if plan.guarantee == "dp":
        spent = plan.spent(steps)
        guarantee = {"epsilon": spent.epsilon, "epsilon_rdp": spent.epsilon_rdp, "delta": plan.delta, "steps": steps}
    return {
        "store_id": store.store_id, "visibility": store.visibility, "licence": store.licence, "run_id": run_id, "guarantee": guarantee,
        **({"deduplicated": store.meta["deduplicated"]} if "deduplicated" in store.meta else {}),
    }  # fmt: skip


def public_weights(name: str, licence: str | None) -> dict[str, Any]:
    """Lineage entry of weights that somebody published: they saw no private picture, as far as their publisher says.

    Args:
        name: as tables print the encoder, e.g. "timm:vit_base_patch16_224.augreg_in21k"; no path of the operator's machine.
        licence: as the publisher states it; None where nothing is stated.
    """
    return {"store_id": f"weights:{name}", "visibility": "public", "licence": licence, "run_id": None, "guarantee": None}
