"""A linear head on frozen features: which encoder, which head, and what there is to set about it."""

import math
from dataclasses import dataclass, field, replace
from typing import Literal

from dpvision.config.checks import check_choices, require


@dataclass(frozen=True)
class FrozenEncoderConfig:
    """A public encoder by name; nothing of it is trained."""

    kind: Literal["frozen"] = "frozen"
    spec: str | None = None
    """What ``encoders.open.open_encoder`` takes: a run folder, timm:NAME@FILE, patches, ... May be a path: never in a statement."""
    pooling: str | None = None
    """Which of the encoder's features: mean, 2x2, cls, ...; None for its default."""
    image_size: int = 0
    """Side of the images in pixels, for encoders that take any; 0 for the encoder's own. A run's config has what was used."""
    width: int = 0
    """Numbers of a feature: found when the encoder is opened, 0 before."""

    def __post_init__(self) -> None:
        w = "model.encoder"
        for name in ("image_size", "width"):
            require(getattr(self, name) >= 0, w, name, getattr(self, name), "0 or more", "Leave it out for the encoder's own.")


Candidate = Literal["one_step", "many_steps", "least_squares", "feature_covariance", "prototypes"]


@dataclass(frozen=True)
class HeadConfig:
    """A linear head, fitted with privacy to features that are computed once (``dpvision.adapt``, docs/heads.md)."""

    kind: Literal["head"] = "head"
    encoder: FrozenEncoderConfig = field(default_factory=FrozenEncoderConfig)
    num_classes: int | None = None
    """Labels are 0 ... num_classes - 1. Declared and public: None is refused, and nothing is counted in private data."""
    multi_label: bool = False
    """A record has any number of classes, as the store has them."""
    head: Literal["auto", "one_step", "many_steps", "least_squares", "feature_covariance", "prototypes"] = "auto"
    """'auto': chosen from public numbers before the plan is made (``adapt.recommend``), with steps, optimizer, loss and bias of its own."""
    reason: str | None = None
    """Why the head was chosen, where it was 'auto'."""
    candidates: tuple[Candidate, ...] = ()
    """Heads among which a private score chooses (docs/selection.md): one charge pays for all of them. Empty: ``head`` is the head."""
    selection_runs: float = 10.0
    """Mean of the secret number of runs, of which the best is released."""
    selection_shape: float | None = 1.0
    """Of that number's law: 1 is geometric, 0 logarithmic, None Poisson, which may draw no run at all."""
    loss: Literal["auto", "sigmoid", "softmax"] = "sigmoid"
    """Of the heads that take gradient steps: a binary loss for each class (the paper), or one over all classes. 'auto': softmax, or sigmoid
    with multi_label."""
    bias: float | None = -10.0
    """Of those heads: fixed, the same for all classes. The paper's -10 says that at first no class is likely. If None, all classes begin at
    probability 1 / num_classes."""
    centre: Literal["textures", "none"] = "textures"
    """A public point taken off every record's features before anything else: the encoder's mean over procedural textures, or none."""
    frequency_decay: float | None = None
    """Of many_steps, on features with spatial frequencies (patches): the energy of each higher frequency is divided by this once more; 1
    leaves the features as they are. If None, a rule that goes by the noise (``adapt.frequency``)."""
    unit: bool = True
    """Every record's features are scaled to length 1: a function of the record alone, and free."""
    constant: float = 0.0
    """A number appended to every record's features, so that the head has a trained bias; 0 for none."""
    feature_norm: float | None = None
    """Public length to which longer features are cut, for the heads of moments where ``unit`` is off."""
    init: Literal["zero", "lecun"] = "zero"
    """Weights of many_steps at the start: zeros (the paper), or LeCun's normal ones times ``init_scale``."""
    init_scale: float = 1.0
    iterate: Literal["last", "average", "ema"] = "last"
    """Which weights of several steps are the head: the last, their mean (the paper's algorithm 1), or a moving one (optim.ema_decay)."""

    def __post_init__(self) -> None:
        check_choices(self)
        w = "model"
        if self.num_classes is not None:
            require(self.num_classes >= 2, w, "num_classes", self.num_classes, "at least 2", "Declare all classes; one needs no head.")
        require(self.bias is None or -math.inf < self.bias < math.inf, w, "bias", self.bias, "a number", "The paper: -10.")
        require(-math.inf < self.constant < math.inf, w, "constant", self.constant, "a number", "Use 0 for no trained bias.")
        require(0 < self.init_scale < math.inf, w, "init_scale", self.init_scale, "a positive number", "Use 1 for LeCun's.")
        if self.frequency_decay is not None:
            require(1 <= self.frequency_decay < math.inf, w, "frequency_decay", self.frequency_decay, "1 or more", "1 changes nothing.")
        if self.feature_norm is not None:
            require(0 < self.feature_norm < math.inf, w, "feature_norm", self.feature_norm, "a positive number", "Or leave unit on.")
        bounded = self.unit or self.feature_norm is not None or self.head in ("auto", "one_step", "many_steps")
        require(
            bounded, w, "unit", self.unit, f"True, or feature_norm, with head={self.head!r}, which needs a public bound", "Leave it on."
        )
        single = self.loss != "softmax" or not self.multi_label or self.head not in ("one_step", "many_steps", "feature_covariance")
        require(single, w, "loss", self.loss, "'sigmoid' with multi_label", "Softmax says that a record has one class.")
        steps = self.iterate == "last" or self.head in ("auto", "many_steps", "feature_covariance")
        if self.candidates:
            different = len(set(self.candidates)) == len(self.candidates) >= 2
            require(different, w, "candidates", self.candidates, "two or more different heads", "With one, name it: that costs less.")
            softmax = self.multi_label and "feature_covariance" in self.candidates
            require(not softmax, w, "candidates", self.candidates, "no feature_covariance with multi_label", "Leave it out.")
            require(self.unit, w, "unit", self.unit, "True with candidates, of which each needs a public bound", "Leave it on.")
            require(self.iterate == "last", w, "iterate", self.iterate, "'last' with candidates", "Leave it out.")
        require(steps, w, "iterate", self.iterate, f"'last' with head={self.head!r}, which has one", "Leave it out.")

    def settled(self) -> "HeadConfig":
        """The same with nothing left open of loss and bias; ``num_classes`` is declared."""
        loss = self.loss if self.loss != "auto" else "sigmoid" if self.multi_label else "softmax"
        assert self.num_classes is not None
        bias = self.bias if self.bias is not None else -math.log(self.num_classes - 1) if loss == "sigmoid" else 0.0
        return replace(self, loss=loss, bias=bias)

    @property
    def num_parameters(self) -> int:
        """Numbers of weight and bias; 0 before classes and encoder are known."""
        return (self.num_classes or 0) * (self.encoder.width + 1) if self.encoder.width else 0
