"""Reproducers are programs: they run, they print what the kit saw, and what they call right is what the oracle calls right."""

from __future__ import annotations

import ast
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from pagedmla import reference
from pagedmla.conformance.adapters.adapter import Adapter, Conventions, Options
from pagedmla.conformance.adapters.ours import Ours
from pagedmla.conformance.asking import WatchedSubject, ask
from pagedmla.conformance.builder import build_spec
from pagedmla.conformance.child import load_adapter
from pagedmla.conformance.configurations import Configuration
from pagedmla.conformance.findings import Finding
from pagedmla.conformance.properties import properties_of
from pagedmla.conformance.properties.property import Property
from pagedmla.conformance.reproducer import ShownCall, reproducer, show
from pagedmla.conformance.spec import BatchSpec
from pagedmla.conformance.subject import Broken, Step, Subject, first_difference

CPU = torch.device("cpu")
DIMS: dict[str, Any] = {"num_heads": 4, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "page_size": 16}
SMALL = Configuration("small", DIMS, most_keys=40)

MODULE = """
import math
import torch
import pagedmla
from pagedmla.conformance.adapters.adapter import Adapter, Conventions
from pagedmla.conformance.adapters.function import FunctionAdapter

def right(q, kv_cache, block_table, seq_lens, **given):
    return pagedmla.decode(q, kv_cache, block_table, seq_lens, **given)

def scaled(q, kv_cache, block_table, seq_lens, *, softmax_scale, **given):
    return right(q, kv_cache, block_table, seq_lens, softmax_scale=softmax_scale * 1.5, **given)

def lse_too_large(*tensors, **given):
    out, lse = right(*tensors, **given)
    return out, lse + 0.25

def layout_shows(q, kv_cache, block_table, seq_lens, **given):
    out, lse = right(q, kv_cache, block_table, seq_lens, **given)
    if not block_table.numel():
        return out, lse
    live = lse > -math.inf
    # one unit in the last place, inside every bound
    further = torch.nextafter(lse, torch.full_like(lse, math.inf))
    return out, torch.where(live & (block_table[0, 0] % 2 == 1), further, lse)

def dead_rows_hold_one(*tensors, **given):
    out, lse = right(*tensors, **given)
    out[lse == -math.inf] = 1.0
    return out, lse

def folded_lse(*tensors, **given):
    out, lse = right(*tensors, **given)
    return out, lse.flatten()

def raising(*tensors, **given):
    raise ValueError("tile 3 is not divisible")

def unwritten(q, *tensors, **given):
    out, lse = right(q, *tensors, **given)
    return torch.empty_like(out), lse

def in_base_two(*tensors, **given):
    out, lse = lse_too_large(*tensors, **given)
    return out, lse / math.log(2)

in_base_two.conventions = Conventions(lse_base=2.0)

def writes_its_table(q, kv_cache, block_table, seq_lens, **given):
    result = right(q, kv_cache, block_table, seq_lens, **given)
    block_table.view(-1)[:1] += 1
    return result

def writes_its_cache(q, kv_cache, block_table, seq_lens, **given):
    result = right(q, kv_cache, block_table, seq_lens, **given)
    kv_cache[-1, -1, -2:] = 3
    return result

def writes_behind_out(*tensors, out=None, lse=None, **given):
    found = right(*tensors, **given)
    if out is None:
        return found
    out.copy_(found[0])
    lse.copy_(found[1])
    torch.as_strided(out, (1,), (1,), out.storage_offset() + out.numel()).fill_(1)
    return out, lse

def ends_the_process(*tensors, **given):
    return right(*tensors, **given)
"""


@pytest.fixture(scope="module", autouse=True)
def _kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("kernels")
    (folder / "reproduced_kernels.py").write_text(MODULE)
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))


@pytest.fixture(autouse=True)
def _debug_mode() -> Iterator[None]:
    """The scripts set it."""
    before = torch.get_deterministic_debug_mode()
    yield
    torch.set_deterministic_debug_mode(before)


def adapter_of(name: str) -> Adapter:
    return load_adapter(f"reproduced_kernels:{name}")


def run(script: str, capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], str]:
    """Runs a script as a program; its names, and what it printed."""
    capsys.readouterr()
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(script, "reproducer", "exec"), names)
    return names, capsys.readouterr().out


def found(adapter: Adapter, kind: str, name: str, configuration: Configuration = SMALL) -> Finding:
    (prop,) = [prop for prop in properties_of(kind) if prop.name == name]
    finding = ask(prop, WatchedSubject(adapter, CPU), configuration, examples=30, seed=0)
    assert finding.status == "failed", finding
    return finding


def written(adapter: Adapter, *steps: Step, detail: str = "nothing", **more: Any) -> str:
    planted = Property("PAGE", "planted", "a promise", lambda scope: st.none(), lambda subject, example: None)
    shown = [show(adapter, step, CPU) for step in steps]
    given = {"impl": adapter.name, "prop": planted, "detail": detail, "example": "'x'", "device": CPU} | more
    return reproducer(shown, **given)


def imports(script: str) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(script)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(f"{node.module}.{node.names[0].name}")
    return names


def numbers(line: str) -> list[float]:
    return [
        float(number) for number in re.findall(r"(?:is|where|and) (-?[\d.]+(?:e[-+]\d+)?|nan|-?inf)\b", line)
    ]


def test_a_wrong_value_is_shown_beside_the_right_one(capsys: pytest.CaptureFixture[str]) -> None:
    finding = found(adapter_of("scaled"), "PAGE", "page-sizes")
    _, printed = run(finding.reproducer, capsys)
    seen, wanted = finding.detail.split(" where ")[0], numbers(finding.detail)
    out_line, lse_line = printed.splitlines()
    assert seen in printed
    shown = numbers(out_line if seen.startswith("out") else lse_line)
    assert shown == pytest.approx(wanted, rel=1e-6)
    assert shown[0] != pytest.approx(shown[1], rel=1e-3)
    assert out_line.startswith("out[")
    assert lse_line.startswith("lse[")


def test_the_script_knows_nothing_of_pagedmla_but_the_builder() -> None:
    script = found(adapter_of("scaled"), "PAGE", "page-sizes").reproducer
    assert imports(script) == {
        "math",
        "torch",
        "pagedmla.conformance.builder.build",
        "reproduced_kernels.scaled",
    }


def test_it_begins_with_what_was_found_in_comments() -> None:
    finding = found(adapter_of("scaled"), "PAGE", "page-sizes")
    head = finding.reproducer.partition("\n\n")[0].splitlines()
    assert all(line.startswith("# ") for line in head)
    assert "reproduced_kernels:scaled against PAGE page-sizes: " + finding.promise in head[0]
    assert head[1] == f"# found: {finding.detail}"
    assert head[2] == f"# example: {finding.example}"


def test_a_wrong_lse_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    finding = found(adapter_of("lse_too_large"), "LSE", "lse-values")
    assert finding.detail.startswith("lse[")
    out_line, lse_line = run(finding.reproducer, capsys)[1].splitlines()
    came, wanted = numbers(lse_line)
    assert came - wanted == pytest.approx(0.25, abs=1e-4)
    assert numbers(finding.detail) == pytest.approx([came, wanted], rel=1e-6)
    # the other result is right, and shown to be
    came, wanted = numbers(out_line)
    assert came == pytest.approx(wanted, rel=0.02, abs=0.02)


def test_an_lse_of_another_base_is_brought_to_the_natural_one(capsys: pytest.CaptureFixture[str]) -> None:
    finding = found(adapter_of("in_base_two"), "LSE", "lse-values")
    came, wanted = numbers(run(finding.reproducer, capsys)[1].splitlines()[1])
    assert came - wanted == pytest.approx(0.25, abs=1e-4)
    assert "math.log(2)" in finding.reproducer


def test_two_calls_that_differ_in_a_bit_are_both_made(capsys: pytest.CaptureFixture[str]) -> None:
    finding = found(adapter_of("layout_shows"), "PAGE", "moved-pages")
    assert " in one and " in finding.detail
    assert finding.reproducer.count("call = build(") == 2
    printed = run(finding.reproducer, capsys)[1]
    assert printed.startswith("out: 0 of ")
    assert re.search(r"^lse: [1-9]\d* of", printed, flags=re.MULTILINE)
    assert finding.detail.partition(" in the other")[0] in printed


def test_calls_with_other_neighbours_are_compared_by_sequence(capsys: pytest.CaptureFixture[str]) -> None:
    adapter = adapter_of("layout_shows")
    one = BatchSpec((7, 0, 9), **DIMS, layout_seed=1)
    for layout_seed in range(50):
        other = BatchSpec((5, 9, 7), **DIMS, ids=(8, 2, 0), rows_before=2, layout_seed=layout_seed)
        tables = [build_spec(spec).block_table[0, 0].item() % 2 for spec in (one, other)]
        if tables[0] != tables[1]:
            break
    steps = Step(one, {}), Step(other, {})
    names, printed = run(written(adapter, *steps, detail="lse[0] is 1 in one and 2 in the other"), capsys)
    assert names["rows_of_one"] == [0, 2]
    assert names["rows_of_other"] == [4, 3]
    assert printed.splitlines()[0] == f"out: 0 of {2 * 4 * 32} numbers differ"
    assert printed.splitlines()[1] == "lse: 8 of 8 numbers differ"


def test_a_row_without_keys_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    subject = Subject(adapter_of("dead_rows_hold_one"), CPU)
    spec = BatchSpec((5, 0), **DIMS)
    with pytest.raises(Broken) as broken:
        subject.checked(spec, {})
    script = written(subject.adapter, *broken.value.steps, detail=broken.value.detail)
    assert run(script, capsys)[1].splitlines() == ["out there is 1", "lse there is -inf"]


def test_wrong_shapes_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    finding = found(adapter_of("folded_lse"), "LSE", "lse-values")
    names, printed = run(finding.reproducer, capsys)
    assert f"lse ({tuple(names['lse'].shape)}, torch.float32)" in printed
    assert names["lse"].dim() == 1


def test_an_error_comes_out_of_the_script_too(capsys: pytest.CaptureFixture[str]) -> None:
    finding = found(adapter_of("raising"), "PAGE", "page-sizes")
    assert finding.detail == "raised ValueError: tile 3 is not divisible"
    with pytest.raises(ValueError, match="tile 3 is not divisible"):
        run(finding.reproducer, capsys)


def test_what_nobody_writes_is_nan_in_the_script_too(capsys: pytest.CaptureFixture[str]) -> None:
    finding = found(adapter_of("unwritten"), "PAGE", "every-length")
    came, wanted = numbers(run(finding.reproducer, capsys)[1].splitlines()[0])
    assert math.isnan(came)
    assert math.isfinite(wanted)


SPECS = {
    "plain": BatchSpec((127, 1, 0, 131), **DIMS),
    "ragged": BatchSpec((19, 2, 5, 0, 33), (3, 3, 0, 2, 1), **DIMS, rows_before=2, rows_after=1),
    "even": BatchSpec((19, 3, 33), (4, 4, 4), **DIMS),
    "not causal": BatchSpec((19, 2), (3, 3), **DIMS, causal=False),
    "one-token pages": BatchSpec((19, 2), **{**DIMS, "page_size": 1}, ids=(5, 3), seed=9, layout_seed=4),
    "fp8 cache": BatchSpec((19, 33), **DIMS, kv_dtype="e4m3fn"),
    "fnuz cache": BatchSpec((19, 33), **DIMS, kv_dtype="e4m3fnuz"),
    "fp8 queries": BatchSpec((19, 33), **DIMS, dtype="e4m3fn"),
    "float32": BatchSpec((19, 33), **DIMS, dtype="fp32", softmax_scale=0.4, peak=3),
    "nothing": BatchSpec((0, 0), **DIMS),
}


@pytest.mark.parametrize("name", SPECS)
def test_what_the_script_calls_right_is_what_the_oracle_says(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = SPECS[name]
    # other memory around it, and without the implementation's lines it brings its float64 in any case
    names, _ = run(written(Wordless("torch"), Step(replace(spec, poison="finite"), {})), capsys)
    call = build_spec(spec)
    out, lse = reference.decode(call.q, call.kv_cache, call.block_table, call.seq_lens, **call.semantics())  # type: ignore[misc]
    for row in range(len(out)):
        out_right, lse_right = names["right"](row)
        torch.testing.assert_close(out_right, out[row], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(lse_right, lse[row], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", [name for name in SPECS if name != "nothing"])
def test_a_right_kernel_looks_right_at_its_worst_place(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    script = written(Ours("torch"), Step(SPECS[name], {"num_kv_splits": 2}))
    names, printed = run(script, capsys)
    for line in printed.splitlines():
        came, wanted = numbers(line)
        assert came == pytest.approx(wanted, rel=0.01, abs=0.01)
    assert (names["row"], names["head"]) in [(row, head) for row in names["rows"] for head in range(4)]
    assert "num_kv_splits=2" in script


def test_steps_run_in_order_and_the_last_is_compared(capsys: pytest.CaptureFixture[str]) -> None:
    first, last = BatchSpec((5,), **DIMS), BatchSpec((6, 7), **DIMS)
    script = written(
        adapter_of("right"), Step(first, {}), Step(last, {}, "lengths grew"), detail="out[1, 2, 3] is"
    )
    names, printed = run(script, capsys)
    assert script.index("seq_lens=(5,)") < script.index("seq_lens=(6, 7)")
    assert "# part of the failure, and not of this script: lengths grew" in script
    assert names["call"].spec == last
    assert printed.startswith("out[1, 2, 3] is ")


class Wordless(Ours):
    """An adapter that has no lines."""

    def lines(self, options: Options) -> str:
        return ""


def test_an_adapter_without_lines_is_named_and_what_is_right_is_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    spec = BatchSpec((5, 9), **DIMS)
    script = written(Wordless("torch"), Step(spec, {}), detail="out[1, 2, 3] is nan where")
    assert "# call pagedmla:torch on `call` here" in script
    printed = run(script, capsys)[1]
    call = build_spec(spec)
    out, lse = reference.decode(call.q, call.kv_cache, call.block_table, call.seq_lens, **call.semantics())  # type: ignore[misc]
    shown = [float(number) for number in re.findall(r"-?\d+\.\d+(?:e-\d+)?", printed)]
    assert printed.startswith("out[1, 2] begins with")
    assert shown == pytest.approx([*out[1, 2, :4].tolist(), lse[1, 2].item()])


@pytest.mark.parametrize(
    ("name", "field", "many"), [("writes_its_table", "block_table", 1), ("writes_its_cache", "kv_cache", 2)]
)
def test_an_argument_that_was_written_is_compared_with_itself(
    name: str, field: str, many: int, capsys: pytest.CaptureFixture[str]
) -> None:
    finding = found(adapter_of(name), "MEM", "inputs-stay")
    assert finding.detail.startswith(f"{field} was written by the call")
    script = finding.reproducer
    assert script.index(f"before = call.{field}.clone()") < script.index(f"{name}(")
    # numbers that hold nan do not count as changed
    names, printed = run(script, capsys)
    assert printed == f"{field}: {many} of {names['before'].numel()} numbers differ after the call\n"


def test_the_copy_is_made_ahead_of_the_last_call(capsys: pytest.CaptureFixture[str]) -> None:
    steps = Step(BatchSpec((5,), **DIMS), {}), Step(BatchSpec((6, 7), **DIMS), {})
    script = written(adapter_of("right"), *steps, detail="seq_lens was written by the call, which may only")
    assert script.count("before = ") == 1
    assert run(script, capsys)[1] == "seq_lens: 0 of 2 numbers differ after the call\n"


def test_memory_around_a_result_is_said_not_to_be_shown(capsys: pytest.CaptureFixture[str]) -> None:
    finding = found(adapter_of("writes_behind_out"), "MEM", "guard-bands")
    assert finding.detail == "memory after out was written"
    assert (
        "\n# the kit gave out and lse as parts of larger tensors: what is written around"
        in finding.reproducer
    )
    assert run(finding.reproducer, capsys)[1].startswith("out (")
    views = "memory between or around the rows was written: out with gaps"
    assert "this script cannot show" in written(
        Ours("torch"), Step(BatchSpec((5,), **DIMS), {}), detail=views
    )


def test_the_end_of_a_process_is_said_at_its_call(capsys: pytest.CaptureFixture[str]) -> None:
    adapter = adapter_of("ends_the_process")
    script = written(adapter, Step(BatchSpec((5,), **DIMS), {}), ending="was killed by SIGSEGV")
    assert script.index("# in here the process was killed by SIGSEGV") < script.index("ends_the_process(")
    # where it does not die, it says that something came
    assert run(script, capsys)[1].startswith("out ((1, 4, 32), torch.bfloat16)\n")


def test_without_a_call_there_is_nothing_to_write() -> None:
    assert written(Ours("torch")) == ""


def test_an_implementation_without_lse_is_asked_for_none(capsys: pytest.CaptureFixture[str]) -> None:
    shown = ShownCall(
        BatchSpec((5,), **DIMS), "import pagedmla\nout, lse = pagedmla.decode(\n"
        "    call.q, call.kv_cache, call.block_table, call.seq_lens, **call.semantics()\n)[0], None", None
    )  # fmt: skip
    planted = properties_of("PAGE")[0]
    script = reproducer([shown], impl="x", prop=planted, detail="out[0, 1, 2] is", example="", device="cpu")
    assert run(script, capsys)[1].count("is right") == 1


def test_conventions_are_those_of_the_call() -> None:
    class Changing(Ours):
        def conventions_for(self, spec: BatchSpec, options: Options, device: torch.device) -> Conventions:
            return Conventions(lse_base=2.0 if spec.num_heads == 4 else None)

    adapter = Changing("torch")
    assert show(adapter, Step(BatchSpec((5,), **DIMS), {}), CPU).lse_base == 2.0
    assert show(adapter, Step(BatchSpec((5,), **{**DIMS, "num_heads": 5}), {}), CPU).lse_base is None


def test_first_difference_still_says_what_the_script_looks_for() -> None:
    subject = Subject(adapter_of("right"), CPU)
    result = subject.checked(BatchSpec((5,), **DIMS), {})
    assert result.lse is not None
    other = replace(result, lse=result.lse + 1)
    assert " in one and " in first_difference(result, other)
