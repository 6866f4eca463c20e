"""Mistakes in choosing by a private score: planted, and caught. The ids are those of
docs/pitfalls.md, section "Choosing".
"""

import math

from scipy import integrate, stats

from dpvision.privacy import accountant
from dpvision.privacy.events import Composed, Event, Gaussian, NoRelease, Selected
from dpvision.privacy.selection import Selection

from .planting import planted

NOISE, MEAN, DELTA = 3.0, 10.0, 1e-3


def check_law_of_the_best() -> None:
    """Runs that release their scores only: the best of Poisson many has density MEAN exp(MEAN (F -
    1)) f, and its delta is an integral.
    """
    event = Selection(MEAN, None, 1, 1.0).event(NoRelease(), NOISE)
    stated = accountant.epsilon(event, DELTA)

    def density(y: float, centre: float) -> float:
        return (
            MEAN
            * math.exp(-MEAN * stats.norm.sf(y, centre, NOISE))
            * stats.norm.pdf(y, centre, NOISE)
        )

    for p, q in ((1.0, 0.0), (0.0, 1.0)):
        true = integrate.quad(
            lambda y: max(0.0, density(y, p) - math.exp(stated) * density(y, q)),  # noqa: B023
            -30,
            30,
            limit=400,
        )[0]
        assert true <= DELTA, "the best of many runs tells more than was stated"


def check_score_is_paid_for() -> None:
    run = Gaussian(50.0)
    loud, quiet = (
        accountant.epsilon(Selection(MEAN, None, 1, ratio).event(run, 50.0), DELTA)
        for ratio in (1e-3, 1e3)
    )
    assert loud > 100 > quiet, "a score without noise is free"


def test_selection_as_one_run() -> None:
    check_law_of_the_best()

    def of_one_run(self: Selection, run: Event, noise_multiplier: float, records: int = 1) -> Event:
        return Composed((run, Gaussian(self.score_noise_ratio * noise_multiplier / records)))

    with planted(Selection, "event", of_one_run, "tells more"):
        check_law_of_the_best()


def test_score_unpaid() -> None:
    check_score_is_paid_for()

    def without_score(
        self: Selection, run: Event, noise_multiplier: float, records: int = 1
    ) -> Event:
        return Selected(run, self.mean_runs, math.inf)

    with planted(Selection, "event", without_score, "is free"):
        check_score_is_paid_for()
