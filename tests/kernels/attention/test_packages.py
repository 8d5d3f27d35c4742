"""Optional packages, through stand-ins with their real signatures and their documented faults."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from leandit.kernels.attention import symbols
from leandit.kernels.attention.backends import attention_backends
from leandit.kernels.attention.contract import SparseOptions, ValueRefusal
from leandit.kernels.attention.request import AttentionRequest

OPTIONS = SparseOptions()


@pytest.fixture(autouse=True)
def fresh_symbols() -> Iterator[None]:
    symbols.find.cache_clear()
    yield
    symbols.find.cache_clear()


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the capability that the tensors' card is said to have."""

    def use(capability: tuple[int, int]) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)

    return use


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a module with these functions where a package would be."""

    def make(name: str, **functions: Any) -> None:
        module = types.ModuleType(name)
        module.__dict__.update(functions)
        monkeypatch.setitem(sys.modules, name, module)

    return make


def sdpa(q: Any, k: Any, v: Any, scale: Any = None) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale)


def sage_1(q, k, v, tensor_layout="HND", is_causal=False, sm_scale=None, smooth_k=True, **kwargs):
    """Subtracts the mean of k in place, and swallows any other argument, a mask too."""
    assert tensor_layout == "HND" and q.shape[-1] in (64, 96, 128)
    if smooth_k:
        k -= k.mean(2, keepdim=True)
    return sdpa(q, k, v, sm_scale)


def sage_2(**extra: Any) -> Any:
    def kernel(q, k, v, tensor_layout="HND", is_causal=False, sm_scale=None, **kwargs):
        assert q.dtype in (torch.float16, torch.bfloat16), q.dtype
        assert q.shape[1] == k.shape[1] == v.shape[1]
        kernel.used = {**extra, **kwargs}  # type: ignore[attr-defined]
        return sdpa(q, k, v, sm_scale)

    return kernel


def flash(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, **kwargs):
    """(B, N, H, D), no masks."""
    out = sdpa(*(t.transpose(1, 2) for t in (q, k, v)), softmax_scale)
    return out.transpose(1, 2)


def flash_3(q, k, v, softmax_scale=None, causal=False, **kwargs):
    return flash(q, k, v, softmax_scale=softmax_scale), "log-sum-exp"


def sage_3(q, k, v, attn_mask=None, is_causal=False, per_block_mean=True, **kwargs):
    k -= k.mean(2, keepdim=True)
    return sdpa(q, k, v)


def operands(dim: int = 64, dtype: torch.dtype = torch.bfloat16, kv: int = 4) -> Any:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, heads, 200, dim, generator=generator).to(dtype) for heads in (4, kv, kv)]


def asked(capability: tuple[int, int] = (8, 9), **changes: Any) -> AttentionRequest:
    values: dict[str, Any] = {
        "device": "cuda",
        "capability": capability,
        "dtype": torch.bfloat16,
        "batch": 1,
        "heads": 4,
        "kv_heads": 4,
        "tokens": 200,
        "key_tokens": 200,
        "head_dim": 64,
    }
    return AttentionRequest(**{**values, **changes})


def install_all(install: Any) -> None:
    install("sageattention", sageattn=sage_2(), sageattn_qk_int8_pv_fp16_cuda=sage_2(),
            sageattn_qk_int8_pv_fp8_cuda=sage_2(), sageattn_qk_int8_pv_fp8_cuda_sm90=sage_2())  # fmt: skip
    install("sageattn3", sageattn3_blackwell=sage_3)
    install("flash_attn", flash_attn_func=flash)
    install("spas_sage_attn", spas_sage2_attn_meansim_topk_cuda=lambda *a, **k: None)


MASKED = {"fa": (8, 9), "sage_attn": (8, 9), "sage3": (12, 0), "sol_attn": (8, 9), "sparge": (8, 9)}


@pytest.mark.parametrize("name", MASKED)
def test_a_mask_is_refused_where_a_kernel_would_ignore_it(name: str, install: Any) -> None:
    install_all(install)
    backend = attention_backends()[name]
    dim = 128 if name == "sol_attn" else 64
    reason = backend.refuses(asked(MASKED[name], head_dim=dim, mask="bool"))
    assert reason is not None and "mask" in reason
    if name != "sol_attn":
        assert backend.refuses(asked(MASKED[name], head_dim=dim)) is None


@pytest.mark.parametrize("version", [1, 2])
def test_sage_leaves_its_operands_as_they_are(version: int, install: Any, card: Any) -> None:
    if version == 1:
        install("sageattention", sageattn=sage_1)
    else:
        install_all(install)
    card((8, 9))
    backend = attention_backends()["sage_attn"]
    assert backend.refuses(asked()) is None
    q, k, v = operands()
    before = k.clone()
    out = backend.attention(q, k, v, None, 0.2, OPTIONS)
    assert torch.equal(k, before)
    assert torch.allclose(out.float(), sdpa(q, k, v, 0.2).float(), atol=2e-2)


def test_sage_3_leaves_its_operands_as_they_are(install: Any, card: Any) -> None:
    install_all(install)
    card((12, 0))
    q, k, v = operands()
    before = k.clone()
    attention_backends()["sage3"].attention(q, k, v, None, None, OPTIONS)
    assert torch.equal(k, before)


KERNELS = {
    (8, 0): "sageattn_qk_int8_pv_fp16_cuda",
    (8, 6): "sageattn_qk_int8_pv_fp16_cuda",
    (8, 9): "sageattn_qk_int8_pv_fp8_cuda",
    (9, 0): "sageattn_qk_int8_pv_fp8_cuda_sm90",
    (12, 0): "sageattn",
}


@pytest.mark.parametrize("capability", KERNELS)
def test_sage_2_runs_the_kernel_that_is_right_on_each_card(
    capability: tuple[int, int], install: Any, card: Any
) -> None:
    """On sm86 its own choice, a Triton kernel, makes black pictures."""
    kernels = {name: sage_2() for name in {*KERNELS.values()}}
    install("sageattention", **kernels)
    card(capability)
    attention_backends()["sage_attn"].attention(*operands(), None, None, OPTIONS)
    used = [name for name, kernel in kernels.items() if hasattr(kernel, "used")]
    assert used == [KERNELS[capability]]
    if capability == (8, 6):
        assert kernels[used[0]].used == {"pv_accum_dtype": "fp32"}


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("sage_attn", {"capability": (7, 5)}, "no kernel for compute capability 7.5"),
        ("sage_attn", {"capability": (10, 0)}, "no kernel for compute capability 10.0"),
        ("sage_attn", {"head_dim": 160}, "heads of up to 128, not 160"),
        ("sage_attn", {"dtype": torch.float32}, "not torch.float32"),
        ("sage_attn", {"largest_offset": 2**31}, "32-bit indices"),
        ("fa", {"capability": (7, 5)}, "needs compute capability 8.0"),
        ("fa", {"head_dim": 512}, "heads of up to 256"),
        ("fa", {"dtype": torch.float32}, "not torch.float32"),
        ("sage3", {"capability": (8, 9)}, "12.0 or 12.1"),
        ("sage3", {"capability": (12, 0), "own_scale": True}, "no scale of its own"),
        ("sage3", {"capability": (12, 0), "head_dim": 96}, "heads of 64 or 128"),
        ("sparge", {"key_tokens": 77}, "self-attention"),
        ("sparge", {"capability": (12, 0)}, "8.0 to 9.0"),
        ("kitchen_int8", {"head_dim": 512}, "heads of up to 256"),
        ("kitchen_int8", {"device": "cpu", "capability": None}, "the tensors are on cpu"),
    ],
)
def test_what_a_kernel_cannot_take_is_refused_before_any_call(
    name: str, changes: dict[str, Any], words: str, install: Any
) -> None:
    install_all(install)
    assert words in (attention_backends()[name].refuses(asked(**changes)) or "")


@pytest.mark.parametrize(
    ("modules", "capability", "expected"),
    [
        ({"flash_attn": flash}, (8, 9), True),
        ({"flash_attn_interface": flash_3}, (9, 0), True),
        ({"flash_attn_interface": flash_3}, (8, 9), False),
        ({"flash_attn": None}, (8, 9), False),
    ],
    ids=["version 2", "version 3", "version 3 on another card", "only version 4's namespace"],
)
def test_the_flash_attention_that_is_there_is_used(
    modules: dict[str, Any], capability: tuple[int, int], expected: bool, install: Any, card: Any
) -> None:
    for name in ("flash_attn_interface", "flash_attn.cute", "flash_attn"):
        install(name)
    for name, function in modules.items():
        install(name, **({"flash_attn_func": function} if function else {}))
    card(capability)
    backend = attention_backends()["fa"]
    reason = backend.refuses(asked(capability))
    assert (reason is None) == expected
    if not expected:
        assert "flash_attn_func" in (reason or "")
        return
    q, k, v = operands()
    out = backend.attention(q, k, v, None, 0.3, OPTIONS)
    assert torch.allclose(out.float(), sdpa(q, k, v, 0.3).float(), atol=2e-2)


def test_a_package_that_is_missing_comes_with_the_way_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("sageattention", "flash_attn", "flash_attn.cute", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, name, None)
    backends = attention_backends()
    assert "pip install sageattention" in (backends["sage_attn"].refuses(asked()) or "")
    assert "pip install flash-attn" in (backends["fa"].refuses(asked()) or "")


def test_values_beyond_half_are_refused_where_a_kernel_casts_to_it(install: Any, card: Any) -> None:
    """They become infinity, and the picture black."""
    install_all(install)
    card((8, 0))
    q, k, v = operands()
    v[0, 0, 0, 0] = 1e5
    with pytest.raises(ValueRefusal, match=r"the largest here is 9.98e\+04, its limit 65504"):
        attention_backends()["sage_attn"].attention(q, k, v, None, None, OPTIONS)


def test_grouped_queries_reach_a_kernel_that_has_none(install: Any, card: Any) -> None:
    install_all(install)
    card((8, 9))
    q, k, v = operands(kv=2)
    out = attention_backends()["sage_attn"].attention(q, k, v, None, None, OPTIONS)
    assert out.shape == q.shape


def test_the_standalone_sol_attention_gets_what_it_accepts(
    install: Any, card: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from leandit.kernels.attention import sol_attn

    seen: dict[str, Any] = {}

    def function(
        q, k, v, *, scale=None, tau=1.0, thresh_type="diag", sink_tokens=0, sink_start=None
    ):
        assert all(t.is_contiguous() and t.shape == (1, 200, 4, 128) for t in (q, k, v))
        seen.update(tau=tau, sink_tokens=sink_tokens, sink_start=sink_start, scale=scale)
        return q

    install("sol_attn", sol_attn=function)
    monkeypatch.setattr(sol_attn, "_kitchen_has_a_kernel", lambda: False)
    backend = sol_attn.SolAttention()
    assert backend.refuses(asked(head_dim=128)) is None
    options = SparseOptions(0.8, ((0, 30), (40, 70)))
    operand_list = [t.transpose(1, 2).contiguous() for t in operands(128)]
    backend._standalone(operand_list, 0.1, options)
    assert seen == {"tau": 0.8, "sink_tokens": 70, "sink_start": 0, "scale": 0.1}
