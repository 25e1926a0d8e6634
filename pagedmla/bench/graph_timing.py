"""How long a step takes on a GPU without its launch: many of them in one CUDA graph, timed by events around its replay."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pagedmla.bench.timing import StepTime

WARM_UP_CALLS = 3
"""Compiles, tunes and fills caches before the capture, in which none of it is allowed."""
REPEATS = 10
"""Calls in a graph: enough that the replay's own launch does not count."""


class CapturedStep:
    """A step captured ``repeats`` times in a row, in one graph.

    The calls follow one another on the same input, so what fits in the L2 cache is read from there.

    Attributes:
        result: what the last captured call returned; its memory holds what the latest replay wrote.
    """

    def __init__(self, step: Callable[[], Tensor], device: torch.device, repeats: int = REPEATS) -> None:
        """Captures ``step`` on a stream of its own.

        Args:
            step: launches work on the current stream; reads nothing of the device on the host.
            device: where; made current for the capture.
            repeats: calls in the graph.
        """
        self._device = device
        self._repeats = repeats
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARM_UP_CALLS):
                    step()
            stream.synchronize()
            with torch.cuda.graph(self._graph, stream=stream):
                for _ in range(repeats):
                    self.result = step()
            self.replay()

    def replay(self) -> None:
        """Runs the graph once and waits for it."""
        with torch.cuda.device(self._device):
            self._graph.replay()
            torch.cuda.synchronize()

    def time(self, rounds: int = 7) -> StepTime:
        """Microseconds a step, over ``rounds`` replays."""
        found = []
        with torch.cuda.device(self._device):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            for _ in range(rounds):
                begin.record()
                self._graph.replay()
                end.record()
                end.synchronize()
                found.append(begin.elapsed_time(end) * 1e3 / self._repeats)
        return StepTime.of(found)
