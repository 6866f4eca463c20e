"""The files of a curation on a Ray cluster, each a task of one core.

A task writes its part into the folder of the curation, on a disk that all machines mount, as a
process of one machine does, and returns a path. So no image passes through Ray, a task may be done
again after its worker or machine is lost, and either engine goes on from what the other left.
"""

import contextlib
import os
import re
import secrets
import shutil
import socket
import tempfile
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from typing import Any, TypeVar

from dpvision.data.import_work import Spread
from dpvision.environment import own_cores
from dpvision.errors import ConfigError, DataError

T = TypeVar("T")
R = TypeVar("R")

_RETRIES = 10
"""How often a task is done again whose worker was lost."""
_AHEAD = 2
"""Tasks that are running or next, for each core of the cluster."""
_COUNTED_EVERY_S = 10.0
"""Machines may join and leave."""
_ENDED_WITHIN_S = 30.0
_ANSWERS_WITHIN_S = 20.0
_HOST_PORT = re.compile(r"([^/:]+):(\d{1,5})")
_STORE_BYTES = 100_000_000
"""Of Ray's memory for objects, of which we have none."""


@contextlib.contextmanager
def ray_cluster(workers: int | None) -> Iterator[Spread]:
    """Yield what spreads files over the cluster at ``RAY_ADDRESS``, of which this machine must be
    one, or else over a cluster of this machine alone, which ends with the block.

    Ray sends nothing to its makers. A cluster of this machine admits who has its token, which is in
    the environment of its processes alone; a standing one admits whom its operator does, and
    whoever may use it can read the images.

    Args:
        workers: files at once; if None, as many as the cluster has cores.

    Raises:
        ConfigError: Ray is not installed, or no cluster answers.
    """
    address = os.environ.get("RAY_ADDRESS", "")
    settings = {"RAY_USAGE_STATS_ENABLED": "0"}
    if not address:
        settings |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError:
        raise ConfigError(
            "data curate: engine=ray: Ray is not installed; expected it. In a checkout: pip "
            "install '.[curate]'. Or use --engine local."
        ) from None
    with contextlib.ExitStack() as stack:
        if not ray.is_initialized():
            options: dict[str, Any] = {"address": address}
            if not address:
                folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # short: it has sockets
                stack.callback(shutil.rmtree, folder, ignore_errors=True)
                options = {
                    "address": "local",
                    "num_cpus": own_cores() if workers is None else workers,
                    "include_dashboard": False,
                    "object_store_memory": _STORE_BYTES,
                    "_node_ip_address": "127.0.0.1",
                    "_temp_dir": folder,
                }
            try:
                if host_port := _HOST_PORT.fullmatch(address):  # Ray waits without an end
                    host, port = host_port.groups()
                    socket.create_connection((host, int(port)), _ANSWERS_WITHIN_S).close()
                ray.init(**options, log_to_driver=False, logging_level="ERROR")
            except Exception as error:  # of many classes, by what does not answer
                raise ConfigError(
                    f"data curate: engine=ray: {address or 'this machine'}: "
                    f"{' '.join(str(error).split())}; expected a Ray cluster that answers, of "
                    "which this machine is one, with the same Ray and Python. Check RAY_ADDRESS "
                    "(unset it for a cluster of this machine alone), or use --engine local."
                ) from None
            stack.callback(ray.shutdown)
        yield partial(_spread, ray, workers)


def _spread(
    ray: Any, workers: int | None, function: Callable[[T], R], items: Iterable[T]
) -> Generator[R, None, None]:
    """Yield ``function(item)`` in the order of the items; see ``import_work.Spread``."""
    call = ray.remote(num_cpus=1, max_retries=_RETRIES, retry_exceptions=False)(function)
    waiting, asked, running = iter(items), deque[tuple[T, Any]](), dict[Any, None]()
    limit, counted, more = 0, -_COUNTED_EVERY_S, True
    try:
        while more or asked:
            if time.monotonic() - counted >= _COUNTED_EVERY_S:
                cores = int(ray.cluster_resources().get("CPU", 1))
                limit = workers or _AHEAD * max(1, cores)
                counted = time.monotonic()
            while more and len(running) < limit:
                item = next(waiting, None)
                if item is None:
                    more = False
                    break
                ref = call.remote(item)
                asked.append((item, ref))
                running[ref] = None
            while asked and asked[0][1] not in running:
                yield _result(ray, *asked.popleft())
            if running:
                done, _ = ray.wait(list(running), num_returns=1, timeout=_COUNTED_EVERY_S)
                for ref in done:
                    del running[ref]
    finally:
        for ref in running:
            ray.cancel(ref, force=True)
        if running:  # what they were writing is removed next
            ray.wait(list(running), num_returns=len(running), timeout=_ENDED_WITHIN_S)


def _result(ray: Any, item: Any, ref: Any) -> Any:
    try:
        return ray.get(ref)
    except ray.exceptions.RayTaskError as error:
        if not isinstance(error.cause, Exception):
            raise
        raise error.cause from None
    except ray.exceptions.RayError as error:
        raise DataError(
            f"data curate: {item.part.name}: Ray lost the worker that reads it more than "
            f"{_RETRIES} times ({type(error).__name__}); expected it to end by itself. Often "
            "memory was short: give fewer --workers, or machines with more. Then run the same "
            "command again."
        ) from None
