"""What the networks are: one frozen dataclass per kind, told apart by ``kind`` in JSON."""

import json
import math
from dataclasses import dataclass, field
from typing import Any, Literal

from dpvision.config.checks import check_choices, require
from dpvision.config.heads import HeadConfig


@dataclass(frozen=True)
class ViTConfig:
    """A plain vision transformer encoder (pre-LayerNorm, class token, fixed sin-cos positions)."""

    kind: Literal["vit"] = "vit"
    image_size: int = 224
    patch_size: int = 16
    depth: int = 12
    width: int = 768
    num_heads: int = 12
    mlp_ratio: float = 4.0
    qkv_bias: bool = True
    """A bias on queries, keys and values: ViP has it, DP-Cap has not."""
    train_cls: bool = True
    """False: the class token stays what the seed made it (DP-Cap)."""

    def __post_init__(self) -> None:
        check_choices(self)
        w = "model"
        for name in ("image_size", "patch_size", "depth", "width", "num_heads"):
            require(getattr(self, name) >= 1, w, name, getattr(self, name), "at least 1", "See docs/models.md for the sizes.")
        ok = self.image_size % self.patch_size == 0
        require(ok, w, "patch_size", self.patch_size, f"a divisor of image_size={self.image_size}", "E.g. 16 for 224, 4 for 32.")
        require(self.width % self.num_heads == 0, w, "num_heads", self.num_heads, f"a divisor of width={self.width}", "Change one.")
        require(self.width % 4 == 0, w, "width", self.width, "a multiple of 4 (two-dimensional sin-cos positions)", "Change it.")
        require(0 < self.mlp_ratio < math.inf, w, "mlp_ratio", self.mlp_ratio, "a positive number", "The papers use 4.")


@dataclass(frozen=True)
class MAEConfig:
    """Masked autoencoder (ViP): the encoder sees the visible patches, a small decoder predicts the masked ones."""

    kind: Literal["mae"] = "mae"
    encoder: ViTConfig = field(default_factory=ViTConfig)
    decoder_depth: int = 4
    decoder_width: int = 512
    decoder_num_heads: int = 16
    mask_ratio: float = 0.75
    target: Literal["pixels", "normalised_pixels", "gradients"] = "pixels"
    """What is predicted of a hidden patch (models/targets.py): ViP's plain pixels, MAE's normalised ones, MaskFeat's oriented gradients."""

    def __post_init__(self) -> None:
        check_choices(self)
        w = "model"
        for name in ("decoder_depth", "decoder_width", "decoder_num_heads"):
            require(getattr(self, name) >= 1, w, name, getattr(self, name), "at least 1", "ViP: 4 blocks of width 512, 16 heads.")
        ok = self.decoder_width % self.decoder_num_heads == 0 and self.decoder_width % 4 == 0
        require(ok, w, "decoder_width", self.decoder_width, "a multiple of 4 and of decoder_num_heads", "Change one.")
        require(0 < self.mask_ratio < 1, w, "mask_ratio", self.mask_ratio, "strictly between 0 and 1", "ViP: 0.75.")
        even = self.target != "gradients" or self.encoder.patch_size % 2 == 0
        require(even, w, "target", self.target, "an even patch_size with gradients (two cells along a side)", "Use patches of 4 or 16.")


@dataclass(frozen=True)
class ResNetConfig:
    """A pre-activation residual network without statistics of a batch: GroupNorm or no norm, standardised weights (models/resnet.py)."""

    kind: Literal["resnet"] = "resnet"
    image_size: int = 32
    block: Literal["basic", "bottleneck"] = "basic"
    """Two 3 x 3 convolutions, or 1 x 1, 3 x 3, 1 x 1 with a quarter of the width between."""
    depths: tuple[int, ...] = (2, 2, 2)
    """Blocks of each stage; every stage but the first halves the side."""
    widths: tuple[int, ...] = (64, 128, 256)
    """Channels that each stage gives (WRN-16-4: 64, 128, 256)."""
    stem: Literal["3x3", "7x7"] = "3x3"
    """'3x3' keeps the side (32 px); '7x7' with stride 2 and a max pool divides it by four (224 px)."""
    stem_width: int = 16
    norm: Literal["group", "none"] = "group"
    """'none': norm-free (Brock et al. 2021), scaled standardised convolutions with gains hold the variance instead."""
    groups: int = 16
    """Groups of a GroupNorm; unused with norm=none."""
    weight_standardisation: bool = True

    def __post_init__(self) -> None:
        check_choices(self)
        w = "model"
        for name in ("image_size", "stem_width", "groups"):
            require(getattr(self, name) >= 1, w, name, getattr(self, name), "at least 1", "See docs/supervised.md for the sizes.")
        same = 0 < len(self.depths) == len(self.widths)
        require(same, w, "widths", self.widths, f"one for each of depths={self.depths}", "WRN-16-4: (2, 2, 2) and (64, 128, 256).")
        require(all(d >= 1 for d in self.depths), w, "depths", self.depths, "numbers from 1", "WRN-16-4: (2, 2, 2).")
        require(all(v >= 4 and v % 4 == 0 for v in self.widths), w, "widths", self.widths, "multiples of 4", "WRN-16-4: (64, 128, 256).")
        if self.norm == "group":
            channels = [self.stem_width, *self.widths, *([v // 4 for v in self.widths] if self.block == "bottleneck" else [])]
            fits = all(c % self.groups == 0 for c in channels)
            require(fits, w, "groups", self.groups, f"a divisor of all numbers of channels {sorted(set(channels))}", "16 or 32 are usual.")
        ok = self.norm == "group" or self.weight_standardisation
        require(ok, w, "weight_standardisation", False, "True with norm=none: nothing else holds the variance", "Leave it on.")

    @property
    def width(self) -> int:
        """Numbers of a pooled feature."""
        return self.widths[-1]


@dataclass(frozen=True)
class TimmConfig:
    """An encoder that timm knows by name (models/timm_encoder.py). Its weights come by ``init_from``: nothing is downloaded."""

    kind: Literal["timm"] = "timm"
    name: str = "vit_base_patch16_224"
    """Without a tag, which names weights. Beside timm's own names there is ``resnetv2_{50,101,152}xWIDTH_bit`` for every WIDTH."""
    image_size: int = 224
    """Side of the images in pixels. Trained positions are interpolated where the weights had another size."""
    options: tuple[str, ...] = ()
    """Further arguments of timm's constructor, NAME=VALUE with a value as in JSON: ``depth=6``."""

    def __post_init__(self) -> None:
        check_choices(self)
        w = "model.encoder"
        require(self.name != "" and "." not in self.name, w, "name", self.name, "a timm name without a tag", "Tags go to --init-from.")
        require(self.image_size >= 1, w, "image_size", self.image_size, "at least 1", "Transfer: 384.")
        self.arguments  # noqa: B018  (raises)

    @property
    def arguments(self) -> dict[str, Any]:
        """The options, read.

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
            require(mark != "" and name.isidentifier(), "model.encoder", "options", option, "NAME=VALUE as in JSON", "E.g. depth=6.")
        return found


EncoderConfig = ViTConfig | ResNetConfig | TimmConfig
Tuned = Literal["whole", "last_blocks", "head", "lora", "film", "biases"]


@dataclass(frozen=True)
class ClassifierConfig:
    """An encoder with a linear head, trained with labels: all of it, or the parts that ``tuned`` names (models/tuned.py)."""

    kind: Literal["classifier"] = "classifier"
    encoder: EncoderConfig = field(default_factory=ViTConfig)
    num_classes: int = 1000
    """Labels are 0 ... num_classes - 1; a public number."""
    tuned: Tuned = "whole"
    """What is trained beside the head: the whole encoder, its last blocks, nothing, low-rank additions to its linear maps (LoRA), a scale
    and a shift after its norms (FiLM), or its biases. What is not trained is frozen, and costs no gradient."""
    last_blocks: int = 1
    """Of tuned=last_blocks: these blocks and all that comes after them are trained."""
    lora_rank: int = 8
    lora_scale: float = 1.0
    """Factor of the low-rank product (alpha / rank of Hu et al. 2022)."""
    lora_on: Literal["attention", "mlp", "both"] = "attention"
    """Which linear maps of the blocks get one."""
    head_init: Literal["zero", "xavier", "lecun"] = "zero"
    """Weights of the head at the start: zeros; uniform, as of MAE's linear maps; normal with variance 1 / width (LeCun)."""
    head_scale: float = 1.0
    """Factor of these weights: with lecun, the scaled starts of Mehta et al. 2022, figure 2c."""
    head_bias: float = 0.0
    """Bias of every class at the start. Mehta et al. 2022 have -10, with the sigmoid loss: at first no class is likely."""
    train_head_bias: bool = True
    """False: the bias stays what it is."""
    loss: Literal["softmax", "sigmoid"] = "softmax"
    """Cross-entropy over the classes, or the sum over the classes of binary cross-entropies, which also takes several labels."""
    multi_label: bool = False
    """A record has any number of classes, as the store has them; needs the sigmoid loss."""
    pooling: Literal["mean", "cls", "own"] = "mean"
    """What the head sees: the mean of all places, a transformer's class token, or what a timm model itself hands to its classifier."""

    def __post_init__(self) -> None:
        check_choices(self)
        w = "model"
        require(self.num_classes >= 2, w, "num_classes", self.num_classes, "at least 2", "Count the classes of the store.")
        ok = self.pooling != "cls" or not isinstance(self.encoder, ResNetConfig)
        require(ok, w, "pooling", self.pooling, "'mean' with a convolutional encoder, which has no class token", "Use mean.")
        ok = self.pooling != "own" or isinstance(self.encoder, TimmConfig)
        require(ok, w, "pooling", self.pooling, "'mean' or 'cls' with an encoder of ours", "'own' is for timm's models.")
        require(self.last_blocks >= 1, w, "last_blocks", self.last_blocks, "at least 1", "For none say --model.tuned head.")
        require(self.lora_rank >= 1, w, "lora_rank", self.lora_rank, "at least 1", "Typical: 4 to 16. For none say --model.tuned head.")
        require(0 < self.lora_scale < math.inf, w, "lora_scale", self.lora_scale, "a positive number", "Use 1.")
        require(0 < self.head_scale < math.inf, w, "head_scale", self.head_scale, "a positive number", "For zeros say head_init=zero.")
        ok = self.loss == "sigmoid" or not self.multi_label
        require(ok, w, "loss", self.loss, "'sigmoid' with multi_label", "Softmax says that a record has one class.")
        require(-math.inf < self.head_bias < math.inf, w, "head_bias", self.head_bias, "a number", "The paper: -10; otherwise 0.")


@dataclass(frozen=True)
class CrossDecoderConfig:
    """The decoder of DP-Cap: post-LayerNorm blocks of self-attention, attention to the encoder's tokens, MLP (models/cross_decoder.py)."""

    depth: int = 6
    width: int = 768
    num_heads: int = 12
    mlp_ratio: float = 4.0

    def __post_init__(self) -> None:
        w = "model.decoder"
        for name in ("depth", "width", "num_heads"):
            require(getattr(self, name) >= 1, w, name, getattr(self, name), "at least 1", "DP-Cap-Base: 6 blocks of width 768, 12 heads.")
        ok = self.width % self.num_heads == 0 and self.width % 4 == 0
        require(ok, w, "width", self.width, "a multiple of 4 and of num_heads", "Change one.")
        require(0 < self.mlp_ratio < math.inf, w, "mlp_ratio", self.mlp_ratio, "a positive number", "The papers use 4.")


@dataclass(frozen=True)
class CrossMAEConfig:
    """The captioner's network as a masked autoencoder: hidden patches are predicted through cross-attention (DP-Cap, appendix A.1)."""

    kind: Literal["cross_mae"] = "cross_mae"
    encoder: ViTConfig = field(default_factory=lambda: ViTConfig(qkv_bias=False, train_cls=False))
    decoder: CrossDecoderConfig = field(default_factory=CrossDecoderConfig)
    mask_ratio: float = 0.75
    target: Literal["pixels", "normalised_pixels", "gradients"] = "pixels"
    """As of ``MAEConfig``."""

    def __post_init__(self) -> None:
        check_choices(self)
        w = "model"
        require(0 < self.mask_ratio < 1, w, "mask_ratio", self.mask_ratio, "strictly between 0 and 1", "MAE: 0.75.")
        even = self.target != "gradients" or self.encoder.patch_size % 2 == 0
        require(even, w, "target", self.target, "an even patch_size with gradients (two cells along a side)", "Use patches of 4 or 16.")


PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
"""Token ids of padding, of the beginning and of the end of a caption, in every tokenizer."""


@dataclass(frozen=True)
class CaptionerConfig:
    """Image captioner (DP-Cap): an encoder, and a decoder that says the caption word by word."""

    kind: Literal["captioner"] = "captioner"
    encoder: ViTConfig = field(default_factory=lambda: ViTConfig(qkv_bias=False, train_cls=False))
    decoder: CrossDecoderConfig = field(default_factory=CrossDecoderConfig)
    vocab_size: int = 30_522
    """Entries of the tokenizer, special ones included."""
    num_tokens: int = 40
    """Longest caption in tokens, with those of its beginning and its end."""
    parallel_rate: float = 0.0
    """Share of the records of a step whose words are all predicted at once, from the image alone (CapPa, Tschannen et al. 2023: 0.75)."""
    reconstruction_weight: float = 0.0
    """Above 0, a second loss with this weight: hidden patches predicted through the same decoder (Cap + MAE)."""
    mask_ratio: float = 0.75
    """Of that second loss."""
    train_encoder: bool = True
    """False: the encoder stays as it is and only the rest is trained (the paper's fine-tuning of the decoder, its Table 12)."""

    def __post_init__(self) -> None:
        check_choices(self)
        w = "model"
        require(self.vocab_size > EOS_ID + 1, w, "vocab_size", self.vocab_size, "more than the three special tokens", "The papers: 30522.")
        require(self.num_tokens >= 3, w, "num_tokens", self.num_tokens, "at least 3: beginning, a word, end", "DP-Cap: 40.")
        require(0 <= self.parallel_rate <= 1, w, "parallel_rate", self.parallel_rate, "between 0 and 1", "Cap: 0; CapPa: 0.75.")
        weight = self.reconstruction_weight
        require(0 <= weight < math.inf, w, "reconstruction_weight", weight, "0 or more", "0 for captions alone.")
        require(0 < self.mask_ratio < 1, w, "mask_ratio", self.mask_ratio, "strictly between 0 and 1", "MAE: 0.75.")


ModelConfig = MAEConfig | ClassifierConfig | CrossMAEConfig | CaptionerConfig | HeadConfig
"""In JSON told apart by ``kind``, as are encoders."""
