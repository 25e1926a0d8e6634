"""Known targets: every accepted problem has tile sizes there, and what a device cannot hold is refused with the number."""

from __future__ import annotations

import pytest
import torch

from pagedmla.contract.problem import DecodeProblem
from pagedmla.contract.support import accepted_problems, refusals
from pagedmla.contract.target import KNOWN_TARGETS, Target
from pagedmla.kernels.policy import padded, triton_decode_config, triton_decode_configs, triton_merge_config


@pytest.mark.parametrize("arch", KNOWN_TARGETS)
def test_every_accepted_problem_has_tile_sizes(arch: str) -> None:
    target = KNOWN_TARGETS[arch]
    assert target.arch == arch
    accepted = accepted_problems(target, "triton")
    assert {problem.q_dtype for problem in accepted} == {torch.bfloat16, torch.float16}
    for problem in accepted:
        known = triton_decode_configs(problem, target)
        for rows in (1, 16, 17, 32, 33, 128, 129, 2048, 1 << 29):
            assert triton_decode_config(problem, target, rows) in known
        for num_rows in (1, 100, 10**4, 10**7):
            merge = triton_merge_config(problem, target, num_rows)
            assert padded(problem.kv_lora_rank) % merge.block_columns == 0


@pytest.mark.parametrize(
    ("dims", "needed"),
    [((512, 64), 51200), ((512, 0), 49152), ((256, 32), 25600), ((128, 32), 13312), ((320, 6), 49664)],
)
def test_too_little_shared_memory_is_refused_with_the_number(dims: tuple[int, int], needed: int) -> None:
    """16 tokens of two-byte numbers: the latent's block (a power of two) three times, the rotated part's once."""
    problem = DecodeProblem(16, 0.07, *dims)
    assert refusals(problem, Target("nvidia", "sm_99", 100, needed), "triton") == ()
    (refusal,) = refusals(problem, Target("nvidia", "sm_99", 100, needed - 1), "triton")
    assert (refusal.code, refusal.argument) == ("shared_memory", "device")
    assert f"{needed} bytes" in refusal.wanted
    assert refusal.got == f"{needed - 1} bytes on sm_99"


def test_amds_local_data_share_is_the_same_rule() -> None:
    problem = DecodeProblem(16, 0.07)
    (refusal,) = refusals(problem, Target("amd", "gfx999", 100, 32768), "triton")
    assert refusal.code == "shared_memory"
