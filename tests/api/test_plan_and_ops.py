"""DecodePlan, the registered operators, and torch.compile of a caller."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.library import opcheck

import pagedmla
from pagedmla import BatchBounds, DecodePlan, DecodeProblem
from pagedmla.kernels.torch import launch
from pagedmla.kernels.torch.work_items import device_passes

RANK, ROPE, HEADS, PAGE, WIDTH = 64, 16, 3, 16, 12
SCALE = 0.11
LENGTHS = [131, 0, 1, 127, 17]


def batch(lengths: list[int], q_lens: list[int] | None = None, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """(q, kv_cache, block_table, seq_lens, cu_seqlens_q) with permuted pages and NaN wherever nobody owns a token."""
    generator = torch.Generator().manual_seed(seed)
    count = len(lengths)
    cache = torch.full((count * WIDTH + 3, PAGE, RANK + ROPE), float("nan"))
    table = torch.randperm(count * WIDTH, generator=generator, dtype=torch.int32).view(count, WIDTH)
    for row, length in enumerate(lengths):
        for position in range(length):
            cache[table[row, position // PAGE], position % PAGE] = torch.randn(
                RANK + ROPE, generator=generator
            )
        table[row, -(-length // PAGE) :] = 2**31 - 1
    q_lens = q_lens if q_lens is not None else [1] * count
    q = torch.randn(sum(q_lens), HEADS, RANK + ROPE, generator=generator)
    starts = torch.tensor([0, *q_lens]).cumsum(0).int()
    return q, cache, table, torch.tensor(lengths, dtype=torch.int32), starts


def check(out: torch.Tensor, lse: torch.Tensor, given: tuple[torch.Tensor, ...], **options: bool) -> None:
    q, cache, table, lengths, starts = given
    expected, expected_lse = pagedmla.reference.decode(
        q, cache, table, lengths, softmax_scale=SCALE, kv_lora_rank=RANK, cu_seqlens_q=starts, **options
    )
    torch.testing.assert_close(out.double(), expected.double(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse.double(), rtol=1e-5, atol=1e-5)


def make_plan(max_q_len: int = 1, **bounds: int) -> DecodePlan:
    problem = DecodeProblem(HEADS, SCALE, RANK, ROPE, PAGE, torch.float32, "fp32", max_q_len=max_q_len)
    return DecodePlan(problem, BatchBounds(**({"max_num_seqs": 6, "max_pages_per_seq": WIDTH} | bounds)))


def test_a_plan_is_right_for_lengths_that_shrink_grow_and_die() -> None:
    plan = make_plan()
    addresses = [
        plan.metadata.block_table.data_ptr(),
        plan.metadata.seq_lens.data_ptr(),
        plan.workspace.data_ptr(),
    ]
    for seed, lengths in enumerate([LENGTHS, [1, 2], [WIDTH * PAGE] * 6, [0, 0, 0], [16, 15, 17, 1], []]):
        given = (
            batch(lengths, seed=seed)
            if lengths
            else (*batch([1])[:2], torch.empty(0, WIDTH).int(), torch.empty(0).int(), torch.zeros(1).int())
        )
        q, cache, table, seq_lens, _ = given
        q = q[: len(lengths)]
        plan.workspace.fill_(0xFF)
        plan.update(table, seq_lens)
        padded = torch.cat([q, torch.full((6 - len(lengths), HEADS, RANK + ROPE), float("nan"))])
        out, lse = plan.run(padded, cache)
        if lengths:
            check(out[: len(lengths)], lse[: len(lengths)], given)
        assert (out[len(lengths) :] == 0).all()
        assert (lse[len(lengths) :] == -torch.inf).all()
    assert addresses == [
        plan.metadata.block_table.data_ptr(),
        plan.metadata.seq_lens.data_ptr(),
        plan.workspace.data_ptr(),
    ]


def test_a_plan_takes_ragged_and_even_queries_in_turn() -> None:
    plan = make_plan(max_q_len=3, max_num_tokens=20)
    ragged = batch(LENGTHS, [2, 1, 3, 0, 3])
    plan.update(*ragged[2:])
    check(*plan.run(ragged[0], ragged[1]), ragged)
    even = batch([40, 2, 0], [3, 3, 3], seed=4)
    plan.update(*even[2:4])
    out, lse = torch.full((9, HEADS, RANK), torch.nan), torch.full((9, HEADS), torch.nan)
    found = plan.run((even[0][..., :RANK], even[0][..., RANK:]), even[1], out=out, lse=lse)
    assert found[0] is out
    check(out, lse, even)


def test_a_plan_before_its_first_update_has_no_rows() -> None:
    out, lse = make_plan().run(
        torch.randn(6, HEADS, RANK + ROPE), torch.full((2, PAGE, RANK + ROPE), torch.nan)
    )
    assert (out == 0).all()
    assert (lse == -torch.inf).all()


def test_operators_keep_what_their_schemas_promise() -> None:
    q, cache, table, lengths, starts = batch(LENGTHS)
    rest = (starts, SCALE, True, RANK, None, None, None, None, None, None, None, False, None, None, False)
    opcheck(torch.ops.pagedmla.decode.default, (q, None, cache, table, lengths, *rest))
    problem = DecodeProblem(HEADS, SCALE, RANK, ROPE, PAGE, torch.float32, "fp32")
    workspace = torch.zeros(pagedmla.workspace_size(problem, BatchBounds(5, WIDTH)), dtype=torch.uint8)
    opcheck(
        torch.ops.pagedmla.decode.default, (q, None, cache, table, lengths, *rest[:-3], workspace, 1, False)
    )
    out, lse = torch.zeros(5, HEADS, RANK), torch.zeros(5, HEADS)
    opcheck(torch.ops.pagedmla.decode_out.default, (q, None, cache, table, lengths, *rest, out, lse))
    opcheck(torch.ops.pagedmla.merge_states.default, ([out, out], [lse, lse]))


@pytest.fixture(autouse=True)
def forget_compiled_code() -> None:
    """Dynamo counts recompilations per function, over all tests."""
    torch.compiler.reset()


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("into", [False, True])
def test_a_caller_compiles_as_one_graph(dynamic: bool, pair: bool, into: bool) -> None:
    def caller(q, cache, table, lengths, out, lse):  # type: ignore[no-untyped-def]
        query = (q[..., :RANK], q[..., RANK:]) if pair else q
        outputs = {"out": out, "lse": lse} if into else {}
        found, found_lse = pagedmla.decode(
            query, cache, table, lengths, softmax_scale=SCALE, kv_lora_rank=RANK, num_kv_splits=2, **outputs
        )
        return found * 2, found_lse

    compiled = torch.compile(caller, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for lengths in (LENGTHS, [3, 60, 9]):
        given = batch(lengths)
        out = torch.full((len(lengths), HEADS, RANK), torch.nan)
        lse = torch.full((len(lengths), HEADS), torch.nan)
        doubled, found_lse = compiled(*given[:4], out, lse)
        check(doubled / 2, found_lse, given)
        if into:
            check(out, lse, given)


def test_a_caller_of_a_plan_and_of_merge_compiles_as_one_graph() -> None:
    plan = make_plan()
    given = batch(LENGTHS)
    plan.update(*given[2:4])

    def caller(q: torch.Tensor, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = plan.run(q, cache)
        return pagedmla.merge_states([out, torch.zeros_like(out)], [lse, torch.full_like(lse, -torch.inf)])

    check(*torch.compile(caller, fullgraph=True, backend="aot_eager")(*given[:2]), given)


def test_bad_input_is_refused_while_a_caller_is_traced() -> None:
    q, cache, table, lengths, _ = batch(LENGTHS)
    compiled = torch.compile(
        lambda *given: pagedmla.decode(*given, softmax_scale=SCALE, kv_lora_rank=RANK), backend="aot_eager"
    )
    with pytest.raises(Exception, match="block_table: wanted"):
        compiled(q, cache, table, lengths[:2])


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans the work as for a GPU, where no length may be read on the host."""
    monkeypatch.setattr(launch, "host_passes", lambda args, config: device_passes(args, config, 8))


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("splits", [None, 1, 3, 500])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("q_lens", [[1, 1, 1, 1, 1], [3, 0, 2, 1, 4]])
def test_the_device_s_work_items_give_the_same_answer(
    splits: int | None, causal: bool, q_lens: list[int]
) -> None:
    given = batch(LENGTHS, q_lens)
    q, cache, table, lengths, starts = given
    out, lse = pagedmla.decode(
        q,
        cache,
        table,
        lengths,
        softmax_scale=SCALE,
        kv_lora_rank=RANK,
        cu_seqlens_q=starts,
        causal=causal,
        num_kv_splits=splits,
    )
    check(out, lse, given, causal=causal)


def hidden_nan(value: float) -> tuple[tuple[torch.Tensor, ...], int]:
    """A batch whose sequence 0 has three query tokens, and ``value`` in its last key, which only the last of them sees."""
    given = batch([40, 9], [3, 1])
    page, offset = int(given[2][0, 39 // PAGE]), 39 % PAGE
    given[1][page, offset] = value
    return given, 2


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("options", [{}, {"batch_invariant": True}, {"num_kv_splits": 4}])
def test_a_key_that_a_row_does_not_see_changes_no_bit_of_it(value: float, options: dict) -> None:
    given, spoilt = hidden_nan(value)
    q, cache, table, lengths, starts = given

    def run(kv_cache: torch.Tensor) -> torch.Tensor:
        return pagedmla.decode(
            q,
            kv_cache,
            table,
            lengths,
            softmax_scale=SCALE,
            kv_lora_rank=RANK,
            cu_seqlens_q=starts,
            **options,
        )[0]

    out = run(cache)
    clean = run(torch.where(torch.isfinite(cache), cache, 0.5))
    others = [row for row in range(4) if row != spoilt]
    assert torch.isfinite(out[others]).all()
    # a NaN that a row does see stays visible
    assert torch.isnan(out[spoilt]).any()
    assert torch.equal(out[others], clean[others])


def test_the_name_of_every_backend_leads_to_a_module() -> None:
    from pagedmla import kernels
    from pagedmla.contract.support import BACKENDS

    assert set(kernels.MODULES) == set(BACKENDS)
    loaded: list[Callable] = [kernels.load(name).decode for name in BACKENDS]
    assert all(callable(function) for function in loaded)
    with pytest.raises(pagedmla.InvalidArgument):
        kernels.load("nothing")


def test_a_backend_that_cannot_be_imported_keeps_the_import_s_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from pagedmla import kernels

    monkeypatch.setitem(kernels.MODULES, "broken", "pagedmla.kernels.no_such_module")
    with pytest.raises(pagedmla.Unsupported, match="no_such_module"):
        kernels.load("broken")


@pytest.mark.parametrize("num_heads", [16, 5000])
def test_passes_over_the_same_rows_keep_their_state_in_a_workspace(num_heads: int) -> None:
    """With more rows than a pass holds, splits are attended to one after another: the next must not overwrite the last."""
    problem = DecodeProblem(num_heads, SCALE, 16, 2, PAGE, torch.float32, "fp32", num_kv_splits=3)
    size = pagedmla.workspace_size(problem, BatchBounds(1, 32))
    generator = torch.Generator().manual_seed(5)
    q, cache = (
        torch.randn(1, num_heads, 18, generator=generator),
        torch.randn(32, PAGE, 18, generator=generator),
    )
    table, lengths = torch.randperm(32, dtype=torch.int32).view(1, 32), torch.tensor([300], dtype=torch.int32)
    options = {"softmax_scale": SCALE, "kv_lora_rank": 16}
    workspace = torch.full((size,), 0xFF, dtype=torch.uint8)
    out, lse = pagedmla.decode(q, cache, table, lengths, num_kv_splits=3, workspace=workspace, **options)
    expected, expected_lse = pagedmla.reference.decode(q, cache, table, lengths, **options)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)


def test_batch_invariant_heads_beyond_a_pass_fit_the_workspace() -> None:
    num_heads, options = 5000, {"softmax_scale": 0.05}
    problem = DecodeProblem(num_heads, 0.05, 512, 64, PAGE, torch.float32, "fp32", batch_invariant=True)
    size = pagedmla.workspace_size(problem, BatchBounds(1, 160))
    generator = torch.Generator().manual_seed(6)
    q, cache = (
        torch.randn(1, num_heads, 576, generator=generator),
        torch.randn(160, PAGE, 576, generator=generator),
    )
    table, lengths = (
        torch.randperm(160, dtype=torch.int32).view(1, 160),
        torch.tensor([2101], dtype=torch.int32),
    )
    workspace = torch.full((size,), 0xFF, dtype=torch.uint8)
    out, lse = pagedmla.decode(q, cache, table, lengths, batch_invariant=True, workspace=workspace, **options)
    some = torch.tensor([0, 1023, 1024, 2048, 4999])
    expected, expected_lse = pagedmla.reference.decode(q[:, some], cache, table, lengths, **options)
    torch.testing.assert_close(out[:, some].double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse[:, some].double(), expected_lse, rtol=1e-5, atol=1e-5)
    few = pagedmla.decode(q[:, -7:], cache, table, lengths, batch_invariant=True, **options)
    assert torch.equal(few[0], out[:, -7:])
    assert torch.equal(few[1], lse[:, -7:])


@pytest.mark.parametrize("q_lens", [[1, 1, 1, 1, 1], [2, 1, 3, 0, 3]])
@pytest.mark.parametrize("splits", [None, 3])
def test_the_default_device_is_the_callers_own(q_lens: list[int], splits: int | None) -> None:
    given = batch(LENGTHS, q_lens)
    q, cache, table, lengths, starts = given
    with torch.device("meta"):
        out, lse = pagedmla.decode(
            q,
            cache,
            table,
            lengths,
            softmax_scale=SCALE,
            kv_lora_rank=RANK,
            cu_seqlens_q=starts,
            num_kv_splits=splits,
        )
    check(out, lse, given)


@pytest.mark.parametrize(
    ("num_heads", "q_len", "keys", "splits"), [(1, 1, 70, 65), (4096, 1, 5, 4), (130, 9, 17, 16)]
)
def test_splits_that_end_up_empty_and_alone_in_a_pass_add_nothing(
    num_heads: int, q_len: int, keys: int, splits: int
) -> None:
    generator = torch.Generator().manual_seed(8)
    q, cache = (
        torch.randn(q_len, num_heads, 8, generator=generator),
        torch.randn(9, 16, 8, generator=generator),
    )
    given = (q, cache, torch.randperm(9).int()[None], torch.tensor([keys], dtype=torch.int32))
    options = {"softmax_scale": 0.3, "kv_lora_rank": 8}
    out, lse = pagedmla.decode(*given, num_kv_splits=splits, **options)
    expected, expected_lse = pagedmla.reference.decode(*given, **options)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)
