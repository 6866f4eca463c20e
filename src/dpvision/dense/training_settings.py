"""Settings of ``training_loop``: training and hardware."""

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from dpvision.config.checks import check_choices, check_ranges
from dpvision.errors import ConfigError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class DenseTrainSettings:
    """Settings of the training. The parameter groups have the rates, which the schedule
    multiplies.
    """

    epochs: float = 100.0
    """Passes over the images, possibly fractional. Steps are epochs x images / batch, rounded down,
    at least 1.
    """
    batch_size: int = 16
    """Images per step, over all ranks."""
    warmup_steps: int = 1500
    """Steps in which the rate rises linearly from ``warmup_start`` times its scheduled value."""
    warmup_start: float = 1e-6
    schedule: Literal["polynomial", "steps", "constant"] = "polynomial"
    """"polynomial": (1 - t / T)^power; "steps": a factor ``step_factor`` at each t / T in
    ``step_at``.
    """
    power: float = 1.0
    step_at: tuple[float, ...] = (8 / 9, 0.963)
    step_factor: float = 0.1
    betas: tuple[float, float] = (0.9, 0.999)
    max_grad_norm: float = 0.0
    """Maximum norm of the whole gradient; 0 disables clipping."""
    seed: int = 0

    def __post_init__(self) -> None:
        check_choices(self)
        check_ranges(
            "training",
            self,
            ("epochs", 0 < self.epochs < math.inf, "more than 0"),
            ("batch_size", self.batch_size >= 1, "at least 1"),
            ("warmup_steps", self.warmup_steps >= 0, "0 or more"),
            ("warmup_start", 0 <= self.warmup_start <= 1, "0 to 1"),
            ("power", 0 < self.power < math.inf, "more than 0"),
            (
                "step_at",
                all(0 < at < 1 for at in self.step_at),
                "parts of the run, between 0 and 1",
            ),
            ("step_factor", 0 < self.step_factor <= 1, "0 < factor <= 1"),
            ("betas", all(0 <= beta < 1 for beta in self.betas), "0 <= beta < 1"),
            ("max_grad_norm", 0 <= self.max_grad_norm < math.inf, "0 or more"),
            ("seed", 0 <= self.seed < 2**31, "between 0 and 2^31 - 1"),
        )

    def steps(self, num_images: int) -> int:
        """Return the number of steps of a run over ``num_images`` images."""
        return max(1, int(self.epochs * num_images / self.batch_size + 1e-9))


@dataclass(frozen=True)
class DenseHardware:
    """Hardware settings, which change results only by rounding and batch statistics."""

    physical_batch_size: int = 2
    """Images in one forward pass of one process; gradients of several passes are accumulated."""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """Autocast of the forward pass; weights, gradients and optimizer stay in float32. float16 needs
    a GPU.
    """
    workers: int = 2
    """Threads that read and augment images."""
    checkpoint_every_s: float = 600.0
    """Seconds between checkpoints in the work folder; one is also written at the end."""

    def __post_init__(self) -> None:
        check_choices(self)
        check_ranges(
            "hardware",
            self,
            ("physical_batch_size", self.physical_batch_size >= 1, "at least 1"),
            ("workers", self.workers >= 1, "at least 1"),
            ("checkpoint_every_s", 0 <= self.checkpoint_every_s < math.inf, "0 or more"),
        )

    def autocast(self, device: "torch.device") -> Any:
        """Return the context of a forward pass.

        Raises:
            ConfigError: float16 without a GPU, or bfloat16 on one that does not have it.
        """
        import torch

        from dpvision.devices import require_precision

        if self.precision == "float32":
            return nullcontext()
        if self.precision == "float16" and device.type != "cuda":
            raise ConfigError(
                "hardware: precision='float16'; expected float32 or bfloat16 without a GPU. Use "
                "--hardware.precision bfloat16."
            )
        require_precision(self.precision, device)
        return torch.autocast(device.type, dtype=getattr(torch, self.precision))
