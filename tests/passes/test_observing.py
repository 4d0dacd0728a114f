"""What observers count: every token that is no padding, of every batch that passed, in float32."""

import copy
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

import graphquant as gq
from graphquant.errors import CalibrationError, DataError, NonFiniteError
from graphquant.numerics import TensorLayout
from graphquant.passes.modules import kept_rows
from graphquant.passes.prepared import observers
from tests.passes.helpers import PLACES, args, both, calibrated, config
from tests.passes.modules import Masked, Plain, export, exported, x_of
from tests.tiny import VOCABULARY, tiny_batch, tiny_batches

EVERYTHING = both(config("states", args()), config("outputs", args()), config("inputs", args()))


@pytest.fixture(scope="module")
def masked() -> ExportedProgram:
    return export(Masked(), x=x_of(), attention_mask=torch.ones(2, 6))


def states_of(calibration: gq.Calibration) -> dict[str, Tensor]:
    return {f"{key}.{name}": value for key in calibration for name, value in calibration[key].state.items()}


def assert_same_statistics(left: gq.Calibration, right: gq.Calibration) -> None:
    mine, theirs = states_of(left), states_of(right)
    assert mine.keys() == theirs.keys()
    assert [name for name, value in mine.items() if not torch.equal(value, theirs[name])] == []


def padded(batch: dict[str, Tensor], side: str, seed: int) -> dict[str, Tensor]:
    """The batch with four tokens of random padding at one side."""
    ids = batch["input_ids"]
    garbage = torch.randint(0, VOCABULARY, (len(ids), 4), generator=torch.Generator().manual_seed(seed))
    dead = torch.zeros_like(garbage)
    parts = ((garbage, ids), (dead, batch["attention_mask"]))
    names = ("input_ids", "attention_mask")
    return {name: torch.cat(part if side == "left" else part[::-1], 1) for name, part in zip(names, parts, strict=True)}


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_tokens_change_no_statistic(tiny_program: ExportedProgram, side: str) -> None:
    batch = tiny_batch(2, 6)
    first, second = (calibrated(tiny_program, EVERYTHING, [padded(batch, side, seed)]) for seed in (1, 2))
    assert_same_statistics(gq.calibration_of(first), gq.calibration_of(second))
    without = states_of(gq.calibration_of(calibrated(tiny_program, EVERYTHING, [batch])))
    rotated = ("query_states", "key_states")  # padding at the left turns them by other angles
    for name, value in states_of(gq.calibration_of(first)).items():
        if not (side == "left" and any(role in name for role in rotated)):
            torch.testing.assert_close(value, without[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("side", [slice(0, 2), slice(4, 6)], ids=["left", "right"])
@pytest.mark.parametrize(("where", "strategy"), PLACES)
def test_padding_of_a_hundred_times_the_size_changes_no_statistic(
    masked: ExportedProgram, where: str, strategy: str, side: slice
) -> None:
    mask = torch.ones(2, 6)
    mask[1, side] = 0
    x = x_of()
    x[mask == 0] *= 0.5
    small = {"x": x, "attention_mask": mask}
    large = {"x": torch.where(mask[..., None] == 0, x * 100, x), "attention_mask": mask}
    c = config(where, args(strategy))
    first, second = (gq.calibration_of(calibrated(masked, c, [batch])) for batch in (small, large))
    assert_same_statistics(first, second)
    assert {entry.tokens for entry in first.entries} == {10}
    everything = gq.calibrate(gq.prepare(masked, c, padding_mask=None), [large], progress=False)
    assert {entry.tokens for entry in everything.entries} == {12}
    assert all(everything[key].amax > 5 * entry.amax for key, entry in first.items())


def test_a_batch_of_padding_alone_counts_as_nothing(masked: ExportedProgram) -> None:
    prepared = calibrated(masked, EVERYTHING, [{"x": x_of(), "attention_mask": torch.zeros(2, 6)}])
    assert {entry.tokens for entry in gq.calibration_of(prepared).entries} == {0}


def test_a_longer_mask_covers_the_past_and_its_last_positions_count() -> None:
    layout = TensorLayout("states", 1, 1)
    x = torch.arange(6.0).view(2, 1, 3, 1)
    mask = torch.tensor([[0, 0, 1, 1, 0], [1, 1, 0, 1, 1]])
    assert kept_rows(x, mask, layout, "here").flatten().tolist() == [0, 1, 4, 5]
    with pytest.raises(
        CalibrationError, match=re.escape("here: a padding mask [2, 2] does not cover 3 positions of 2")
    ):
        kept_rows(x, mask[:, :2], layout, "here")


@pytest.mark.parametrize(("where", "strategy"), PLACES)
def test_batches_may_differ_in_batch_and_sequence(tiny_program: ExportedProgram, where: str, strategy: str) -> None:
    shapes = [(4, 5), (2, 9), (1, 1), (3, 16)]
    prepared = calibrated(tiny_program, config(where, args(strategy)), [tiny_batch(*shape) for shape in shapes])
    assert {entry.tokens for entry in gq.calibration_of(prepared).entries} == {20 + 18 + 1 + 48}
    quantized = gq.convert(prepared).module()
    assert quantized(**tiny_batch(2, 7)).shape == (2, 7, VOCABULARY)


@pytest.mark.parametrize("order", [(10.0, 1.0), (1.0, 10.0)])
@pytest.mark.parametrize("observer", ["minmax", "percentile", "mse"])
def test_the_largest_batch_is_not_forgotten(observer: str, order: tuple[float, float]) -> None:
    program = exported(Plain)
    x = x_of() / x_of().abs().amax()
    given: dict[str, Any] = {"observer_kwargs": {"percentile": 100.0}} if observer == "percentile" else {}
    c = config("inputs", args(observer=observer, **given))
    prepared = calibrated(program, c, [{"x": x * amax} for amax in order])
    (entry,) = gq.calibration_of(prepared).entries
    assert entry.amax == 10.0
    scale = gq.convert(prepared).state_dict["attention_0.q_proj.input_scale"]
    expected = torch.tensor([10.0]) / 127.5
    assert torch.equal(scale, expected) if observer != "mse" else scale > expected / 2


@pytest.mark.parametrize("observer", ["minmax", "moving_average", "mse"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_is_refused_and_its_batch_counts_nowhere(
    tiny_program: ExportedProgram, bad: float, observer: str
) -> None:
    prepared = copy.deepcopy(calibrated(tiny_program, config("outputs", args(observer=observer))))
    before = gq.calibration_of(prepared)
    weight = prepared.get_parameter("model.layers.1.self_attn.k_proj.weight")
    good = weight.detach().clone()
    with torch.no_grad():
        weight[3, 3] = bad
    where = r"model\.layers\.1\.self_attn\.k_proj\.output \(node linear_\w+, \S+\.py:\d+\)"
    for _ in range(2):  # and its number is not used up
        with pytest.raises(NonFiniteError, match=rf"^{where}: a NaN or Inf was observed in batch 2 \(counted from 0\)"):
            gq.calibrate(prepared, tiny_batches(), progress=False)
        assert_same_statistics(gq.calibration_of(prepared), before)
    with torch.no_grad():
        weight.copy_(good)
    after = gq.calibrate(prepared, tiny_batches(), progress=False)
    assert {entry.tokens for entry in after.entries} == {2 * 36}


def test_a_value_that_is_not_finite_does_not_matter_in_padding(masked: ExportedProgram) -> None:
    x, mask = x_of(), torch.ones(2, 6)
    x[0, 4:], mask[0, 4:] = float("inf"), 0
    calibration = gq.calibration_of(calibrated(masked, config("inputs", args()), [{"x": x, "attention_mask": mask}]))
    assert {entry.tokens for entry in calibration.entries} == {10}


def test_an_interruption_leaves_whole_batches(tiny_program: ExportedProgram) -> None:
    prepared = gq.prepare(tiny_program, EVERYTHING)

    def interrupted() -> Iterator[dict[str, Tensor]]:
        yield tiny_batches()[0]
        observers(prepared)[-1].register_forward_pre_hook(stop)
        yield tiny_batches()[1]

    def stop(module: nn.Module, inputs: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gq.calibrate(prepared, interrupted(), progress=False)
    expected = calibrated(tiny_program, EVERYTHING, tiny_batches()[:1])
    assert_same_statistics(gq.calibration_of(prepared), gq.calibration_of(expected))


def test_an_own_loop_observes_as_calibrate_does(tiny_program: ExportedProgram) -> None:
    prepared = gq.prepare(tiny_program, EVERYTHING)
    for batch in tiny_batches():
        prepared(**batch)
    assert_same_statistics(gq.calibration_of(prepared), gq.calibration_of(calibrated(tiny_program, EVERYTHING)))


def test_lists_in_place_of_tensors_are_refused(tiny_program: ExportedProgram) -> None:
    batch: Any = {"input_ids": [[1, 2]], "attention_mask": [[1, 1]]}
    with pytest.raises(DataError, match=r"batch 0: 'input_ids' is a list; expected a tensor"):
        gq.calibrate(gq.prepare(tiny_program, EVERYTHING), [batch], progress=False)
