"""The gradient of fake-quant: straight through inside the codes, zero where clipped."""

import pytest
import torch
from torch import Tensor

from graphquant.numerics import QuantDtype, fake_quantize, qparams_from_range
from tests.numerics.sites import INT4, INT8, SCHEME_IDS, SCHEMES, SITES, sample

EVERY_SCHEME = pytest.mark.parametrize(("dtype", "symmetric"), SCHEMES, ids=SCHEME_IDS)


def gradient(x: Tensor, scale: Tensor, zero_point: Tensor, dtype: QuantDtype, weight: Tensor) -> Tensor:
    leaf = x.clone().requires_grad_()
    (fake_quantize(leaf, scale, zero_point, dtype) * weight).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


@EVERY_SCHEME
def test_the_gradient_of_in_range_values_passes_unchanged(dtype: QuantDtype, symmetric: bool) -> None:
    for site in SITES:
        x = sample(site, "heavy", 0, 5)
        weight = sample(site, "normal", 0, 6)
        assert torch.equal(gradient(x, *site.qparams(x, dtype, symmetric), dtype, weight), weight), str(site)


@EVERY_SCHEME
def test_forward_is_identical_with_and_without_a_gradient(dtype: QuantDtype, symmetric: bool) -> None:
    for site in SITES:
        x = sample(site, "heavy", 0, 7)
        scale, zero_point = site.qparams(x / 2, dtype, symmetric)
        plain = fake_quantize(x, scale, zero_point, dtype)
        traced = fake_quantize(x.clone().requires_grad_(), scale, zero_point, dtype)
        assert traced.requires_grad
        assert torch.equal(traced.detach(), plain), str(site)


@EVERY_SCHEME
def test_clipped_values_have_no_gradient(dtype: QuantDtype, symmetric: bool) -> None:
    scale, zero_point = qparams_from_range(torch.tensor(-1.0), torch.tensor(1.0), dtype, symmetric)
    x = torch.tensor([-100.0, -3.0, -0.4, 0.0, 0.4, 3.0, 100.0])
    assert gradient(x, scale, zero_point, dtype, torch.full((7,), 2.5)).tolist() == [0, 0, 2.5, 2.5, 2.5, 0, 0]


def test_the_gradient_ends_half_a_step_beyond_the_codes() -> None:
    x = torch.tensor([-128.6, -128.4, 127.4, 127.6])
    one, zero = torch.tensor(1.0), torch.tensor(0, dtype=torch.int32)
    assert gradient(x, one, zero, INT8, torch.ones(4)).tolist() == [0, 1, 1, 0]
    shifted = torch.tensor(-128, dtype=torch.int32)
    assert gradient(x + 128, one, shifted, INT8, torch.ones(4)).tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize("symmetric", [True, False])
def test_the_gradient_equals_torchs_fake_quantize(symmetric: bool) -> None:
    x = torch.linspace(-3, 3, 101)
    scale, zero_point = qparams_from_range(torch.tensor(-1.0), torch.tensor(1.7), INT4, symmetric)
    leaf = x.clone().requires_grad_()
    torch.fake_quantize_per_tensor_affine(leaf, scale.item(), int(zero_point.item()), -8, 7).sum().backward()
    mine = gradient(x, scale, zero_point, INT4, torch.ones_like(x))
    assert torch.equal(mine, leaf.grad)
    assert 0 < mine.sum() < 101


@pytest.mark.parametrize("real", [torch.bfloat16, torch.float16], ids=str)
def test_the_gradient_has_the_dtype_of_the_values(real: torch.dtype) -> None:
    scale, zero_point = qparams_from_range(torch.tensor(-1.0), torch.tensor(1.0), INT8, symmetric=True)
    grad = gradient(torch.tensor([0.5, 9.0], dtype=real), scale, zero_point, INT8, torch.tensor([3.0, 3.0]).to(real))
    assert grad.dtype == real
    assert grad.tolist() == [3.0, 0.0]
