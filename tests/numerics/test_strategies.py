"""Strategies: scale shapes, reduction, expansion, rows, and what is refused."""

import pytest
import torch

from graphquant.errors import StrategyError
from graphquant.numerics import (
    TensorLayout,
    check_strategy,
    dynamic_qparams,
    expand_qparam,
    reduce_stat,
    scale_shape,
)
from tests.numerics.sites import INT8, STATIC_SITES, Site

PROJECTION, STATES = TensorLayout("projection", 2, 4), TensorLayout("states", 2, 4)
FEATURES = TensorLayout("features", 1, 8)
Q_PROJ, K_PROJ = TensorLayout("projection", 32, 128), TensorLayout("projection", 8, 128)
QUERY, KEY = TensorLayout("states", 32, 128), TensorLayout("states", 8, 128)


@pytest.mark.parametrize(
    ("layout", "strategy", "group_size", "shape"),
    [
        (Q_PROJ, "channel", None, (4096,)),
        (K_PROJ, "channel", None, (1024,)),
        (KEY, "channel", None, (128,)),
        (KEY, "attn_head", None, (8, 1, 1)),
        (QUERY, "attn_head", None, (32, 1, 1)),
        (K_PROJ, "tensor", None, (1,)),
        (KEY, "tensor", None, (1,)),
        (K_PROJ, "attn_head", None, (8,)),
        (K_PROJ, "attn_head_channel", None, (1024,)),
        (KEY, "attn_head_channel", None, (8, 1, 128)),
        (K_PROJ, "group", 32, (32,)),
        (K_PROJ, "group", 256, (4,)),
        (KEY, "group", 32, (8, 1, 4)),
        (TensorLayout("projection", 4, 32), "channel", None, (128,)),  # hidden 64: head_dim is not hidden / heads
        (FEATURES, "channel", None, (8,)),
        (FEATURES, "group", 4, (2,)),
    ],
)
def test_scales_have_the_shape_of_the_table(
    layout: TensorLayout, strategy: str, group_size: int | None, shape: tuple[int, ...]
) -> None:
    assert scale_shape(layout, strategy, group_size) == shape
    finest = torch.ones(layout.heads, layout.head_dim)
    for how in ("amin", "amax", "sum"):
        assert reduce_stat(finest, layout, strategy, group_size, how).shape == shape


def test_channel_of_a_k_proj_output_is_its_last_dim_not_its_tokens() -> None:
    x = torch.randn(1, 7, 64)
    layout = TensorLayout("projection", 2, 32)
    amax = reduce_stat(layout.rows(x).flatten(0, 1).amax(0), layout, "channel", None, "amax")
    assert amax.shape == (64,)
    assert torch.equal(amax, x.amax((0, 1)))


def test_a_token_has_its_own_scale_whatever_its_batch_and_head() -> None:
    generator = torch.Generator().manual_seed(0)
    projection, states = torch.randn(2, 3, 8, generator=generator), torch.randn(2, 2, 3, 4, generator=generator)
    for x, shape in ((projection, (2, 3, 1)), (states, (2, 2, 3, 1))):
        scale, zero_point = dynamic_qparams(x, INT8, symmetric=True)
        assert scale.shape == zero_point.shape == shape
        assert torch.equal(scale, x.abs().amax(-1, keepdim=True) / 127.5)
    assert dynamic_qparams(projection, INT8, symmetric=True)[0].numel() == 6


@pytest.mark.parametrize("site", STATIC_SITES, ids=str)
def test_every_value_is_reduced_into_and_expanded_from_its_owner(site: Site) -> None:
    layout = site.layout
    args = (layout, site.strategy, site.group_size)
    finest = torch.randn(layout.heads, layout.head_dim, generator=torch.Generator().manual_seed(0)).double()
    scales = torch.arange(1.0, 1 + torch.Size(scale_shape(*args)).numel()).view(scale_shape(*args))
    ones = torch.ones(site.tensor_shape(2, 3))
    seen = layout.rows(ones * expand_qparam(scales, *args))
    members: dict[tuple[int, ...], list[float]] = {}
    for head in range(layout.heads):
        for channel in range(layout.head_dim):
            owner = site.owner(head, channel)
            members.setdefault(owner, []).append(finest[head, channel].item())
            assert (seen[:, :, head, channel] == scales[owner]).all()
    assert len(members) == scales.numel()
    for owner, values in members.items():
        assert reduce_stat(finest, *args, "amin")[owner] == min(values)
        assert reduce_stat(finest, *args, "amax")[owner] == max(values)
        assert reduce_stat(finest, *args, "sum")[owner].item() == pytest.approx(sum(values), abs=1e-12)


@pytest.mark.parametrize("site", STATIC_SITES, ids=str)
def test_a_trailing_dim_of_the_statistic_is_reduced_bin_by_bin(site: Site) -> None:
    layout = site.layout
    finest = torch.randint(0, 9, (layout.heads, layout.head_dim, 5), generator=torch.Generator().manual_seed(0))
    args = (layout, site.strategy, site.group_size)
    together = reduce_stat(finest, *args, "sum")
    assert together.shape == (*scale_shape(*args), 5)
    for k in range(5):
        assert torch.equal(together[..., k], reduce_stat(finest[..., k], *args, "sum"))


def test_rows_are_head_and_channel_of_each_token() -> None:
    # [B, S, H·D] and [B, H, S, D] of the same values give the same rows.
    x = torch.arange(24.0).view(1, 3, 8)
    rows = PROJECTION.rows(x)
    assert rows.shape == (1, 3, 2, 4)
    assert rows[0, 1].tolist() == [[8.0, 9.0, 10.0, 11.0], [12.0, 13.0, 14.0, 15.0]]
    assert torch.equal(STATES.rows(x.view(1, 3, 2, 4).transpose(1, 2)), rows)
    assert FEATURES.rows(x).shape == (1, 3, 1, 8)


@pytest.mark.parametrize("layout", [PROJECTION, STATES], ids=["projection", "states"])
def test_masked_rows_are_the_kept_tokens_in_order(layout: TensorLayout) -> None:
    x = torch.randn(Site(layout, "tensor").tensor_shape(2, 3), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[False, True, True], [True, False, False]])
    kept = layout.rows(x, mask)
    every = layout.rows(x)
    assert torch.equal(kept, torch.stack([every[0, 1], every[0, 2], every[1, 0]]))
    assert layout.rows(x, torch.zeros(2, 3, dtype=torch.bool)).shape == (0, 2, 4)


def test_layouts_name_their_shape() -> None:
    assert PROJECTION.dims == "[B, S, 8]"
    assert STATES.dims == "[B, 2, S, 4]"
    assert FEATURES.dims == "[B, S, 8]"
    assert PROJECTION.channels == STATES.channels == 8


@pytest.mark.parametrize("layout", [PROJECTION, STATES], ids=["projection", "states"])
@pytest.mark.parametrize("strategy", ["tensor", "channel", "attn_head", "attn_head_channel", "token"])
def test_strategies_without_arguments_are_accepted(layout: TensorLayout, strategy: str) -> None:
    assert check_strategy(layout, strategy, None, "layers.0") is None


@pytest.mark.parametrize(
    ("layout", "strategy", "group_size", "message"),
    [
        (
            STATES,
            "block",
            None,
            "strategy 'block' is not built yet; use one of tensor, channel, attn_head, attn_head_channel, group, token",
        ),
        (
            PROJECTION,
            "tensor_group",
            4,
            "strategy 'tensor_group' is not built yet; use one of tensor, channel, attn_head, attn_head_channel, group,"
            " token",
        ),
        (
            STATES,
            "head",
            None,
            "unknown strategy 'head'; there are tensor, channel, attn_head, attn_head_channel, group, token",
        ),
        (
            FEATURES,
            "attn_head",
            None,
            "strategy 'attn_head' needs attention heads, and the input of a projection [B, S, 8] has none; "
            "use tensor, channel, group or token",
        ),
        (
            FEATURES,
            "attn_head_channel",
            None,
            "strategy 'attn_head_channel' needs attention heads, and the input of a projection [B, S, 8] has none; "
            "use tensor, channel, group or token",
        ),
        (
            STATES,
            "group",
            None,
            "group_size must divide the last dim 4 of [B, 2, S, 4], and None does not; use one of 2, 4",
        ),
        (
            PROJECTION,
            "group",
            3,
            "group_size must divide the last dim 8 of [B, S, 8], and 3 does not; use one of 2, 4, 8",
        ),
        (STATES, "group", 8, "group_size must divide the last dim 4 of [B, 2, S, 4], and 8 does not; use one of 2, 4"),
        (
            PROJECTION,
            "group",
            0,
            "group_size must divide the last dim 8 of [B, S, 8], and 0 does not; use one of 2, 4, 8",
        ),
        (
            PROJECTION,
            "group",
            -2,
            "group_size must divide the last dim 8 of [B, S, 8], and -2 does not; use one of 2, 4, 8",
        ),
    ],
)
def test_a_refusal_names_the_place_the_shape_and_what_works(
    layout: TensorLayout, strategy: str, group_size: int | None, message: str
) -> None:
    with pytest.raises(StrategyError) as refusal:
        check_strategy(layout, strategy, group_size, "model.layers.0.self_attn.k_proj")
    assert str(refusal.value) == f"model.layers.0.self_attn.k_proj: {message}"


@pytest.mark.parametrize("strategy", ["token", "block", "group"])
def test_a_strategy_without_static_scales_has_no_shape(strategy: str) -> None:
    with pytest.raises(StrategyError, match=f"strategy '{strategy}' has no static scale shape"):
        scale_shape(KEY, strategy)
