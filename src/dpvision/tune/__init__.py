"""Choose settings by several runs, in one of four ways whose price is known first
(docs/tuning.md).

    study = plan_study(Question("public", ("optim.learning_rate=3,10,30",)), config, Path("runs/a"))
    best = search(study).best
"""

from dpvision.tune.study import Question, Study, plan_study
from dpvision.tune.trials import Found, Trial, search

__all__ = ["Found", "Question", "Study", "Trial", "plan_study", "search"]
