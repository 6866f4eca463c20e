"""Text of the cost that ``dpvision plan RECIPE --gpus G --device NAME`` predicts."""

from dpvision.cli.output import pairs
from dpvision.plan.cost import Cost
from dpvision.plan.device_table import DEVICES


def cost_text(cost: Cost, allowed_hours: float | None) -> str:
    """Return the prediction as text, with a note where memory or hours do not suffice.

    Args:
        allowed_hours: hours that may be used, if they were declared.
    """
    memory = DEVICES[cost.device].memory_bytes
    parts = (
        ("compute", cost.compute_s),
        ("loading", cost.load_s),
        ("all-reduce", cost.all_reduce_s),
        ("noise", cost.noise_s),
    )
    shown = ", ".join(f"{name} {seconds:.2g} s" for name, seconds in parts if seconds > 0)
    cores = max(1, cost.records_per_s * DEVICES["cpu"].record_s)
    lines = [
        f"cost on {cost.gpus} x {cost.device} ({cost.how})",
        pairs(
            {
                "hours": cost.hours,
                "a step": f"{cost.step_s:.3g} s: {shown}",
                "memory of a rank": f"{cost.memory_gb:.3g} GB, "
                f"{cost.physical_batch_size} images at once",
                "images to load": f"{cost.records_per_s:,.0f} a second and device, "
                f"{cores:,.0f} cores at the measured speed for 32 px",
            }
        ),
    ]
    if memory is not None and cost.memory_gb * 1e9 > memory:
        lines.append(
            f"Note: {memory / 1e9:.0f} GB do not hold that. Lower "
            "--hardware.physical-batch-size, which changes no result."
        )
    if allowed_hours is not None and cost.hours > allowed_hours:
        lines.append(
            f"Note: {cost.hours:.3g} hours are needed and {allowed_hours:g} are there. Use more "
            "devices or fewer steps."
        )
    return "\n".join(lines)
