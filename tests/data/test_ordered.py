"""ordered_map against map, how far it takes items ahead, and what is left of its processes when
their parent is killed.
"""

import math
import os
import signal
import subprocess
import sys
from contextlib import closing
from itertools import count
from pathlib import Path

import pytest

from dpvision.data.ordered import ordered_map

KINDS = pytest.mark.parametrize("processes", [False, True])


@KINDS
def test_results_are_those_of_map_in_order(processes):
    made = ordered_map(math.factorial, range(200), workers=2, ahead=4, processes=processes)
    assert list(made) == list(map(math.factorial, range(200)))


@KINDS
def test_an_endless_iterable_is_taken_only_ahead_items_further_than_the_results(processes):
    taken = []
    items = (taken.append(i) or i for i in count())
    with closing(
        ordered_map(math.factorial, items, workers=2, ahead=5, processes=processes)
    ) as made:
        assert not taken
        for i in range(3):
            assert next(made) == math.factorial(i)
            assert len(taken) == i + 6
    assert len(taken) == 8


@KINDS
def test_an_error_is_raised_in_place_of_its_result(processes):
    made = ordered_map(math.factorial, [3, -1, 4], workers=2, ahead=4, processes=processes)
    assert next(made) == 6
    with pytest.raises(ValueError, match="negative"):
        next(made)


PROGRAM = """
import itertools, math, sys
from dpvision.data.ordered import ordered_map
if __name__ == "__main__":
    for _ in ordered_map(math.factorial, itertools.count(), workers=2, ahead=4, processes=True):
        print("going", flush=True)
        sys.stdin.read()
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_processes_end_with_a_killed_parent(tmp_path, how):
    program = Path(tmp_path, "program.py")
    program.write_text(PROGRAM)
    with subprocess.Popen(
        [sys.executable, str(program)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == b"going\n"
        parent.send_signal(how)
        try:
            parent.communicate(
                timeout=60
            )  # returns when the last of the workers, who inherit stdout, has ended
        except subprocess.TimeoutExpired:
            os.killpg(parent.pid, signal.SIGKILL)
            pytest.fail("workers are alive a minute after their parent")


CLOSED = """
import multiprocessing, os, signal, time
from dpvision.data.ordered import ordered_map
if __name__ == "__main__":
    calls = ordered_map(time.sleep, [0.1, 0.1, 900, 900], workers=2, ahead=1, processes=True)
    next(calls)
    time.sleep(1)
    for process in multiprocessing.active_children():
        os.kill(process.pid, signal.SIGKILL)
    calls.close()
"""


def test_a_map_whose_processes_were_ended_first_can_be_closed(tmp_path):
    """As at Ctrl-C, which reaches the processes and their parent at once."""
    program = Path(tmp_path, "program.py")
    program.write_text(CLOSED)
    done = subprocess.run([sys.executable, str(program)], timeout=120)
    assert done.returncode == 0
