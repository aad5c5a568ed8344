"""A forward pass recorded once as a CUDA graph: what a step costs without Python between its kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

WARM_UPS = 2
"""Runs before recording: kernels are compiled and libraries start in them."""
WORDS = 160


@dataclass(frozen=True, slots=True)
class Execution:
    """How decode steps are run. `error`: why they are no graph though one was wanted."""

    is_graph: bool | None
    """None: somebody else runs them and does not say."""
    error: str | None = None


EAGER = Execution(False)


class Replay:
    """Calls a function of fixed tensors, at best as a CUDA graph.

    `run` reads and writes tensors that stay where they are; run again with the same input it must
    do the same, after `rewind` has put back what it counts. Where nothing is recorded it is called.
    `run` must not hold who holds the Replay: such a cycle would keep a cache alive after its run.
    """

    def __init__(self, run: Callable[[], Any], rewind: Callable[[], None], *, wanted: bool) -> None:
        self._run = run
        self._rewind = rewind
        self._wanted = wanted
        self._graph: Any = None
        self._out: Any = None
        self._error: str | None = None

    @property
    def execution(self) -> Execution:
        """Whether calls are replayed, and why not."""
        return Execution(self._graph is not None, self._error)

    def __call__(self) -> Any:
        """One run; the result is a copy, the next run does not change it."""
        if self._graph is None:
            return self._run()
        self._graph.replay()
        return self._out.clone()

    def record(self) -> None:
        """Record one run on the input that is there, if that is wanted and possible."""
        if self._wanted and self._graph is None and self._error is None:
            self._record()

    def _record(self) -> None:
        import torch

        main, side = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(main)
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                self._rewind()
                self._run()
        main.wait_stream(side)
        self._rewind()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._out = self._run()
            self._graph = graph
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError as error:  # something in it cannot be recorded: it is called instead
            self._out = None
            self._error = " ".join(str(error).split())[:WORDS] or type(error).__name__
        self._rewind()
