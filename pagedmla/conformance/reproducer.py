"""Writes a failure down, as a script most of all: the call, and in float64 the one row that came out wrong.

The script needs torch, the implementation, and ``builder.build`` for the tensors; what is right it computes by itself, so that
nobody has to trust this package's oracle.
"""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pagedmla.conformance.adapters.adapter import Adapter
from pagedmla.conformance.properties.property import Property
from pagedmla.conformance.spec import BatchSpec
from pagedmla.conformance.subject import Step, blind_rows

_PLACE = re.compile(r"\b(?:out|lse)\[(\d+), (\d+)(?:, (\d+))?\]")
"""Where a ``Broken`` says that a number is wrong: (row, head, component of out)."""

_WRITTEN = re.compile(r"^(\w+) was written by the call")
"""Where it says that an argument was changed: the field of ``Call``."""
_STRAY = re.compile(r"^memory .+ was written")
"""Where it says that memory around a result was: guard bands, and the gaps of a view."""

_IMPORTS = """
import math

import torch

from pagedmla.conformance.builder import build

torch.set_deterministic_debug_mode("warn")  # torch.empty is full of nan then: what nobody writes shows
"""

_KEEP = "{name} = [None if tensor is None else tensor.clone() for tensor in (out, lse)]"

_RIGHT = '''
def right(row):
    """What row `row` of call.q must give, in float64: out [H, kv_lora_rank] and the natural lse [H]."""
    num_seqs, heads, rank = len(call.seq_lens), call.q.shape[1], call.kv_lora_rank
    starts = [len(call.q) // max(1, num_seqs) * sequence for sequence in range(num_seqs + 1)]
    if call.cu_seqlens_q is not None:
        starts = call.cu_seqlens_q.tolist()
    sequence, seen = sum(start <= row for start in starts) - 1, 0
    if 0 <= sequence < num_seqs:
        seen = call.seq_lens[sequence].item()
        if call.causal:  # the last query token of a sequence sees every key, the one before it one key less
            seen -= starts[sequence + 1] - 1 - row
    if seen <= 0:
        return torch.zeros(heads, rank, dtype=torch.float64), torch.full((heads,), -math.inf, dtype=torch.float64)
    pages = call.block_table[sequence, : -(-seen // call.page_size)].tolist()
    q_scale, kv_scale = torch.tensor(call.q_scale or 1.0), torch.tensor(call.kv_scale or 1.0)  # float32
    keys = kv_scale * torch.cat([call.kv_cache[page].double().cpu() for page in pages])[:seen]
    scores = call.q[row].double().cpu() * call.softmax_scale * q_scale @ keys.T
    return scores.softmax(-1) @ keys[:, :rank], scores.logsumexp(-1)
'''

_SEARCH = """
rows = {rows}  # query rows that see a key
errors = torch.stack([(out[row].double().cpu() - right(row)[0]).abs().amax(-1) for row in rows])
place = int(errors.argmax())
row, head = rows[place // errors.shape[1]], place % errors.shape[1]
"""

_COMPARE_OUT = """\
out_right, lse_right = right(row)
component = {component}
came, wanted = out[row, head, component].item(), out_right[head, component].item()
print(f"out[{{row}}, {{head}}, {{component}}] is {{came:.9g}} where {{wanted:.9g}} is right")
"""
_WORST_COMPONENT = "int((out[row, head].double().cpu() - out_right[head]).abs().argmax())"

_COMPARE_LSE = """\
came, wanted = {natural}, lse_right[head].item()
print(f"lse[{{row}}, {{head}}] is {{came:.9g}} where {{wanted:.9g}} is right")
"""

_RIGHT_ALONE = """
out_right, lse_right = right({row})
print("out[{row}, {head}] begins with", out_right[{head}, :4].tolist(), "and its lse is", lse_right[{head}].item())
"""

_CHANGED = """
bits = {{1: torch.int8, 2: torch.int16, 4: torch.int32}}[before.element_size()]  # nan differs from itself
changed = int((before.view(bits) != call.{name}.view(bits)).sum())
print(f"{name}: {{changed}} of {{before.numel()}} numbers differ after the call")
"""

_NOT_SHOWN = "the kit gave out and lse as parts of larger tensors: what is written around them, this script cannot show"

_SHAPES = """
for name, tensor in (("out", out), ("lse", lse)):
    print(name, None if tensor is None else (tuple(tensor.shape), tensor.dtype))
"""

_BLIND = """
rows = {rows}  # query rows that see no key
for name, tensor in (("out", out), ("lse", lse)):
    if tensor is not None:
        print(name, "there is", *sorted({{f"{{number:.9g}}" for number in tensor[rows].flatten().tolist()}})[:8])
"""

_BITS = """
# query rows that see a key, of the same sequences in both
rows_of_one, rows_of_other = {rows_of_one}, {rows_of_other}
for name, a, b in zip(("out", "lse"), one, other):
    if a is None or b is None:
        continue
    a, b = a[rows_of_one].contiguous(), b[rows_of_other].contiguous()
    bits = torch.int16 if a.element_size() == 2 else torch.int32
    different = (a.view(bits) != b.view(bits)).nonzero().tolist()
    print(f"{{name}}: {{len(different)}} of {{a.numel()}} numbers differ")
    if different:
        place = tuple(different[0])
        print(f"{{name}}{{[rows_of_one[place[0]], *place[1:]]}} is {{a[place].item():.9g}} in one", end=" and ")
        print(f"{{b[place].item():.9g}} in the other, there in row {{rows_of_other[place[0]]}}")
"""


_LAST_LINES, _LINES_BEFORE_STACK, _STACK_LINES = 12, 4, 5


@dataclass(frozen=True)
class ShownCall:
    """A call as a script shows it; plain values, so that it outlives the process of the implementation.

    Attributes:
        spec: what its tensors are built from.
        lines: Python that calls the implementation on ``call``, and leaves ``out`` and ``lse``; empty: there is none.
        lse_base: base of the implementation's lse; None: it returns none.
        note: what was done to the tensors besides, in words.
    """

    spec: BatchSpec
    lines: str
    lse_base: float | None
    note: str = ""


def show(adapter: Adapter, step: Step, device: torch.device) -> ShownCall:
    """``step``, with the implementation's own lines."""
    try:
        conventions = adapter.conventions_for(step.spec, step.options, device)
    except Exception:  # noqa: BLE001 - of a call that it refuses, or of options that are none, it need not know any
        conventions = adapter.conventions
    return ShownCall(step.spec, adapter.lines(step.options), conventions.lse_base, step.note)


def reproducer(
    calls: Sequence[ShownCall],
    *,
    impl: str,
    prop: Property,
    detail: str,
    example: str,
    device: torch.device | str,
    ending: str = "",
) -> str:
    """A script that shows what a property found.

    Args:
        calls: those that show it; the last one's result is the wrong one.
        impl: name of the implementation.
        prop: the property that was broken.
        detail: what was found.
        example: repr of the example, as a comment: what the calls do not show, it says.
        device: where the tensors were.
        ending: how the process ended in the last call, in words; empty when it did not.

    Returns:
        Python; empty when there is no call to show.
    """
    if not calls:
        return ""
    said = (
        f"{impl} against {prop.kind} {prop.name}: {prop.promise}",
        f"found: {detail}",
        f"example: {example}",
    )
    blocks = ["\n".join(_comment(text) for text in said), _IMPORTS]
    bits = len(calls) > 1 and " in one and " in detail and all(call.lines for call in calls)
    written = _WRITTEN.search(detail)
    for place, call in enumerate(calls):
        last = place == len(calls) - 1
        kept = written[1] if written and last else ""
        blocks.append(_call(call, impl, str(device), ending if last else "", kept))
        if bits and (last or place == 0):
            blocks.append(_KEEP.format(name="other" if last else "one"))
    blocks.append(_bits(calls[0].spec, calls[-1].spec) if bits else _values(calls[-1], detail, bool(ending)))
    return "\n\n".join(block.strip("\n") for block in blocks) + "\n"


def _comment(text: str) -> str:
    return "\n".join(f"# {line}".rstrip() for line in text.splitlines())


def _call(call: ShownCall, impl: str, device: str, ending: str, kept: str) -> str:
    """One call; ``kept`` names a tensor of which a copy is made ahead of it, as ``before``."""
    lines = [f"call = build({call.spec}, device={device!r})"]
    if kept:
        lines.append(f"before = call.{kept}.clone()")
    if call.note:
        lines.append(_comment(f"part of the failure, and not of this script: {call.note}"))
    if ending:
        lines.append(_comment(f"in here the process {ending}"))
    lines.append(
        call.lines or f"# call {impl} on `call` here: out [T, H, kv_lora_rank], lse [T, H]\nout = lse = None"
    )
    return "\n".join(lines)


def _values(call: ShownCall, detail: str, ended: bool) -> str:
    """What came beside what is right, at the place that ``detail`` names, or at the worst one; or what the call changed."""
    written = _WRITTEN.search(detail)
    if written:
        return _CHANGED.format(name=written[1])
    if _STRAY.search(detail):
        return _comment(_NOT_SHOWN) + "\n" + _SHAPES.lstrip("\n")
    blind = blind_rows(call.spec)
    live = (~blind).nonzero().flatten().tolist()
    found = _PLACE.search(detail)
    row, head = (int(found[1]), int(found[2])) if found else (live[0] if live else 0, 0)
    if not call.lines:
        return _RIGHT + _RIGHT_ALONE.format(row=row, head=head)
    if ended or re.search(r"^raised |has shape|has dtype|no lse came back", detail):
        return _SHAPES
    if "row that sees no key" in detail or not live:
        return _BLIND.format(rows=blind.nonzero().flatten().tolist())
    place = f"\nrow, head = {row}, {head}\n" if found else _SEARCH.format(rows=live)
    component = found[3] if found and found[3] else _WORST_COMPONENT
    text = _RIGHT + place + _COMPARE_OUT.format(component=component)
    if call.lse_base is not None:
        text += _COMPARE_LSE.format(natural=_natural_lse(call.lse_base))
    return text


def _natural_lse(base: float) -> str:
    natural = "lse[row, head].item()"
    return natural if base == math.e else f"{natural} * math.log({base:g})"


def _bits(one: BatchSpec, other: BatchSpec) -> str:
    """Where the results of two calls differ, in the rows of the sequences that are in both."""
    rows_of_one, rows_of_other = _live_rows(one), _live_rows(other)
    shared = [key for key in rows_of_one if key in rows_of_other]
    return _BITS.format(
        rows_of_one=[rows_of_one[key] for key in shared], rows_of_other=[rows_of_other[key] for key in shared]
    )


def _live_rows(spec: BatchSpec) -> dict[tuple[int, int], int]:
    """(id of the sequence, its last visible key or query) -> row of q, for rows that see a key."""
    ids = range(len(spec.seq_lens)) if spec.ids is None else spec.ids
    blind = blind_rows(spec).tolist()
    sequences = zip(ids, spec.seq_lens, spec.starts[:-1], spec.starts[1:], strict=True)
    return {
        (identity, (length if spec.causal else 0) - (stop - row)): row
        for identity, length, start, stop in sequences
        for row in range(start, stop)
        if not blind[row]
    }


def exit_in_words(code: int) -> str:
    """How a process ended, by its exit code as ``multiprocessing`` gives it: negative for a signal."""
    if code >= 0:
        return f"ended with exit status {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def last_words(printed: str) -> str:
    """The end of what a process printed; where Python dumped its stack, the innermost calls and what stands before them."""
    lines = printed.strip().splitlines()
    dumps = [number for number, line in enumerate(lines) if "(most recent call first)" in line]
    if dumps:
        lines = lines[max(0, dumps[-1] - _LINES_BEFORE_STACK) : dumps[-1] + 1 + _STACK_LINES]
    return "\n".join(lines[-_LAST_LINES:])
