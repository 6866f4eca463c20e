"""The state of a detection or segmentation training in one safetensors file, written atomically and
bound to that training.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from dpvision.errors import CheckpointError
from dpvision.files import replacing
from dpvision.weights import Lineage, pack

FILE = "training.safetensors"
_FORMAT = "dpvision-dense-1"


@dataclass(frozen=True)
class DenseCheckpoint:
    """The path and identity of a training's state. Made by ``open_checkpoint``, before the first
    step.
    """

    path: Path
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    about: str
    start: str
    """SHA-256 of the weights that the training started from."""
    lineage: Lineage
    """Lineage of those weights and of the training images, written into the file, which other
    commands may open as an encoder.
    """

    def save(self, step: int) -> None:
        """Replace the saved state by the state after ``step`` steps.

        Raises:
            CheckpointError: the file cannot be written; the previous state is unchanged.
        """
        tensors = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        for i, p in enumerate(self._parameters):
            tensors |= {
                f"optimizer.{i}.{key}": value
                for key, value in self.optimizer.state.get(p, {}).items()
            }
        blob = pack(
            tensors,
            self.lineage,
            {
                "format": _FORMAT,
                "step": str(step),
                "about": self.about,
                "start": self.start,
                "scaler": json.dumps(self.scaler.state_dict()),
            },
        )
        try:
            with replacing(self.path) as partial:
                partial.write_bytes(blob)
        except OSError as error:
            raise CheckpointError(
                f"training: cannot write {self.path} ({error.strerror or error}); the previous "
                "one is unchanged. Free space, then repeat."
            ) from None

    def restore(self) -> int:
        """Restore the saved state.

        Returns:
            Its number of steps; 0 if there is none.

        Raises:
            CheckpointError: it cannot be read, or another training wrote it.
        """
        if not self.path.exists():
            return 0
        try:
            with safe_open(self.path, framework="pt") as file:
                meta = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"training: {self.path} cannot be read ({error}); expected a checkpoint. Move it "
                "away."
            ) from None
        for name, ours in (("format", _FORMAT), ("start", self.start), ("about", self.about)):
            if meta.get(name) != ours:
                got = f"{name}={meta.get(name)!r}"
                remedy = (
                    "Choose another --work, or use the settings, images and encoder of that "
                    "training."
                )
                raise CheckpointError(
                    f"training: {self.path} has {got}; expected {ours!r}, this training's. {remedy}"
                )
        self.model.load_state_dict(_below(tensors, "model."))
        states = [_below(tensors, f"optimizer.{i}.") for i in range(len(self._parameters))]
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict(
            {"state": {i: state for i, state in enumerate(states) if state}, "param_groups": groups}
        )
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(json.loads(meta["scaler"]))
        return int(meta["step"])

    @property
    def _parameters(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]


def open_checkpoint(
    work: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    about: str,
    lineage: Lineage,
) -> DenseCheckpoint:
    """Open the checkpoint of a training before its first step; ``model`` must have its initial
    weights.

    Raises:
        CheckpointError: the folder cannot be made.
    """
    try:
        work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"training: work={str(work)!r} ({error.strerror}); expected a writable folder. "
            "Choose another --work."
        ) from None
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        digest.update(
            value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        )
    return DenseCheckpoint(
        work / FILE, model, optimizer, scaler, about, digest.hexdigest(), lineage
    )


def _below(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): value
        for name, value in tensors.items()
        if name.startswith(prefix)
    }
