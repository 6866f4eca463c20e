"""Settings of the networks: one frozen dataclass per kind, identified by ``kind`` in JSON."""

import json
import math
from dataclasses import dataclass, field
from typing import Any, Literal

from dpvision.config.checks import check_choices, require
from dpvision.config.heads import HeadConfig


@dataclass(frozen=True)
class ViTConfig:
    """A plain vision transformer encoder (pre-LayerNorm, class token, sin-cos positions)."""

    kind: Literal["vit"] = "vit"
    image_size: int = 224
    patch_size: int = 16
    depth: int = 12
    width: int = 768
    num_heads: int = 12
    mlp_ratio: float = 4.0
    qkv_bias: bool = True
    """A bias on queries, keys and values: with in ViP, without in DP-Cap."""
    train_cls: bool = True
    """Whether the class token is trained; if False, it keeps its random initial value (DP-Cap)."""
    positions: Literal["fixed", "loaded"] = "fixed"
    """The sin-cos table, or those of the file in ``init_from`` (docs/papers_files.md); never
    trained.
    """

    def __post_init__(self) -> None:
        check_choices(self)
        w = "model"
        for name in ("image_size", "patch_size", "depth", "width", "num_heads"):
            require(
                getattr(self, name) >= 1,
                w,
                name,
                getattr(self, name),
                "at least 1",
                "See docs/models.md for the sizes.",
            )
        ok = self.image_size % self.patch_size == 0
        require(
            ok,
            w,
            "patch_size",
            self.patch_size,
            f"a divisor of image_size={self.image_size}",
            "E.g. 16 for 224, 4 for 32.",
        )
        require(
            self.width % self.num_heads == 0,
            w,
            "num_heads",
            self.num_heads,
            f"a divisor of width={self.width}",
            "Choose a divisor.",
        )
        require(
            self.width % 4 == 0,
            w,
            "width",
            self.width,
            "a multiple of 4 (two-dimensional sin-cos positions)",
            "Use 768.",
        )
        require(
            0 < self.mlp_ratio < math.inf,
            w,
            "mlp_ratio",
            self.mlp_ratio,
            "a positive number",
            "The papers use 4.",
        )


@dataclass(frozen=True)
class MAEConfig:
    """Masked autoencoder (ViP): the encoder sees the visible patches, a small decoder predicts the
    masked ones.
    """

    kind: Literal["mae"] = "mae"
    encoder: ViTConfig = field(default_factory=ViTConfig)
    decoder_depth: int = 4
    decoder_width: int = 512
    decoder_num_heads: int = 16
    mask_ratio: float = 0.75
    target: Literal["pixels", "normalised_pixels", "gradients"] = "pixels"
    """Target of a masked patch (models/mae.py): ViP's plain pixels, MAE's normalised pixels,
    MaskFeat's oriented gradients.
    """

    def __post_init__(self) -> None:
        check_choices(self)
        w = "model"
        for name in ("decoder_depth", "decoder_width", "decoder_num_heads"):
            require(
                getattr(self, name) >= 1,
                w,
                name,
                getattr(self, name),
                "at least 1",
                "ViP: 4 blocks of width 512, 16 heads.",
            )
        ok = self.decoder_width % self.decoder_num_heads == 0 and self.decoder_width % 4 == 0
        require(
            ok,
            w,
            "decoder_width",
            self.decoder_width,
            "a multiple of 4 and of decoder_num_heads",
            "ViP: 512.",
        )
        require(
            0 < self.mask_ratio < 1,
            w,
            "mask_ratio",
            self.mask_ratio,
            "strictly between 0 and 1",
            "ViP: 0.75.",
        )
        even = self.target != "gradients" or self.encoder.patch_size % 2 == 0
        require(
            even,
            w,
            "target",
            self.target,
            "an even patch_size with gradients (two cells along a side)",
            "Use patches of 4 or 16.",
        )


@dataclass(frozen=True)
class ResNetConfig:
    """A pre-activation residual network without batch statistics: GroupNorm or no norm,
    standardised weights (models/resnet.py).
    """

    kind: Literal["resnet"] = "resnet"
    image_size: int = 32
    block: Literal["basic", "bottleneck"] = "basic"
    """Two 3 x 3 convolutions, or 1 x 1, 3 x 3, 1 x 1 with a quarter of the width between."""
    depths: tuple[int, ...] = (2, 2, 2)
    """Blocks of each stage; every stage but the first halves the side."""
    widths: tuple[int, ...] = (64, 128, 256)
    """Output channels of each stage (WRN-16-4: 64, 128, 256)."""
    stem: Literal["3x3", "7x7"] = "3x3"
    """'3x3' keeps the side (32 px); '7x7' with stride 2 and a max pool divides it by four (224
    px).
    """
    stem_width: int = 16
    norm: Literal["group", "none"] = "group"
    """'none': norm-free (Brock et al. 2021), scaled standardised convolutions with gains control
    the variance instead.
    """
    groups: int = 16
    """Groups of a GroupNorm; unused with norm=none."""
    weight_standardisation: bool = True

    def __post_init__(self) -> None:
        check_choices(self)
        w = "model"
        for name in ("image_size", "stem_width", "groups"):
            require(
                getattr(self, name) >= 1,
                w,
                name,
                getattr(self, name),
                "at least 1",
                "See docs/supervised.md for the sizes.",
            )
        same = 0 < len(self.depths) == len(self.widths)
        require(
            same,
            w,
            "widths",
            self.widths,
            f"one for each of depths={self.depths}",
            "WRN-16-4: (2, 2, 2) and (64, 128, 256).",
        )
        require(
            all(d >= 1 for d in self.depths),
            w,
            "depths",
            self.depths,
            "numbers from 1",
            "WRN-16-4: (2, 2, 2).",
        )
        require(
            all(v >= 4 and v % 4 == 0 for v in self.widths),
            w,
            "widths",
            self.widths,
            "multiples of 4",
            "WRN-16-4: (64, 128, 256).",
        )
        if self.norm == "group":
            channels = [
                self.stem_width,
                *self.widths,
                *([v // 4 for v in self.widths] if self.block == "bottleneck" else []),
            ]
            fits = all(c % self.groups == 0 for c in channels)
            require(
                fits,
                w,
                "groups",
                self.groups,
                f"a divisor of all numbers of channels {sorted(set(channels))}",
                "16 or 32 are usual.",
            )
        ok = self.norm == "group" or self.weight_standardisation
        require(
            ok,
            w,
            "weight_standardisation",
            False,
            "True with norm=none: nothing else controls the variance",
            "Leave it on.",
        )

    @property
    def width(self) -> int:
        """int: feature dimension after pooling."""
        return self.widths[-1]


@dataclass(frozen=True)
class TimmConfig:
    """A timm encoder by name (models/timm_encoder.py). Its weights come from ``init_from``; nothing
    is downloaded.
    """

    kind: Literal["timm"] = "timm"
    name: str = "vit_base_patch16_224"
    """timm's name without a tag (tags name weights), or ``resnetv2_{50,101,152}xWIDTH_bit`` for any
    WIDTH.
    """
    image_size: int = 224
    """Side of the images in pixels. Position weights of another size are interpolated."""
    options: tuple[str, ...] = ()
    """Further arguments of timm's constructor, NAME=VALUE with a value as in JSON: ``depth=6``."""

    def __post_init__(self) -> None:
        check_choices(self)
        w = "model.encoder"
        require(
            self.name != "" and "." not in self.name,
            w,
            "name",
            self.name,
            "a timm name without a tag",
            "Tags go to --init-from.",
        )
        require(
            self.image_size >= 1, w, "image_size", self.image_size, "at least 1", "Transfer: 384."
        )
        self.arguments  # noqa: B018  (raises)

    @property
    def arguments(self) -> dict[str, Any]:
        """dict: the parsed options.

        Raises:
            ConfigError: one is not NAME=VALUE.
        """
        found = {}
        for option in self.options:
            name, mark, value = option.partition("=")
            try:
                found[name] = json.loads(value)
            except ValueError:
                mark = ""
            require(
                mark != "" and name.isidentifier(),
                "model.encoder",
                "options",
                option,
                "NAME=VALUE as in JSON",
                "E.g. depth=6.",
            )
        return found


EncoderConfig = ViTConfig | ResNetConfig | TimmConfig
Tuned = Literal["whole", "last_blocks", "head", "lora", "film", "biases"]


@dataclass(frozen=True)
class ClassifierConfig:
    """An encoder with a linear head, trained with labels: all of it, or the parts that ``tuned``
    names (models/tuned.py).
    """

    kind: Literal["classifier"] = "classifier"
    encoder: EncoderConfig = field(default_factory=ViTConfig)
    num_classes: int = 1000
    """Labels are 0 ... num_classes - 1; a public number."""
    tuned: Tuned = "whole"
    """Parts trained besides the head: the whole encoder, its last blocks, nothing, low-rank
    additions to its linear maps (LoRA), a scale and a shift after its norms (FiLM), or its biases.
    All other parameters are frozen, and have no gradient.
    """
    last_blocks: int = 1
    """With tuned=last_blocks, the number of blocks trained, with everything after them."""
    lora_rank: int = 8
    lora_scale: float = 1.0
    """Factor of the low-rank product (alpha / rank of Hu et al. 2022)."""
    lora_on: Literal["attention", "mlp", "both"] = "attention"
    """Linear maps of the blocks with a low-rank addition."""
    head_init: Literal["zero", "xavier", "lecun"] = "zero"
    """Initial weights of the head: zeros; uniform, as for MAE's linear maps; normal with variance 1
    / width (LeCun).
    """
    head_scale: float = 1.0
    """Factor of the initial weights: with lecun, the scaled initialisations of Mehta et al. 2022,
    figure 2c.
    """
    head_bias: float = 0.0
    """Initial bias of every class. Mehta et al. 2022 use -10 with the sigmoid loss, so that every
    class is unlikely at the start.
    """
    train_head_bias: bool = True
    """Whether the bias is trained."""
    loss: Literal["softmax", "sigmoid"] = "softmax"
    """Cross-entropy over the classes, or the sum over the classes of binary cross-entropies, which
    also takes several labels.
    """
    multi_label: bool = False
    """Records may have any number of classes, as in the store; needs the sigmoid loss."""
    pooling: Literal["mean", "cls", "own"] = "mean"
    """Input of the head: the mean over all positions, a transformer's class token, or a timm
    model's own input to its classifier.
    """

    def __post_init__(self) -> None:
        check_choices(self)
        w = "model"
        require(
            self.num_classes >= 2,
            w,
            "num_classes",
            self.num_classes,
            "at least 2",
            "Declare the classes of the store.",
        )
        ok = self.pooling != "cls" or not isinstance(self.encoder, ResNetConfig)
        require(
            ok,
            w,
            "pooling",
            self.pooling,
            "'mean' with a convolutional encoder, which has no class token",
            "Use mean.",
        )
        ok = self.pooling != "own" or isinstance(self.encoder, TimmConfig)
        require(
            ok,
            w,
            "pooling",
            self.pooling,
            "'mean' or 'cls' unless the encoder is timm's",
            "Use mean.",
        )
        require(
            self.last_blocks >= 1,
            w,
            "last_blocks",
            self.last_blocks,
            "at least 1",
            "For none pass --model.tuned head.",
        )
        require(
            self.lora_rank >= 1,
            w,
            "lora_rank",
            self.lora_rank,
            "at least 1",
            "Use 4 to 16. For none pass --model.tuned head.",
        )
        require(
            0 < self.lora_scale < math.inf,
            w,
            "lora_scale",
            self.lora_scale,
            "a positive number",
            "Use 1.",
        )
        require(
            0 < self.head_scale < math.inf,
            w,
            "head_scale",
            self.head_scale,
            "a positive number",
            "For zeros use head_init=zero.",
        )
        ok = self.loss == "sigmoid" or not self.multi_label
        require(
            ok,
            w,
            "loss",
            self.loss,
            "'sigmoid' with multi_label",
            "Use sigmoid: softmax assumes one class per record.",
        )
        require(
            -math.inf < self.head_bias < math.inf,
            w,
            "head_bias",
            self.head_bias,
            "a number",
            "The paper: -10; otherwise 0.",
        )


@dataclass(frozen=True)
class CrossDecoderConfig:
    """The decoder of DP-Cap: post-LayerNorm blocks of self-attention, attention to the encoder's
    tokens, MLP (models/cross_decoder.py).
    """

    depth: int = 6
    width: int = 768
    num_heads: int = 12
    mlp_ratio: float = 4.0

    def __post_init__(self) -> None:
        w = "model.decoder"
        for name in ("depth", "width", "num_heads"):
            require(
                getattr(self, name) >= 1,
                w,
                name,
                getattr(self, name),
                "at least 1",
                "DP-Cap-Base: 6 blocks of width 768, 12 heads.",
            )
        ok = self.width % self.num_heads == 0 and self.width % 4 == 0
        require(ok, w, "width", self.width, "a multiple of 4 and of num_heads", "DP-Cap-Base: 768.")
        require(
            0 < self.mlp_ratio < math.inf,
            w,
            "mlp_ratio",
            self.mlp_ratio,
            "a positive number",
            "The papers use 4.",
        )


@dataclass(frozen=True)
class CrossMAEConfig:
    """The captioner's network as a masked autoencoder: hidden patches are predicted through
    cross-attention (DP-Cap, appendix A.1).
    """

    kind: Literal["cross_mae"] = "cross_mae"
    encoder: ViTConfig = field(default_factory=lambda: ViTConfig(qkv_bias=False, train_cls=False))
    decoder: CrossDecoderConfig = field(default_factory=CrossDecoderConfig)
    mask_ratio: float = 0.75
    target: Literal["pixels", "normalised_pixels", "gradients"] = "pixels"
    """As in ``MAEConfig``."""

    def __post_init__(self) -> None:
        check_choices(self)
        w = "model"
        require(
            0 < self.mask_ratio < 1,
            w,
            "mask_ratio",
            self.mask_ratio,
            "strictly between 0 and 1",
            "MAE: 0.75.",
        )
        even = self.target != "gradients" or self.encoder.patch_size % 2 == 0
        require(
            even,
            w,
            "target",
            self.target,
            "an even patch_size with gradients (two cells along a side)",
            "Use patches of 4 or 16.",
        )


PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
"""Token ids of padding, of the beginning and of the end of a caption, in every tokenizer."""


@dataclass(frozen=True)
class CaptionerConfig:
    """Image captioner (DP-Cap): an encoder, and a decoder that predicts the caption token by
    token.
    """

    kind: Literal["captioner"] = "captioner"
    encoder: ViTConfig = field(default_factory=lambda: ViTConfig(qkv_bias=False, train_cls=False))
    decoder: CrossDecoderConfig = field(default_factory=CrossDecoderConfig)
    vocab_size: int = 30_522
    """Entries of the tokenizer, special ones included."""
    num_tokens: int = 40
    """Longest caption in tokens, BOS and EOS included."""
    parallel_rate: float = 0.0
    """Share of a step's records whose tokens are predicted in parallel, from the image alone
    (CapPa, Tschannen et al. 2023: 0.75).
    """
    reconstruction_weight: float = 0.0
    """Above 0, the weight of a second loss: masked patches predicted through the same decoder (Cap
    + MAE).
    """
    mask_ratio: float = 0.75
    """Mask ratio of that second loss."""
    train_encoder: bool = True
    """Whether the encoder is trained; False in the paper's fine-tuning of the decoder (its Table
    12).
    """

    def __post_init__(self) -> None:
        check_choices(self)
        w = "model"
        require(
            self.vocab_size > EOS_ID + 1,
            w,
            "vocab_size",
            self.vocab_size,
            "more than the three special tokens",
            "The papers: 30522.",
        )
        require(
            self.num_tokens >= 3,
            w,
            "num_tokens",
            self.num_tokens,
            "at least 3: BOS, a token, EOS",
            "DP-Cap: 40.",
        )
        require(
            0 <= self.parallel_rate <= 1,
            w,
            "parallel_rate",
            self.parallel_rate,
            "between 0 and 1",
            "Cap: 0; CapPa: 0.75.",
        )
        weight = self.reconstruction_weight
        require(
            0 <= weight < math.inf,
            w,
            "reconstruction_weight",
            weight,
            "0 or more",
            "0 for captions alone.",
        )
        require(
            0 < self.mask_ratio < 1,
            w,
            "mask_ratio",
            self.mask_ratio,
            "strictly between 0 and 1",
            "MAE: 0.75.",
        )


ModelConfig = MAEConfig | ClassifierConfig | CrossMAEConfig | CaptionerConfig | HeadConfig
"""Identified by ``kind`` in JSON, as are encoders."""
