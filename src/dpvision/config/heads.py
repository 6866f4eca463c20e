"""Settings of a private linear head on frozen features (``dpvision.adapt``, docs/heads.md).

Each kind of head has a class of its own settings, entered in ``HEADS``; what it does is in
``adapt.fit.KINDS``. ``HeadConfig`` holds one of them beside what all heads share. In files and on
the command line the settings of a head stand in one list: "model.bias", whatever value holds it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Self

from dpvision.config.checks import check_choices, require
from dpvision.config.optim import LAMB_EPS, OptimConfig
from dpvision.config.plain import flat

Loss = Literal["auto", "sigmoid", "softmax"]
_CONSTANT_RATE: dict[str, Any] = {"weight_decay": 0.0, "schedule": "constant"}


@dataclass(frozen=True)
class FrozenEncoderConfig:
    """A public encoder by name; it is not trained."""

    kind: Literal["frozen"] = "frozen"
    spec: str | None = None
    """Argument of ``encoders.open.open_encoder``: a run folder, timm:NAME@FILE, patches, ... May be
    a path, so never in a statement.
    """
    pooling: str | None = None
    """Pooling of the encoder's features: mean, 2x2, cls, stages, ...; if None, its default."""
    image_size: int = 0
    """Side of the images in pixels, for encoders that take any; 0 for the encoder's own. A run's
    config has the size used.
    """
    width: int = 0
    """Feature dimension; set when the encoder is opened, 0 before."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision in which a network computes features. "auto": bfloat16 on a CPU with instructions
    for it (AVX512_BF16), else float32. A run's config has the precision used.
    """

    def __post_init__(self) -> None:
        check_choices(self)
        for name in ("image_size", "width"):
            value, remedy = getattr(self, name), "Leave it out for the encoder's own."
            require(value >= 0, "model.encoder", name, value, "0 or more", remedy)


@dataclass(frozen=True)
class HeadSettings:
    """A head's own settings and defaults. Each kind of head has a subclass in ``HEADS``."""

    summary: ClassVar[str] = ""
    """For lists of recipes."""
    steps: ClassVar[int] = 1
    """Default number of full-batch releases, over which the budget is divided without loss
    (docs/heads.md).
    """
    optim: ClassVar[OptimConfig] = OptimConfig(
        name="sgd", learning_rate=1.0, momentum=0.0, **_CONSTANT_RATE
    )
    """Default optimizer; not used by heads in closed form."""
    constant: ClassVar[float] = 0.0
    """Default of ``FeatureConfig.constant``."""
    threshold: ClassVar[float | None] = None
    """Score above which a class is predicted for multi-label records; None if scores only define an
    order: the scale of one_step's is arbitrary, and prototypes' compare classes.
    """
    one_label: ClassVar[bool] = False
    """Whether records must have one label each."""

    def __post_init__(self) -> None:
        check_choices(self)

    def check(self, model: "HeadConfig") -> None:
        """Refuse settings that do not fit the other settings of ``model``."""

    def settled(self, model: "HeadConfig") -> Self:
        """Return a copy with the head's own value for each setting left open."""
        return self


@dataclass(frozen=True)
class GradientSteps(HeadSettings):
    """Settings of heads that take gradient steps."""

    own_loss: ClassVar[Loss] = "auto"
    own_bias: ClassVar[float | None] = None
    loss: Loss = "auto"
    """Loss of the heads that take gradient steps: a binary loss per class (the paper), or one over
    all classes. 'auto': the head's own; for many_steps softmax, or sigmoid with multi_label.
    """
    bias: float | None = None
    """Fixed bias of those heads, the same for all classes. With the paper's -10 every class is
    unlikely at the start. If None, the head's own: for one_step -10, otherwise all classes start at
    probability 1 / num_classes.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        finite = self.bias is None or -math.inf < self.bias < math.inf
        require(finite, "model", "bias", self.bias, "a number", "The paper: -10.")

    def check(self, model: "HeadConfig") -> None:
        super().check(model)
        loss = self.own_loss if self.loss == "auto" else self.loss
        require(
            loss != "softmax" or not model.multi_label,
            "model",
            "loss",
            loss,
            "'sigmoid' with multi_label",
            "Use sigmoid: softmax assumes one class per record.",
        )

    def settled(self, model: "HeadConfig") -> Self:
        loss = self.own_loss if self.loss == "auto" else self.loss
        if loss == "auto":
            loss = "sigmoid" if model.multi_label else "softmax"
        bias = self.own_bias if self.bias is None else self.bias
        if bias is None:
            assert model.num_classes is not None
            bias = -math.log(model.num_classes - 1) if loss == "sigmoid" else 0.0
        return replace(self, loss=loss, bias=bias)


@dataclass(frozen=True)
class SeveralSteps(GradientSteps):
    """Settings of heads that take more than one step."""

    iterate: Literal["last", "average", "ema"] = "last"
    """Weights used as the head: the last, the mean over steps (the paper's algorithm 1), or a
    moving average (optim.ema_decay).
    """


@dataclass(frozen=True)
class Moments(HeadSettings):
    """Settings of heads that release moments of features, whose length needs a public bound."""

    feature_norm: float | None = None
    """Public norm to which longer features are clipped, for heads computed from moments without
    ``unit``.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        norm = self.feature_norm
        positive = norm is None or 0 < norm < math.inf
        require(positive, "model", "feature_norm", norm, "a positive number", "Use 1, or unit.")

    def check(self, model: "HeadConfig") -> None:
        super().check(model)
        unit, rule = model.features.unit, "True, or feature_norm, with head={!r}, which needs"
        require(
            unit or self.feature_norm is not None,
            "model",
            "unit",
            unit,
            f"{rule.format(model.head)} a public bound",
            "Leave it on.",
        )


@dataclass(frozen=True)
class OneStep(GradientSteps):
    """Settings of one gradient step."""

    summary = (
        "One full-batch step from a head of zeros, sigmoid loss, bias -10 (figure 1b): no "
        "hyperparameters to choose."
    )
    optim = OptimConfig(name="lamb", learning_rate=1e-3, eps=LAMB_EPS, **_CONSTANT_RATE)
    """eps is far below any noisy gradient, so the step is the sign of each coordinate."""
    own_loss = "sigmoid"
    own_bias: ClassVar[float] = -10.0
    """The paper's: every class starts with a probability near 0, which is right for most classes
    when there are many.
    """


@dataclass(frozen=True)
class ManySteps(SeveralSteps):
    """Settings of many gradient steps."""

    summary = (
        "60 to 500 full-batch steps of SGD with momentum from zeros, at a rate that follows from "
        "the plan (docs/heads.md)."
    )
    steps = 60
    own_loss: ClassVar[Loss] = "auto"
    own_bias: ClassVar[float | None] = None
    optim = OptimConfig(name="sgd", learning_rate=None, momentum=0.9, **_CONSTANT_RATE)
    constant = 0.1
    threshold: ClassVar[float | None] = 0.0
    init: Literal["zero", "lecun"] = "zero"
    """Initial weights of many_steps: zeros (the paper), or LeCun normal times ``init_scale``."""
    init_scale: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        scale = self.init_scale
        positive = 0 < scale < math.inf
        require(positive, "model", "init_scale", scale, "a positive number", "Use 1 for LeCun's.")


@dataclass(frozen=True)
class LeastSquares(Moments):
    """Settings of least squares."""

    summary = (
        "Ridge regression from one release of second moments (Mehta et al. 2023, arXiv 2211.13403)."
    )
    threshold = 0.5
    """It is fitted to zeros and ones."""


@dataclass(frozen=True)
class FeatureCovariance(SeveralSteps, Moments):
    """Settings of gradient steps on whitened features."""

    summary = (
        "A released covariance whitens the features, then softmax steps: DP-FC (arXiv 2211.13403), "
        "2 + 6 releases."
    )
    steps = 8
    optim = OptimConfig(name="sgd", learning_rate=2.0, momentum=0.0, **_CONSTANT_RATE)
    """The learning rate is in units of K d / steps (``adapt.heads.feature_covariance``)."""
    own_loss: ClassVar[Loss] = "softmax"
    own_bias: ClassVar[float | None] = 0.0
    threshold: ClassVar[float | None] = 0.0
    one_label = True


@dataclass(frozen=True)
class Prototypes(Moments):
    """Settings of class prototypes."""

    summary = (
        "The nearest noisy class mean, from one release: for few records and for rare classes."
    )


HEADS: dict[str, type[HeadSettings]] = {
    "one_step": OneStep,
    "many_steps": ManySteps,
    "least_squares": LeastSquares,
    "feature_covariance": FeatureCovariance,
    "prototypes": Prototypes,
}


@dataclass(frozen=True)
class AnyHead(ManySteps, FeatureCovariance):
    """Settings of 'auto', for whichever head is chosen: those that it does not read are refused."""

    one_label = False
    threshold = None

    def check(self, model: "HeadConfig") -> None:
        """Accept everything: the chosen head checks."""


def _settings_classes() -> Mapping[str, type[HeadSettings]]:
    return {"auto": AnyHead, **HEADS}


@dataclass(frozen=True)
class FeatureConfig:
    """What is done to each record's features first: functions of that record and public numbers."""

    centre: Literal["textures", "none"] = "textures"
    """Public point subtracted from every record's features first: the encoder's mean over
    procedural textures, or none.
    """
    public_store: str | None = None
    """Public store whose features' mean and spread standardise every record's, in place of
    ``centre`` (``adapt.public_statistics``). Its path stays confidential.
    """
    frequency_decay: float | None = None
    """For many_steps on features with spatial frequencies (patches): the energy of frequency f is
    divided by this to the power f; 1 leaves the features unchanged. If None, it follows from the
    noise (``adapt.defaults``).
    """
    unit: bool = True
    """Scale every record's features to length 1: a function of the record alone, at no privacy
    cost.
    """
    constant: float | None = None
    """A number appended to every record's features, so that the head has a trained bias; 0 for
    none. If None, the head's own: 0.1 for many_steps, otherwise 0.
    """

    def __post_init__(self) -> None:
        check_choices(self)
        constant, decay = self.constant, self.frequency_decay
        finite = constant is None or -math.inf < constant < math.inf
        remedy = "Use 0 for no trained bias."
        require(finite, "model", "constant", constant, "a number", remedy)
        inside = decay is None or 1 <= decay < math.inf
        require(inside, "model", "frequency_decay", decay, "1 or more", "Use 1 for none.")


@dataclass(frozen=True)
class ChoiceConfig:
    """How the head is chosen, if it is not named: by a private score, or by public numbers."""

    candidates: tuple[str, ...] = ()
    """Heads among which a private score chooses (docs/selection.md), under a single charge for all;
    or settings of ``head``, each as 'part.name=value part.name=value' with values in JSON. If
    empty, ``head`` is used.
    """
    selection_runs: float = 10.0
    """Mean of the secret number of runs, of which the best is released."""
    selection_shape: float | None = 1.0
    """Shape of that number's distribution: 1 is geometric, 0 logarithmic, None Poisson, which may
    give no run at all.
    """
    reason: str | None = None
    """Why the head was chosen, if it was 'auto'."""

    @property
    def by_name(self) -> bool:
        """Whether candidates are heads, rather than settings of one head."""
        return bool(self.candidates) and "=" not in self.candidates[0]

    def check(self, model: "HeadConfig") -> None:
        """Refuse candidates that do not fit the other settings of ``model``."""
        names = self.candidates
        if not names:
            return
        several = len(set(names)) == len(names) >= 2
        known = set(names) <= HEADS.keys() or all("=" in name for name in names)
        single = {name for name in names if model.multi_label and name in HEADS}
        single = {name for name in single if HEADS[name].one_label}
        for holds, rule, remedy in (
            (several, "two or more different heads", "For one, set head: it costs less."),
            (
                known,
                f"all among {', '.join(HEADS)}, or all settings",
                "Give one_step,prototypes.",
            ),
            (not single, f"no {', '.join(sorted(single))} with multi_label", "Leave it out."),
        ):
            require(holds, "model", "candidates", names, rule, remedy)
        unit, iterate = model.features.unit, getattr(model.settings, "iterate", "last")
        for name, value, holds, rule, remedy in (
            (
                "head",
                model.head,
                self.by_name or model.head != "auto",
                "a head by name, with settings as candidates",
                "Use transfer.many_steps.",
            ),
            (
                "unit",
                unit,
                unit,
                "True with candidates, each of which needs a public bound",
                "Leave it on.",
            ),
            ("iterate", iterate, iterate == "last", "'last' with candidates", "Leave it out."),
        ):
            require(holds, "model", name, value, rule, remedy)


@dataclass(frozen=True)
class HeadConfig:
    """A linear head, fitted with privacy to features that are computed once (``dpvision.adapt``,
    docs/heads.md).
    """

    kind: Literal["head"] = "head"
    encoder: FrozenEncoderConfig = field(default_factory=FrozenEncoderConfig)
    num_classes: int | None = None
    """Labels are 0 ... num_classes - 1. Declared and public: None is refused, and classes are never
    counted in private data.
    """
    multi_label: bool = False
    """Records may have any number of classes, as in the store."""
    head: str = "auto"
    """'auto': chosen from public numbers before the plan is made (``adapt.defaults``), with the
    head's steps, optimizer, loss and bias; or one_step, many_steps, least_squares,
    feature_covariance, prototypes.
    """
    features: FeatureConfig = field(
        default_factory=FeatureConfig, metadata=flat(lambda: {"": FeatureConfig})
    )
    choice: ChoiceConfig = field(
        default_factory=ChoiceConfig, metadata=flat(lambda: {"": ChoiceConfig})
    )
    settings: HeadSettings = field(
        default_factory=HeadSettings, metadata=flat(_settings_classes, by="head")
    )
    """The settings of ``head``; if left out, its defaults."""

    def __post_init__(self) -> None:
        check_choices(self)
        classes = _settings_classes()
        among = f"one of {', '.join(map(repr, classes))}"
        require(self.head in classes, "HeadConfig", "head", self.head, among, "Choose one of them.")
        if type(self.settings) is HeadSettings:
            object.__setattr__(self, "settings", classes[self.head]())
        own = classes[self.head]
        require(
            type(self.settings) is own,
            "HeadConfig",
            "settings",
            self.settings,
            f"{own.__name__} with head={self.head!r}",
            "Use config.resolve.with_head.",
        )
        if (num := self.num_classes) is not None:
            remedy = "Declare all classes; one needs no head."
            require(num >= 2, "model", "num_classes", num, "at least 2", remedy)
        self.settings.check(self)
        self.choice.check(self)

    def settled(self) -> "HeadConfig":
        """Return a copy with the head's own value for each of its settings, and for the constant,
        where it has none; ``num_classes`` must be declared.
        """
        constant = self.features.constant
        features = replace(
            self.features, constant=self.settings.constant if constant is None else constant
        )
        return replace(self, features=features, settings=self.settings.settled(self))

    @property
    def num_parameters(self) -> int:
        """int: number of weights and biases; 0 until classes and encoder are set."""
        return (self.num_classes or 0) * (self.encoder.width + 1) if self.encoder.width else 0
