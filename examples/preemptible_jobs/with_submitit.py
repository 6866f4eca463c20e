"""A run as a submitit job: python with_submitit.py LOGS RECIPE [options of dpvision train]

submitit requeues the job after a preemption and at its time limit; the run goes on.
"""

import os
import signal
import subprocess
import sys

import submitit
from submitit.helpers import DelayedSubmission

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
HANDLED = ["--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGUSR1"]
# SLURM sends submitit's own signal, SIGUSR2, to all processes: torchrun is to leave it to submitit.
IGNORING = ["bash", "-c", "trap '' USR2; exec \"$@\"", "job"]


class Training:
    def __init__(self, options: list[str], ranks: int) -> None:
        self.options, self.ranks = options, ["--nproc-per-node", str(ranks)]

    def __call__(self) -> None:
        command = [*TORCHRUN, *HANDLED, "--shutdown-timeout", "180", *self.ranks, "-m", "dpvision"]
        command += ["train", *self.options, "--resume-or-start"]
        self.process = subprocess.Popen([*IGNORING, *command])
        if status := self.process.wait():
            raise SystemExit(status)

    def checkpoint(self) -> DelayedSubmission:
        """Stop the run; submitit calls this in its signal handler."""
        self.process.send_signal(signal.SIGUSR1)
        os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)  # __call__ is in wait()
        return DelayedSubmission(Training(self.options, int(self.ranks[-1])))

    __submitit_checkpoint__ = checkpoint  # its name from submitit 1.6 on


if __name__ == "__main__":
    executor = submitit.AutoExecutor(folder=sys.argv[1], slurm_max_num_timeout=20)
    ranks = int(os.environ.get("RANKS", "8"))
    executor.update_parameters(timeout_min=1440, slurm_signal_delay_s=240, gpus_per_node=ranks)
    print(executor.submit(Training(sys.argv[2:], ranks)).job_id)
