"""What vLLM's selector is told about a model that the plug-in refuses, before anything is loaded.

The support table decides; only what it does not know, because no decode call could say it, is refused here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagedmla.contract.errors import Unsupported
from pagedmla.contract.problem import DecodeProblem
from pagedmla.contract.support import BACKENDS, Refusal, refusals
from pagedmla.contract.target import KNOWN_TARGETS, Target

HEAD_DIMS: dict[int, tuple[int, int]] = {576: (512, 64), 320: (256, 64)}
"""head_dim_qk -> (kv_lora_rank, qk_rope_head_dim).  vLLM's own MLA classes take no others (0.21,
model_executor/layers/attention/mla_attention.py:1211 and 1299)."""

KV_CACHE_DTYPES = ("auto", "float16", "bfloat16")
"""vLLM's words for a cache that a kernel of ours for GPUs can read; "auto" is the model's dtype."""

KERNEL_BLOCK_SIZES = (64, 16)
"""Page sizes that vLLM may cut a larger block into, where a model's other layers need it.  Any other size is taken as it is."""

PREFERRED_BLOCK_SIZE = 64
"""What the kernels for Hopper copy at once; smaller pages are read by the Triton backend."""

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
_LAYOUTS = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
_FP8_LAYOUTS = {"fp8": "fp8_per_tensor", "fp8_e4m3": "fp8_per_tensor", "fp8_ds_mla": "fp8_ds_mla"}
_AMD = {(9, 0): "gfx90a", (9, 4): "gfx942", (9, 5): "gfx950"}
# shared memory of the smallest part from sm_80 on (CUDA C++ Programming Guide, table of compute capabilities), for those that
# KNOWN_TARGETS does not list
_LEAST_SHARED_MEMORY = 99 * 1024


@dataclass(frozen=True)
class Configuration:
    """What vLLM's selector knows of a model (0.21, v1/attention/backend.py:257).

    Attributes:
        head_size: numbers of a cached token.
        dtype: the model's.
        kv_cache_dtype: vLLM's word for the cache's; None is "auto".
        block_size: tokens; None where the user named none.
        use_mla, has_sink, use_sparse: what the model's attention is.
    """

    head_size: int
    dtype: torch.dtype
    kv_cache_dtype: str | None = None
    block_size: int | None = None
    use_mla: bool = True
    has_sink: bool = False
    use_sparse: bool = False


def target_of(vendor: str, capability: tuple[int, int]) -> Target:
    """The device, as far as a compute capability tells; nothing is asked of a driver.

    Args:
        vendor: "nvidia" or "amd".
        capability: (major, minor) as torch counts them.
    """
    arch = f"sm_{capability[0]}{capability[1]}"
    if vendor == "amd":
        arch = _AMD.get(capability, f"gfx{capability[0]}{capability[1]}")
    return KNOWN_TARGETS.get(arch) or Target(vendor, arch, 1, _LEAST_SHARED_MEMORY)


def reason_against(configuration: Configuration, target: Target) -> str | None:
    """Why the plug-in does not serve this model on this device, every reason in one line; None when it does."""
    found = [*_features(configuration)]
    dims = HEAD_DIMS.get(configuration.head_size)
    layout = _layout(configuration)
    if dims is None and configuration.use_mla:
        sizes = " or ".join(f"{size} ({rank} + {rope})" for size, (rank, rope) in HEAD_DIMS.items())
        found.append(_refusal("head_size", sizes, str(configuration.head_size)))
    if layout is None:
        found.append(
            _refusal("kv_cache_dtype", " or ".join(KV_CACHE_DTYPES), str(configuration.kv_cache_dtype))
        )
    if dims is not None and layout is not None and configuration.use_mla:
        problem = DecodeProblem(
            # no rule of the table looks at the number of heads, and the scale is the model's own affair
            num_heads=1,
            softmax_scale=1.0,
            kv_lora_rank=dims[0],
            qk_rope_head_dim=dims[1],
            page_size=configuration.block_size or PREFERRED_BLOCK_SIZE,
            q_dtype=configuration.dtype,
            kv_layout=layout,
        )
        found += kernel_refusals(problem, target)
    return "; ".join(map(str, found)) or None


def kernel_refusals(problem: DecodeProblem, target: Target) -> tuple[Refusal, ...]:
    """Why no kernel takes ``problem``, every reason of every backend; empty when one does.

    On a GPU the torch backend does not count.  It is there to be right anywhere, it waits for the device, and an engine that
    fell back to it would only look broken.
    """
    names = [name for name in BACKENDS if (name == "torch") == (target.vendor == "cpu")]
    found = [refusals(problem, target, name) for name in names]
    return () if not all(found) else tuple(refusal for reasons in found for refusal in reasons)


def require_kernel(problem: DecodeProblem, target: Target) -> None:
    """Raises Unsupported, with every reason, unless some kernel takes ``problem``."""
    found = kernel_refusals(problem, target)
    if found:
        raise Unsupported.from_refusals(found)


def require_plain_attention(**features: object) -> None:
    """Raises Unsupported if a layer wants something that the decode does not have.

    Args:
        features: vLLM's argument -> its value; None, or "decoder" for attn_type, where there is nothing special.
    """
    found = [
        _refusal(name, "None" if name != "attn_type" else "'decoder'", repr(value))
        for name, value in features.items()
        if value is not None and not (name == "attn_type" and value == "decoder")
    ]
    if found:
        raise Unsupported.from_refusals(found)


def _features(configuration: Configuration) -> list[Refusal]:
    found = []
    if not configuration.use_mla:
        wanted = "models with Multi-head Latent Attention (DeepSeek and relatives)"
        found.append(_refusal("use_mla", wanted, "False"))
    if configuration.use_sparse:
        found.append(_refusal("use_sparse", "attention to every key, none chosen by an indexer", "True"))
    if configuration.has_sink:
        found.append(_refusal("has_sink", "attention without sinks", "True"))
    return found


def _layout(configuration: Configuration) -> str | None:
    """Our name for the cache's layout, or None for one that has none."""
    word = configuration.kv_cache_dtype
    if word in _FP8_LAYOUTS:
        return _FP8_LAYOUTS[word]
    dtype = configuration.dtype if word in (None, "auto") else _DTYPES.get(str(word))
    return None if dtype is None else _LAYOUTS.get(dtype)


def _refusal(argument: str, wanted: str, got: str) -> Refusal:
    return Refusal("pagedmla", argument, argument, wanted, got)
