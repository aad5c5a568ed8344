"""Cases to outcomes: in this process, in worker processes, or on a cluster that is there, through joblib.

Workers import kvtool afresh. What is sent to them and what comes back is plain data: cases are frozen
dataclasses, work is a function of a module, an error is its words.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

from kvtool import __version__
from kvtool.errors import KvtoolError
from kvtool.run import Row

C = TypeVar("C")
Work = Callable[[C], Row]
"""A case to its row; KvtoolError costs that row alone."""
Failed = tuple[str, str, str, int]
"""Message, hint, code and exit code."""
Done = tuple[int, Row | None, Failed | None]
"""The number of a case, and its row or why it has none."""

WORTH_S = 3.0
"""Seconds of work that are worth the start of worker processes, which takes one."""
TRIED_S = 0.3
"""So long cases are done here, to see how long one takes."""
TRIED = 8
"""So many at most where a cluster does the rest."""
CHUNK_S = 0.25
MOST_CHUNK = 256
"""Of cases that are sent together."""
CONNECT_S = 10
BACKENDS = ("dask", "ray")


def outcomes(
    work: Work[C],
    cases: Sequence[tuple[int, C]],
    *,
    jobs: int | None = 1,
    backend: str | None = None,
) -> Iterator[list[Done]]:
    """Every case's outcome, some at a time and in no order. Closing it ends the workers.

    `jobs`: processes at most, None: as many as there are CPUs; fewer seconds than `WORTH_S` are spent here.
    `backend`: the cluster decides.
    """
    if backend is None and jobs != 1 and not _has_joblib():
        if jobs is not None:
            raise _no_joblib()
        jobs = 1
    opened = _opened(backend)  # refused before anything is computed
    times: list[float] = []
    until = TRIED_S
    for case in cases[: len(cases) if backend is None else TRIED]:
        start = time.perf_counter()
        done = [_one(work, *case)]
        times.append(time.perf_counter() - start)
        until -= times[-1]
        yield done
        if until < 0 and jobs != 1:
            break
    rest = cases[len(times) :]
    late = times[len(times) // 2 :]  # the first ones compute what later ones find
    each = sum(late) / max(len(late), 1)
    if backend is None and (each * len(rest) < WORTH_S or _workers(jobs) == 1):
        yield from ([_one(work, *case)] for case in rest)
    elif rest:
        with opened:
            yield from _sent(work, rest, jobs if jobs and backend is None else -1, each)


def _one(work: Work[C], number: int, case: C) -> Done:
    try:
        return number, work(case), None
    except KvtoolError as error:
        return number, None, (error.message, error.hint, error.code, error.exit_code)


def some(work: Work[C], cases: Sequence[tuple[int, C]]) -> tuple[str, list[Done]]:
    """What a worker does: a chunk, and by which kvtool."""
    return __version__, [_one(work, *case) for case in cases]


def _sent(
    work: Work[C], cases: Sequence[tuple[int, C]], jobs: int, each: float
) -> Iterator[list[Done]]:
    joblib = _joblib()
    from joblib.parallel import get_active_backend

    here = get_active_backend()[0].__class__.__name__ == "LokyBackend"
    deaf = {"initializer": _ignore_interrupts} if here else {}

    workers = joblib.effective_n_jobs(jobs)
    size = max(1, min(MOST_CHUNK, int(CHUNK_S / max(each, 1e-6)), -(-len(cases) // (4 * workers))))
    chunks = [cases[start : start + size] for start in range(0, len(cases), size)]
    streams = get_active_backend()[0].supports_return_generator
    parallel = joblib.Parallel(
        n_jobs=jobs, batch_size=1, return_as="generator_unordered" if streams else "list", **deaf
    )
    # A backend that returns lists alone (ray's) is given a few chunks at a time.
    at_once = len(chunks) if streams else 4 * workers
    for start in range(0, len(chunks), at_once):
        tasks = (joblib.delayed(some)(work, one) for one in chunks[start : start + at_once])
        yield from _received(parallel, tasks)


def _ignore_interrupts() -> None:
    """Ctrl-C reaches all processes of a terminal: the one that asked ends the others."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _received(parallel: Any, tasks: Iterator[Any]) -> Iterator[list[Done]]:
    from joblib.externals.loky.process_executor import TerminatedWorkerError

    try:
        found = parallel(tasks)
        try:
            for version, done in found:
                if version != __version__:
                    raise _other_version(version)
                yield done
        finally:
            if hasattr(found, "close"):
                with warnings.catch_warnings(action="ignore"):  # that tasks are cancelled: they are
                    found.close()
    except TerminatedWorkerError as error:
        raise KvtoolError(
            "a worker process was ended from outside, perhaps for want of memory",
            "run the same again with fewer jobs: what is written is kept",
            code="worker_died",
        ) from error
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "kvtool":
            raise
        raise _other_version("none, or without its " + str(error.name)) from error


def _other_version(version: str) -> KvtoolError:
    return KvtoolError(
        f"the workers' kvtool is another than this one, {__version__}: {version}",
        f"install it where they run: pip install kvtool=={__version__}",
        code="no_cluster",
    )


# --- joblib and its backends ----------------------------------------------------------------------


def _workers(jobs: int | None) -> int:
    """As many as there are CPUs to this process (-1, to joblib) unless fewer are asked for."""
    return int(_joblib().effective_n_jobs(jobs or -1))


def _has_joblib() -> bool:
    import importlib.util

    try:
        return importlib.util.find_spec("joblib") is not None
    except ValueError:  # it is None among the modules
        return False


def _joblib() -> Any:
    try:
        import joblib
    except ImportError as error:
        raise _no_joblib() from error
    return joblib


def _no_joblib() -> KvtoolError:
    return _missing("joblib, for more than one job,", "'kvtool[sweep]'")


def _missing(what: str, packages: str) -> KvtoolError:
    return KvtoolError(f"{what} is not installed", f"pip install {packages}", code="missing_extra")


def _opened(backend: str | None) -> AbstractContextManager[object]:
    """The backend as joblib's own; a cluster is looked for at once."""
    if backend is None:
        return nullcontext()
    if backend not in _CLUSTERS:
        raise KvtoolError(
            f"there is no backend '{backend[:40]}'", f"there are {', '.join(_CLUSTERS)}"
        )
    _joblib()
    return _within(backend, _CLUSTERS[backend]())


@contextmanager
def _within(backend: str, cluster: AbstractContextManager[object]) -> Iterator[None]:
    with cluster, _joblib().parallel_config(backend=backend):
        yield


def _dask() -> AbstractContextManager[object]:
    """The client that is there, or one of the scheduler that DASK_SCHEDULER_ADDRESS names."""
    try:
        from distributed import Client, get_client
    except ImportError as error:
        raise _missing("dask.distributed", "'kvtool[sweep]' 'dask[distributed]'") from error
    try:
        get_client()
        return nullcontext()
    except ValueError:
        address = os.environ.get("DASK_SCHEDULER_ADDRESS", "")
    start = "start one (dask scheduler; dask worker HOST:8786), then export DASK_SCHEDULER_ADDRESS=tcp://HOST:8786"
    if not address:
        raise KvtoolError("no dask cluster is named", start, code="no_cluster")
    try:
        made: Callable[..., AbstractContextManager[object]] = Client
        client = made(address, timeout=CONNECT_S)
    except (OSError, ValueError) as error:
        raise KvtoolError(
            f"no dask scheduler answers at {address[:100]}", start, code="no_cluster"
        ) from error
    return client


def _ray() -> AbstractContextManager[object]:
    """The cluster that this process is connected to, or that RAY_ADDRESS names."""
    try:
        import ray
        from ray.util.joblib import register_ray
    except ImportError as error:
        raise _missing("ray", "'kvtool[sweep]' ray") from error
    if not ray.is_initialized():
        address = os.environ.get("RAY_ADDRESS", "")
        start = "start one (ray start --head), then export RAY_ADDRESS=auto"
        if not address:
            raise KvtoolError("no ray cluster is named", start, code="no_cluster")
        try:
            ray.init(address=address, log_to_driver=False)
        except (ConnectionError, ValueError) as error:
            raise KvtoolError(
                f"no ray cluster answers at {address[:100]}", start, code="no_cluster"
            ) from error
    register_ray()
    return nullcontext()


_CLUSTERS: dict[str, Callable[[], AbstractContextManager[object]]] = {"dask": _dask, "ray": _ray}
