"""Text and JSON of ``dpvision plan --images``."""

from dataclasses import asdict
from typing import Any

from dpvision.cli.output import pairs, table
from dpvision.plan.advice import Advice, Question, advise
from dpvision.privacy.printed import up, up_delta
from dpvision.recipes import get_recipe


def answer(question: Question) -> tuple[dict[str, Any], str]:
    """The advice as a dict ready for JSON and as text."""
    found = advise(question, get_recipe)
    return {
        "question": asdict(question) | {"delta": question.delta},
        "advice": asdict(found),
    }, _text(question, found)


def _text(q: Question, a: Advice) -> str:
    drawn = a.draws is not None
    whose = "a person" if q.unit.is_person else "an image"
    whose += f" ({q.images_of_a_person} images at most)" if q.unit.is_person and not drawn else ""
    hours = None if a.hours is None else f"{a.hours:.2g} ({a.hours_how})"
    lines = [
        f"Recommended: {a.way}.",
        f"  {a.why}",
        pairs(
            {
                "guarantee": f"epsilon {up(q.epsilon)} at delta {up_delta(q.delta)} for {whose}",
                "score": a.score,
                "hours": hours,
            }
        ),
        "Commands (STORE: from `dpvision data import`)",
        *(f"  {command}" for command in a.commands),
        *([draws_table(a.draws)] if a.draws else []),
        "Evidence",
        *(f"  {line}" for line in a.evidence),
        "What would change it",
        pairs(a.more),
        *(f"Note: {warning}." for warning in a.warnings),
        "Rules and their limits: docs/plan.md.",
    ]
    return "\n".join(lines)


def draws_table(rows: list[dict[str, Any]]) -> str:
    """Return the rows of ``planner.compare_draws`` as text."""
    columns = ("drawn", "images a step", "noise multiplier", "noise / batch")
    return table(
        "at this epsilon for a person, and as many steps",
        columns,
        [tuple(row.values()) for row in rows],
    )
