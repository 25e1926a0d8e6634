"""What the tests of the Triton kernels run under: a policy that cuts short sequences, and two repairs of the interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter
from triton_backend import ON_CARD, small_policy


@pytest.fixture
def short_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several workers, and splits of two KV tiles in the batch-invariant mode."""
    small_policy(monkeypatch)


@pytest.fixture(autouse=not ON_CARD)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products whose rows do not depend on their place, and a third less time."""
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", _dot_in_float64)
    patch = interpreter._patch_lang

    def patch_once(fn: Any) -> Any:
        # it is called for every device function, and walks through all of triton.language to find nothing left to do
        modules = [tl, tl.core] if tl.core in fn.__globals__.values() else [tl]
        is_patched = not any(tl.core.is_builtin(module.load) for module in modules)
        return interpreter._LangPatchScope() if is_patched else patch(fn)

    monkeypatch.setattr(interpreter, "_patch_lang", patch_once)


def _dot_in_float64(_: object, a: Any, b: Any, acc: Any, *precision: object) -> Any:
    """numpy's BLAS rounds a row by its place in the matrix; matrix units do not, and bits are compared here.

    Rounded once from float64, a row's place shows no more.
    """
    product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64)).astype(acc.data.dtype)
    return interpreter.TensorHandle(product + acc.data, acc.dtype.scalar)
