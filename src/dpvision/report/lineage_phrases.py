"""Sentences about lineage entries: where weights come from and what protects that data."""

from typing import Any

from dpvision.privacy.plan import DPPlan
from dpvision.privacy.printed import up
from dpvision.report.numbers import short

PROCEDURAL = "Apache-2.0 (procedural)"
"""Licence of textures and scenes rendered by dpvision."""


def entry_text(entry: dict[str, Any], *, own: bool) -> str:
    """Return one or two sentences about an entry of the statement's lineage.

    Args:
        own: whether it is the last entry, the run's own.
    """
    store_id, guarantee = entry["store_id"], entry["guarantee"]
    kind, _, name = store_id.partition(":")
    who = "This run" if own else "An earlier run"
    licence = f" Licence: {entry['licence'] or 'not recorded'}." if entry["visibility"] == "public" else ""
    if guarantee is not None:
        plan = DPPlan.from_dict(guarantee["plan"])
        # Of the plan: an entry of an older version has the epsilon of the executed steps.
        epsilon = plan.epsilon or 0.0 if plan.stated_steps(guarantee["steps"]) else 0.0
        steps = f"{guarantee['steps']:,} of {plan.steps:,} planned" if guarantee["steps"] < plan.steps else f"{plan.steps:,}"
        return (
            f"{who}, on {entry['visibility']} store {store_id[:12]}: epsilon {up(epsilon, 2)} at delta "
            f"{short(guarantee['delta'])}, {steps} steps.{licence}"
        )
    if entry["visibility"] == "public" and entry["licence"] == PROCEDURAL and not entry["declared"]:
        made = f"{name}, computed by dpvision from textures" if kind == "weights" else f"store {store_id[:12]}, rendered by dpvision"
        return f"Procedural images: {made}; no private data, so no guarantee is needed.{licence}"
    if kind == "weights":
        return f"Published weights {name}.{licence}"
    if kind == "images":
        return f"{who}, on {entry['visibility']} images {name}, without a guarantee.{licence}"
    if entry["visibility"] == "public":
        return f"{who}, on public store {store_id[:12]}, whose images need no protection.{licence}"
    return f"{who}, on private store {store_id[:12]}, without a guarantee."
