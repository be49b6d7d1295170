"""Releases of torch that differ from the tested ones: operators that are gone or changed, and what ``info`` says."""

from __future__ import annotations

import datetime
from collections.abc import Iterator

import pytest
import torch
from command_line import shown

from ring_backends import dilated_attention
from ring_backends.kernels import KernelInputs, kernels, operators, select_kernel
from ring_backends.releases import TESTED, recorded_runs, untested
from ring_backends.testing.reference import reference_attention
from ring_backends.torch_internals import internal

CPU_FLASH = KernelInputs(torch.device("cpu"), torch.float64, head_dim=8)


FORWARD = "_scaled_dot_product_flash_attention_for_cpu"


@pytest.fixture(autouse=True)
def forget_reasons() -> Iterator[None]:
    operators._reason.cache_clear()
    yield
    operators._reason.cache_clear()


@pytest.fixture
def renamed_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make torch behave as if it had renamed the forward of CPU flash attention."""
    namespace = type(torch.ops.aten)
    find = namespace.__getattr__

    def find_others(self: object, wanted: str) -> object:
        if wanted == FORWARD:
            raise AttributeError(wanted)
        return find(self, wanted)

    monkeypatch.delattr(torch.ops.aten, FORWARD, raising=False)
    monkeypatch.setattr(namespace, "__getattr__", find_others)


def test_this_torch_has_every_operator_unchanged() -> None:
    assert operators.operator_reasons(list(operators.SCHEMAS)) == []
    assert {name for kernel in kernels() for name in kernel.operators} == set(operators.SCHEMAS)


def test_without_its_operator_a_kernel_gives_the_reason_and_the_next_one_runs(renamed_operator: None) -> None:
    reason = f"torch {torch.__version__} has no aten::{FORWARD}"
    assert select_kernel("auto", CPU_FLASH).name == "math"
    with pytest.raises(ValueError, match=reason.replace("+", r"\+")):
        select_kernel("aten_cpu_flash", CPU_FLASH)
    assert reason in " ".join(shown("info").split())
    rows = torch.randn(3, 1, 50, 2, 8, dtype=torch.float64)
    got = dilated_attention(*rows, [8, 64], [1, 3], is_causal=True, return_lse=True)
    right = reference_attention(*rows, [8, 64], [1, 3], is_causal=True)
    torch.testing.assert_close(got, right)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("bool is_causal", "bool is_causal_now"),
        ("float dropout_p=0., bool is_causal=False", "bool is_causal=False, float dropout_p=0."),
        ("Tensor logsumexp)", "Tensor logsumexp, Tensor seed)"),
    ],
)
def test_a_changed_schema_is_a_reason(monkeypatch: pytest.MonkeyPatch, before: str, after: str) -> None:
    # The release differs from what the kernel expects, so it does not matter which of the two is modified.
    assert before in operators.SCHEMAS[FORWARD]
    monkeypatch.setitem(operators.SCHEMAS, FORWARD, operators.SCHEMAS[FORWARD].replace(before, after))
    (reason,) = operators.operator_reasons([FORWARD])
    assert reason.startswith(f"torch {torch.__version__} has changed aten::{FORWARD}; its schema is now")
    assert select_kernel("auto", CPU_FLASH).name == "math"


def test_a_missing_private_name_is_named() -> None:
    message = r"has no torch\._C\._absent, which a test needs; install a release of torch"
    with pytest.raises(RuntimeError, match=message):
        internal(torch._C, "_absent", "a test")


def test_a_release_outside_the_record_is_named() -> None:
    installed = dict.fromkeys(TESTED) | {"python": "3.11.7", "torch": "99.1.0+cpu", "fairscale": "0.4.13"}
    sentences = untested(installed)
    assert set(sentences) == {"torch"}
    assert sentences["torch"].startswith("the tests have not run with 99.1.0+cpu; they ran with 2.11.0, ")


def test_the_record_lists_torch_releases_in_order_and_every_framework() -> None:
    runs = recorded_runs()
    releases = [tuple(map(int, run["torch"].partition("+")[0].split("."))) for run in runs]
    assert releases == sorted(releases)
    assert all(run["passed"] > 1000 and datetime.date.fromisoformat(run["date"]) for run in runs)
    assert all(any(run[name] for run in runs) for name in TESTED)
