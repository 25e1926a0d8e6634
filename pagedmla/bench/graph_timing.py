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
_LEAST_FLUSH_BYTES = 64 << 20
"""Read to empty the L2 cache where the device does not say how large that is."""


class CapturedStep:
    """A step captured ``repeats`` times in a row, in one graph.

    The calls follow one another on the same input, so what fits in the L2 cache is read from there, unless ``before`` fills the
    cache with something else.

    Attributes:
        result: what the last captured call returned; its memory holds what the latest replay wrote.
    """

    def __init__(
        self,
        step: Callable[[], Tensor],
        device: torch.device,
        repeats: int = REPEATS,
        before: Callable[[], object] = lambda: None,
    ) -> None:
        """Captures ``step`` on a stream of its own.

        Args:
            step: launches work on the current stream; reads nothing of the device on the host.
            device: where; made current for the capture.
            repeats: calls in the graph.
            before: captured ahead of each of them, and part of the time.
        """
        self._device = device
        self._repeats = repeats
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARM_UP_CALLS):
                    before()
                    step()
            stream.synchronize()
            with torch.cuda.graph(self._graph, stream=stream):
                for _ in range(repeats):
                    before()
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


def time_cold(step: Callable[[], Tensor], device: torch.device, rounds: int = 7) -> StepTime:
    """Microseconds of a step that finds nothing of its input in the L2 cache.

    A graph in which twice the cache is read before each call, less a graph of the reading alone, round by round.  Read and not
    written: lines that are written would have to be put away in the step's own time.
    """
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    other = torch.zeros(max(2 * l2_bytes, _LEAST_FLUSH_BYTES) // 4, dtype=torch.float32, device=device)

    def flush() -> Tensor:
        return other.sum()

    both, alone = CapturedStep(step, device, before=flush), CapturedStep(flush, device)
    return StepTime.of([both.time(1).median_us - alone.time(1).median_us for _ in range(rounds)])


def time_difference(
    longer: Callable[[], Tensor], shorter: Callable[[], Tensor], device: torch.device, rounds: int = 7
) -> StepTime:
    """Microseconds by which ``longer`` takes longer in a graph than ``shorter``, round by round."""
    first, second = CapturedStep(longer, device), CapturedStep(shorter, device)
    return StepTime.of([first.time(1).median_us - second.time(1).median_us for _ in range(rounds)])
