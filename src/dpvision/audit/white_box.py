"""The white-box audit of a plan: acceptance of the mechanism that executes it, and the bound.

Everything is computed on synthetic records, so the result of a finished run's audit is public: it
is a function of the run's public settings, of this code and of fresh random numbers.
"""

import math
from pathlib import Path
from typing import Any

from dpvision.audit.acceptance import Say, accept
from dpvision.audit.bound import lower_bound
from dpvision.config import HeadConfig, RunConfig
from dpvision.errors import ConfigError
from dpvision.privacy.ledger import read_ledger
from dpvision.privacy.plan import DPPlan, draft_plan
from dpvision.runs.folder import read_run
from dpvision.runs.run import code_versions
from dpvision.statement.audits import FORMAT
from dpvision.train import distributed


def finished_run(root: Path) -> tuple[RunConfig, DPPlan]:
    """Return settings and plan of a finished run, from its public files.

    Raises:
        ConfigError: the run has no guarantee.
        CheckpointError: there is no run, or its ledger cannot be read.
    """
    base, config, _ = read_run(root)
    if base != root:
        raise ConfigError(
            f"audit: {root} is a run without a guarantee on private images; expected guarantee=dp. "
            "Audit a private run."
        )
    return config, read_ledger(root / "ledger.jsonl").plan


def white_box(config: RunConfig, say: Say, plan: DPPlan | None = None) -> dict[str, Any]:
    """Audit a plan in the loss and precision of the config, on all ranks of torchrun.

    Args:
        config: of a network.
        say: shows progress.
        plan: if None, the one of the config's privacy settings.

    Returns:
        The result, ready for JSON.

    Raises:
        ConfigError: a head, or a plan without a guarantee.
    """
    if isinstance(config.model, HeadConfig):
        raise ConfigError(
            f"audit: {config.recipe} is a head on frozen features; expected a network, which the "
            "training loop trains. Audit one of the recipes that `dpvision train` lists."
        )
    if config.privacy.guarantee != "dp":
        raise ConfigError(
            f"audit: {config.recipe} has guarantee={config.privacy.guarantee}; expected dp: "
            "without noise there is nothing to audit. Choose a private recipe or run."
        )
    plan = draft_plan(config.privacy) if plan is None else plan
    group = distributed.join(config.hardware.device)
    try:
        mechanism = accept(config, plan, group, say)
        bound = lower_bound(config, plan, group, say)
    finally:
        distributed.leave()
    checks = [mechanism[name] for name in ("noise", "shift", "parameter")]
    checks += [bound, *bound["checks"].values()]
    return {
        "format": FORMAT,
        "kind": "white-box",
        "passed": all(check["passed"] for check in checks),
        "recipe": config.recipe,
        "plan": plan.to_dict(),
        "mechanism": mechanism,
        "bound": bound,
        "false_alarm": math.fsum(check["false_alarm"] for check in checks),
        "ranks": group.world_size,
        "device": group.device.type,
        "code_sha256": code_versions()["code_sha256"],
    }
