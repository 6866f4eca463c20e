"""A head by one private gradient step (Mehta et al. 2022, figure 1b).

From a head of zeros one step of Adam is -rate x sign(g), and LAMB's is the same, since a weight of
norm zero gets the trust ratio 1. No learning rate has to be tuned: all scores are proportional to
it, so the predicted class does not depend on it.
"""

from dpvision.adapt.feature_stream import FeatureStream, Head
from dpvision.adapt.gradient import Loss
from dpvision.adapt.heads.kind import Fitted, HeadKind, Task
from dpvision.adapt.heads.many_steps import many_steps
from dpvision.adapt.release import Releases
from dpvision.config import OptimConfig
from dpvision.config.heads import OneStep
from dpvision.errors import ConfigError


def one_step(
    stream: FeatureStream,
    releases: Releases,
    *,
    loss: Loss = "sigmoid",
    optim: OptimConfig = OneStep.optim,
    bias: float = OneStep.own_bias,
) -> Head:
    """Train a head by one gradient step from zero weights.

    Args:
        releases: must have exactly one step left. The paper uses a full batch.
        optim: lamb and adamw step by the sign of the noisy gradient, sgd by the gradient itself.
            The rate changes no prediction.
        bias: fixed, the same for all classes. It has no effect with the softmax loss.

    Raises:
        ConfigError: more than one step is left, or the loss does not fit the labels.
    """
    if releases.left != 1:
        raise ConfigError(
            f"adapt: steps={releases.left}; expected 1 for one_step. Plan one step, or use "
            "many_steps."
        )
    return many_steps(stream, releases, loss=loss, optim=optim, bias=bias).last


class _OneStep(HeadKind):
    name = "one_step"
    most_releases = 1

    def fit(self, task: Task) -> Fitted:
        own: OneStep = task.settings
        assert own.loss != "auto" and own.bias is not None
        optim = task.config.optim
        return Fitted(
            one_step(task.stream, task.releases, loss=own.loss, optim=optim, bias=own.bias)
        )


ONE_STEP = _OneStep()
