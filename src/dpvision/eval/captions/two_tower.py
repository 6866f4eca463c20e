"""Models of two towers (CLIP, SigLIP) in the tests of captioners: the answer is the candidate whose
text has the highest cosine with the image.

Legend: B images, C candidates of an image, L tokens, D width.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dpvision.config import PAD_ID, DataConfig
from dpvision.data.transform import LibraryData
from dpvision.encoders.hugging_face import fitting, quiet_transformers, read_folder
from dpvision.errors import ConfigError
from dpvision.eval.captions.open_captioner import OpenCaptioner, open_captioner
from dpvision.runs.lineage import shaped_in_confidence

_MODELS = {"clip": "CLIPModel", "siglip": "SiglipModel"}
_TOKENIZERS = ("tokenizer.json", "vocab.json", "spiece.model")
_PREFIX = "hf:"
_TEXTS_AT_ONCE = 64


@dataclass(frozen=True)
class TwoTower:
    """A frozen model of two towers, which answers as an ``OpenCaptioner`` does. Made by
    ``open_asker``.
    """

    name: str
    """Name in scores."""
    model: Any
    tokenizer: Any
    data: DataConfig
    image_size: int
    num_tokens: int
    """Maximum number of tokens of a text."""
    confidential: bool
    texts: dict[bytes, Tensor] = field(default_factory=dict, repr=False)
    """Embeddings of the texts that were asked for, by their tokens."""

    rule = "highest cosine"
    special = 0  # ``words`` has the special tokens already

    @property
    def device(self) -> torch.device:
        """Device of the network."""
        return self.model.logit_scale.device

    def words(self, caption: str) -> list[int]:
        """Return the tokens of a caption with its special tokens, without truncation."""
        return list(self.tokenizer(caption)["input_ids"])

    def row(self, words: list[int]) -> np.ndarray:
        """Return ``words`` padded, int64 (num_tokens,)."""
        made = np.full(self.num_tokens, self.tokenizer.pad_token_id, dtype=np.int64)
        made[: len(words)] = words
        return made

    def encode(self, caption: str) -> np.ndarray:
        """Return the tokens of a caption, int64 (num_tokens,), padded or truncated."""
        made = self.tokenizer(caption, truncation=True, max_length=self.num_tokens)
        return self.row(list(made["input_ids"]))

    @torch.inference_mode()
    def look(self, x_BCHW: Tensor) -> Tensor:
        """Return the embeddings of images, of length 1, (B, D)."""
        return F.normalize(self.model.get_image_features(x_BCHW).pooler_output, dim=-1)

    @torch.inference_mode()
    def losses(self, image_BD: Tensor, token_BCL: Tensor) -> Tensor:
        """Return minus the cosine of every candidate with its image, float32 (B, C); infinite for
        rows of padding only.
        """
        shared = token_BCL.stride(0) == 0  # all images have the same candidates
        rows_BCL = (token_BCL[:1] if shared else token_BCL).cpu().numpy()
        keys = [row.tobytes() for row in rows_BCL.reshape(-1, rows_BCL.shape[-1])]
        new = list(dict.fromkeys(key for key in keys if key not in self.texts))
        for start in range(0, len(new), _TEXTS_AT_ONCE):
            part = new[start : start + _TEXTS_AT_ONCE]
            ids = np.frombuffer(b"".join(part), dtype=np.int64).reshape(len(part), -1)
            found = self.model.get_text_features(torch.tensor(ids, device=image_BD.device))
            made_CD = F.normalize(found.pooler_output, dim=-1)
            self.texts.update(zip(part, made_CD, strict=True))
        text_CD = torch.stack([self.texts[key] for key in keys])
        if shared:
            loss_BC = -image_BD @ text_CD.T
        else:
            text_BCD = text_CD.unflatten(0, token_BCL.shape[:2])
            loss_BC = -(text_BCD @ image_BD[:, :, None])[..., 0]
        return loss_BC.masked_fill((token_BCL == PAD_ID).all(dim=-1), torch.inf)

    def untrained(self) -> "TwoTower":
        """Return the same network with random weights, the same each time: the baseline "random
        weights".
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = type(self.model)(self.model.config)
        model = model.to(self.device).eval().requires_grad_(False)
        return replace(self, name="random weights", model=model, confidential=False, texts={})


Asker = OpenCaptioner | TwoTower


def is_two_tower(spec: str | Path) -> bool:
    """Return whether a spec names a folder of transformers."""
    return str(spec).startswith(_PREFIX)


def open_asker(spec: str | Path, *, ema: bool = False, device: str | torch.device = "cpu") -> Asker:
    """Open a captioner as ``open_captioner`` does, or with ``hf:DIR`` a CLIP or SigLIP model of two
    towers with the tokenizer in its folder.

    Raises:
        ConfigError: ``ema`` with a folder of transformers, or as ``read_folder``.
        CheckpointError: the folder cannot be read or has no tokenizer; or as ``open_captioner``.
    """
    if not is_two_tower(spec):
        return open_captioner(spec, ema=ema, device=device)
    if ema:
        raise ConfigError(
            f"captioner: --ema with {spec}; expected a run, which has averaged weights. Drop --ema."
        )
    found = read_folder(Path(str(spec).removeprefix(_PREFIX)), tuple(_MODELS))
    text = found.config.text_config
    model = found.model(_MODELS[found.kind], found.config).to(device).requires_grad_(False)
    with quiet_transformers() as transformers, fitting(found.path, "tokenizer"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            found.path, local_files_only=True, trust_remote_code=False
        )
        # without files transformers makes an empty one
        if not any((found.path / name).is_file() for name in _TOKENIZERS):
            raise ValueError(f"none of {', '.join(_TOKENIZERS)}")
        if tokenizer.pad_token_id is None or len(tokenizer) > text.vocab_size:
            raise ValueError(f"{len(tokenizer)} entries for {text.vocab_size}, or no padding")
    images = dict(found.images)
    size = images.pop("image_size")
    return TwoTower(
        name=f"hf:{found.path.name}",
        model=model,
        tokenizer=tokenizer,
        data=LibraryData(**images),
        image_size=size,
        num_tokens=int(text.max_position_embeddings),
        confidential=shaped_in_confidence(found.weights.lineage),
    )
