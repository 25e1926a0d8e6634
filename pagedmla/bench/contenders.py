"""Who takes part: our backends and schedules, and the peers that load."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from pagedmla.bench.batch import problem_of
from pagedmla.bench.ours import AUTO, OurDecode
from pagedmla.bench.peers import make_peer
from pagedmla.bench.peers.peer import Peer
from pagedmla.bench.shapes import DecodeShape
from pagedmla.contract.errors import InvalidArgument, Unsupported
from pagedmla.contract.problem import SCHEDULES
from pagedmla.contract.support import Refusal, check_backend_name, choose_backend
from pagedmla.contract.target import Target


def our_contenders(
    device: torch.device,
    shapes: Sequence[DecodeShape],
    page_size: int,
    dtype: torch.dtype,
    backends: Sequence[str] = (),
    schedules: Sequence[str] = (),
) -> tuple[tuple[OurDecode, ...], dict[str, str]]:
    """Each backend with each schedule, and the reason for each that the support table refuses on every shape.

    Args:
        device: where they shall run.
        shapes: at least one.
        page_size: tokens a page, for shapes that name none.
        dtype: of queries and cache.
        backends: names, or ``auto`` for the best of each shape; empty: ``auto`` where no schedule is named, else those that are
            the best for some shape.
        schedules: ``split``, ``persistent`` or ``auto``; empty: the first two for a named backend.

    Raises:
        InvalidArgument: a backend or a schedule has an unknown name.
        Unsupported: all are refused on every shape, with every reason.
    """
    for word in schedules:
        if word not in (*SCHEDULES, AUTO):
            wanted = "some of " + ", ".join((*SCHEDULES, AUTO))
            raise InvalidArgument("schedule", "schedule", wanted, repr(word))
    for backend in backends:
        if backend != AUTO:
            check_backend_name(backend)
    target = Target.detect(device)
    names = backends or (list(_best(shapes, page_size, dtype, target)) if schedules else [AUTO])
    found: list[OurDecode] = []
    refused: dict[str, tuple[Refusal, ...]] = {}
    for backend in dict.fromkeys(names):
        for word in dict.fromkeys(schedules or ([AUTO] if backend == AUTO else SCHEDULES)):
            contender = OurDecode(backend, word)
            by_shape = [contender.refused(problem_of(shape, page_size, dtype), target) for shape in shapes]
            if all(by_shape):
                refused[contender.name] = by_shape[0]
            else:
                found.append(contender)
    if not found:
        raise Unsupported.from_refusals(reason for reasons in refused.values() for reason in reasons)
    return tuple(found), {name: "; ".join(map(str, reasons)) for name, reasons in refused.items()}


def _best(shapes: Sequence[DecodeShape], page_size: int, dtype: torch.dtype, target: Target) -> Iterator[str]:
    """The backend that is chosen for each shape that any takes.

    Raises:
        Unsupported: all are refused on every shape.
    """
    refused: Unsupported | None = None
    taken = False
    for shape in shapes:
        try:
            yield choose_backend(problem_of(shape, page_size, dtype), target)
            taken = True
        except Unsupported as error:
            refused = refused or error
    if refused is not None and not taken:
        raise refused


def load_peers(names: Sequence[str], folder: Path | None) -> tuple[tuple[Peer, ...], dict[str, str]]:
    """The peers called ``names`` that load, and why each of the others does not.

    Args:
        names: out of ``PEER_NAMES``, or ``module:function``.
        folder: holds peers' files, or None for what is installed.

    Raises:
        InvalidArgument: no peer has this name, or there is no such folder.
    """
    if folder is not None and not folder.is_dir():
        raise InvalidArgument("peers_path", "peers-path", "a folder", str(folder))
    loaded: list[Peer] = []
    absent: dict[str, str] = {}
    for peer in [make_peer(name) for name in dict.fromkeys(names)]:
        reason = peer.load(folder.absolute() if folder is not None else None)
        if reason is None:
            loaded.append(peer)
        else:
            absent[peer.name] = reason
    return tuple(loaded), absent
