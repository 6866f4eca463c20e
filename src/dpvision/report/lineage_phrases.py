"""Sentences about lineage entries: where weights come from and what protects that data."""

from typing import Any

from dpvision.data.store import SHARED_KEPT
from dpvision.privacy.plan import DPPlan
from dpvision.privacy.printed import up, up_delta

PROCEDURAL = "Apache-2.0 (procedural)"
"""Licence of textures and scenes rendered by dpvision."""
SHARED_IMAGES = (
    "Who has an image that was found under two persons: the import kept each such image for the "
    "first of them, as the operator asked. What remains of the second person depends on the "
    "first."
)
TWINS = (
    "Whether a public image was also among the private ones: a public store in the lineage was "
    "cleared of such images, and the images missing from it reveal them. For an image without a "
    "public twin the guarantee holds in full, because it does not change that store."
)


def entry_text(entry: dict[str, Any], *, own: bool) -> str:
    """Return one or two sentences about an entry of the statement's lineage.

    Args:
        own: whether it is the last entry, the run's own.
    """
    store_id, guarantee = entry["store_id"], entry["guarantee"]
    kind, _, name = store_id.partition(":")
    who = "This run" if own else "An earlier run"
    licence = (
        f" Licence: {entry['licence'] or 'not recorded'}."
        if entry["visibility"] == "public"
        else ""
    )
    if guarantee is not None:
        plan = DPPlan.from_dict(guarantee["plan"])
        # Of the plan: an entry of an older version has the epsilon of the executed steps.
        said = plan.unit.stated(plan.epsilon or 0.0, plan.unit_epsilon)
        epsilon = said.epsilon if plan.stated_steps(guarantee["steps"]) else 0.0
        whom = (
            " for a person"
            if said.of_person
            else ""
            if plan.num_units is None
            else " for a single image"
        )
        steps = (
            f"{guarantee['steps']:,} of {plan.steps:,} planned"
            if guarantee["steps"] < plan.steps
            else f"{plan.steps:,}"
        )
        return (
            f"{who}, on {entry['visibility']} store {store_id[:12]}: epsilon "
            f"{up(epsilon, 2)}{whom} at delta {up_delta(guarantee['delta'])}, {steps} "
            f"steps.{licence}"
        )
    if entry["visibility"] == "public" and entry["licence"] == PROCEDURAL and not entry["declared"]:
        made = (
            f"{name}, computed by dpvision from textures"
            if kind == "weights"
            else f"store {store_id[:12]}, rendered by dpvision"
        )
        return f"Procedural images: {made}; no private data, so no guarantee is needed.{licence}"
    if kind == "weights":
        return f"Published weights {name}.{licence}"
    if kind == "images":
        return f"{who}, on {entry['visibility']} images {name}, without a guarantee.{licence}"
    if entry["visibility"] == "public":
        return f"{who}, on public store {store_id[:12]}, whose images need no protection.{licence}"
    return f"{who}, on private store {store_id[:12]}, without a guarantee."


def curated(lineage: list[dict[str, Any]]) -> list[str]:
    """Return what the guarantee does not cover because images were removed from a store, or given
    to one of two persons, by others.
    """
    return [
        *([SHARED_IMAGES] if any(entry.get(SHARED_KEPT) for entry in lineage) else []),
        *([TWINS] if any(entry["deduplicated"] for entry in lineage) else []),
    ]
