"""Settings of a linear head on frozen features: the encoder, the head and its options."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal, get_args

from dpvision.config.checks import check_choices, require


@dataclass(frozen=True)
class FrozenEncoderConfig:
    """A public encoder by name; it is not trained."""

    kind: Literal["frozen"] = "frozen"
    spec: str | None = None
    """Argument of ``encoders.open.open_encoder``: a run folder, timm:NAME@FILE, patches, ... May be
    a path, so never in a statement.
    """
    pooling: str | None = None
    """Pooling of the encoder's features: mean, 2x2, cls, ...; if None, its default."""
    image_size: int = 0
    """Side of the images in pixels, for encoders that take any; 0 for the encoder's own. A run's
    config has the size used.
    """
    width: int = 0
    """Feature dimension; set when the encoder is opened, 0 before."""

    def __post_init__(self) -> None:
        w = "model.encoder"
        for name in ("image_size", "width"):
            require(
                getattr(self, name) >= 0,
                w,
                name,
                getattr(self, name),
                "0 or more",
                "Leave it out for the encoder's own.",
            )


Candidate = Literal["one_step", "many_steps", "least_squares", "feature_covariance", "prototypes"]
Loss = Literal["auto", "sigmoid", "softmax"]
OWN: Mapping[str, tuple[Loss, float | None, float]] = MappingProxyType(
    {
        "one_step": ("sigmoid", -10.0, 0.0),
        "many_steps": ("auto", None, 0.1),
        "least_squares": ("sigmoid", 0.0, 0.0),
        "feature_covariance": ("softmax", 0.0, 0.0),
        "prototypes": ("sigmoid", 0.0, 0.0),
    }
)
"""Loss, bias and constant of each head where its config has none. Heads in closed form read no loss
and no bias.
"""


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
    head: Literal[
        "auto", "one_step", "many_steps", "least_squares", "feature_covariance", "prototypes"
    ] = "auto"
    """'auto': chosen from public numbers before the plan is made (``adapt.recommend``), with the
    head's steps, optimizer, loss and bias.
    """
    reason: str | None = None
    """Why the head was chosen, if it was 'auto'."""
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
    loss: Loss = "auto"
    """Loss of the heads that take gradient steps: a binary loss per class (the paper), or one over
    all classes. 'auto': the head's own (``OWN``); for many_steps softmax, or sigmoid with
    multi_label.
    """
    bias: float | None = None
    """Fixed bias of those heads, the same for all classes. With the paper's -10 every class is
    unlikely at the start. If None, the head's own: for one_step -10, otherwise all classes start at
    probability 1 / num_classes.
    """
    centre: Literal["textures", "none"] = "textures"
    """Public point subtracted from every record's features first: the encoder's mean over
    procedural textures, or none.
    """
    frequency_decay: float | None = None
    """For many_steps on features with spatial frequencies (patches): the energy of frequency f is
    divided by this to the power f; 1 leaves the features unchanged. If None, it follows from the
    noise (``adapt.frequency``).
    """
    unit: bool = True
    """Scale every record's features to length 1: a function of the record alone, at no privacy
    cost.
    """
    constant: float | None = None
    """A number appended to every record's features, so that the head has a trained bias; 0 for
    none. If None, the head's own: 0.1 for many_steps, otherwise 0.
    """
    feature_norm: float | None = None
    """Public norm to which longer features are clipped, for heads computed from moments without
    ``unit``.
    """
    init: Literal["zero", "lecun"] = "zero"
    """Initial weights of many_steps: zeros (the paper), or LeCun normal times ``init_scale``."""
    init_scale: float = 1.0
    iterate: Literal["last", "average", "ema"] = "last"
    """Weights used as the head: the last, the mean over steps (the paper's algorithm 1), or a
    moving average (optim.ema_decay).
    """

    def __post_init__(self) -> None:
        check_choices(self)
        w = "model"
        if self.num_classes is not None:
            require(
                self.num_classes >= 2,
                w,
                "num_classes",
                self.num_classes,
                "at least 2",
                "Declare all classes; one needs no head.",
            )
        require(
            self.bias is None or -math.inf < self.bias < math.inf,
            w,
            "bias",
            self.bias,
            "a number",
            "The paper: -10.",
        )
        finite = self.constant is None or -math.inf < self.constant < math.inf
        require(finite, w, "constant", self.constant, "a number", "Use 0 for no trained bias.")
        require(
            0 < self.init_scale < math.inf,
            w,
            "init_scale",
            self.init_scale,
            "a positive number",
            "Use 1 for LeCun's.",
        )
        if self.frequency_decay is not None:
            require(
                1 <= self.frequency_decay < math.inf,
                w,
                "frequency_decay",
                self.frequency_decay,
                "1 or more",
                "Use 1 for none.",
            )
        if self.feature_norm is not None:
            require(
                0 < self.feature_norm < math.inf,
                w,
                "feature_norm",
                self.feature_norm,
                "a positive number",
                "Use 1, or unit.",
            )
        bounded = (
            self.unit
            or self.feature_norm is not None
            or self.head in ("auto", "one_step", "many_steps")
        )
        require(
            bounded,
            w,
            "unit",
            self.unit,
            f"True, or feature_norm, with head={self.head!r}, which needs a public bound",
            "Leave it on.",
        )
        loss = self.loss if self.loss != "auto" or self.head == "auto" else OWN[self.head][0]
        single = (
            loss != "softmax"
            or not self.multi_label
            or self.head not in ("one_step", "many_steps", "feature_covariance")
        )
        require(
            single,
            w,
            "loss",
            loss,
            "'sigmoid' with multi_label",
            "Use sigmoid: softmax assumes one class per record.",
        )
        steps = self.iterate == "last" or self.head in ("auto", "many_steps", "feature_covariance")
        if self.candidates:
            different = len(set(self.candidates)) == len(self.candidates) >= 2
            require(
                different,
                w,
                "candidates",
                self.candidates,
                "two or more different heads",
                "For one, set head: it costs less.",
            )
            known = set(self.candidates) <= set(get_args(Candidate)) or all(
                "=" in name for name in self.candidates
            )
            require(
                known,
                w,
                "candidates",
                self.candidates,
                f"all among {', '.join(get_args(Candidate))}, or all settings",
                "Give one_step,prototypes.",
            )
            of_one = "=" not in self.candidates[0] or self.head != "auto"
            require(
                of_one,
                w,
                "head",
                self.head,
                "a head by name, with settings as candidates",
                "Use transfer.many_steps.",
            )
            softmax = self.multi_label and "feature_covariance" in self.candidates
            require(
                not softmax,
                w,
                "candidates",
                self.candidates,
                "no feature_covariance with multi_label",
                "Leave it out.",
            )
            require(
                self.unit,
                w,
                "unit",
                self.unit,
                "True with candidates, each of which needs a public bound",
                "Leave it on.",
            )
            require(
                self.iterate == "last",
                w,
                "iterate",
                self.iterate,
                "'last' with candidates",
                "Leave it out.",
            )
        require(
            steps,
            w,
            "iterate",
            self.iterate,
            f"'last' with head={self.head!r}, which has one",
            "Leave it out.",
        )

    def settled(self) -> "HeadConfig":
        """Return a copy with the loss, bias and constant of its head where it has none;
        ``num_classes`` must be declared.
        """
        assert self.num_classes is not None
        own, own_bias, constant = OWN["many_steps" if self.head == "auto" else self.head]
        loss = self.loss if self.loss != "auto" else own
        loss = loss if loss != "auto" else "sigmoid" if self.multi_label else "softmax"
        bias = own_bias if self.bias is None else self.bias
        if bias is None:
            bias = -math.log(self.num_classes - 1) if loss == "sigmoid" else 0.0
        return replace(
            self,
            loss=loss,
            bias=bias,
            constant=constant if self.constant is None else self.constant,
        )

    @property
    def num_parameters(self) -> int:
        """int: number of weights and biases; 0 until classes and encoder are set."""
        return (self.num_classes or 0) * (self.encoder.width + 1) if self.encoder.width else 0
