"""The epsilon of a run under way, for display."""

from dpvision.privacy.composition import Part, parts_of, total_epsilon, unit_epsilon
from dpvision.privacy.plan import DPPlan
from dpvision.privacy.printed import up


class EpsilonMeter:
    """Epsilon of a run that was charged some steps, for display: that of its whole plan from the
    first step on (``plan.stated_steps``).

    Args:
        behind: the private runs on the same store that the weights come from.
    """

    def __init__(self, plan: DPPlan, behind: tuple[Part, ...] = ()) -> None:
        self._plan, self._behind = plan, behind
        self._known: dict[tuple[bool, int], tuple[float, float | None]] = {}

    def at_most(self, steps: int) -> float | None:
        """Epsilon that is stated after ``steps`` steps, with all runs behind the weights; None for
        a plan without a guarantee.
        """
        return self._bound(steps)[0]

    def this_run_at_most(self, steps: int) -> float | None:
        """The same for this run alone."""
        return self._bound(steps, alone=True)[0]

    def unit_at_most(self, steps: int) -> float | None:
        """As ``at_most``, for a unit (person); None if no units are declared."""
        return self._bound(steps)[1]

    def entry(self, steps: int) -> dict[str, int | float | None]:
        """Public log entry for ``steps`` steps."""
        line: dict[str, int | float | None] = {
            "step": steps,
            "epsilon_at_most": self.at_most(steps),
        }
        line |= (
            {"unit_epsilon_at_most": self.unit_at_most(steps)} if self._plan.unit.is_person else {}
        )
        return line | ({"this_run_at_most": self.this_run_at_most(steps)} if self._behind else {})

    def text(self, steps: int) -> str:
        """The same as text, with a person's epsilon first if people are declared."""
        if self._plan.guarantee != "dp":
            return "no guarantee"
        said = f"epsilon <= {up(self.at_most(steps), 2)}"
        if (unit := self.unit_at_most(steps)) is not None:
            image = (
                ""
                if self._plan.unit.draws_people
                else f" ({up(self.at_most(steps), 2)} for an image)"
            )
            said = f"epsilon <= {up(unit, 2)} for a person{image}"
        return said + (
            f" with the runs before (this run {up(self.this_run_at_most(steps), 2)})"
            if self._behind
            else ""
        )

    def _bound(self, steps: int, *, alone: bool = False) -> tuple[float | None, float | None]:
        if self._plan.guarantee != "dp":
            return None, None
        stated = self._plan.stated_steps(steps)
        if (alone, stated) not in self._known:
            parts = parts_of([*(() if alone else self._behind), (self._plan, stated)])
            self._known[alone, stated] = total_epsilon(parts)[0], unit_epsilon(parts)
        return self._known[alone, stated]
