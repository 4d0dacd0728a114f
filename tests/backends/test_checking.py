"""What counts as a difference: more than a tolerance, and more than roundings alone make of the program."""

import pytest
import torch
from backend_table import Bench, batch
from torch import Tensor, nn
from torch.export import ExportedProgram

import graphquant as gq
from graphquant.backends.checking import Reference, difference, rms_difference
from tests.tiny import tiny_llama

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("found", "expected", "worst"),
    [
        ([1.0, 2.0], [1.0, 4.0], 0.5),
        ([0.0, 1.0], [NAN, 1.0], INF),
        ([NAN, 1.0], [NAN, 1.0], 0.0),
        ([-INF, 1.0], [-INF, 1.0], 0.0),
        ([-INF, 1.0], [INF, 1.0], INF),
        ([], [], 0.0),
        ([0.0], [0.0, 1.0], INF),
    ],
)
def test_a_difference_is_of_the_largest_value_and_knows_what_is_no_number(
    found: list[float], expected: list[float], worst: float
) -> None:
    assert difference(torch.tensor(found), torch.tensor(expected)) == worst
    assert (rms_difference(torch.tensor(found), torch.tensor(expected)) == 0) == (worst == 0)


def test_a_root_mean_square_is_of_all_values() -> None:
    assert rms_difference(torch.tensor([3.0, 4.0, 0.0]), torch.tensor([3.0, 0.0, 0.0])) == pytest.approx(4 / 3)
    assert difference(torch.tensor([True]), torch.tensor([True])) == 0.0


class Ties(nn.Module):
    """Every product lies on a rounding tie: the last bit of a sum decides a whole step."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = nn.Linear(1, 64, bias=False)
        self.halves.weight.data = torch.arange(64.0)[:, None] + 0.5

    def forward(self, x: Tensor) -> Tensor:
        return torch.round(self.halves(x))


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.round(self.layer(x) * 16) / 16


def test_steps_on_ties_are_no_difference_and_other_steps_are() -> None:
    program, x = gq.capture(Ties(), {"x": torch.ones(2, 1)}), {"x": torch.ones(2, 1)}
    reference = Reference(program)
    (expected,) = reference.run(x)
    up = torch.arange(64.0).expand(2, 64) + 1
    assert reference.wrong([up], 1e-5, strict=False) == {}
    assert list(reference.wrong([up], 1e-5, strict=True)) == [0]
    assert list(reference.wrong([expected + 3], 1e-5, strict=False)) == [0]
    assert list(reference.wrong([], 1e-5, strict=False)) == [0]


def test_one_step_on_one_tie_is_no_difference_wherever_it_lies() -> None:
    """Half of the runs with noise do not show it, all of the first ones at every eighth place."""
    program, x = gq.capture(Ties(), {"x": torch.ones(1, 1)}), {"x": torch.ones(1, 1)}
    weight = program.state_dict["halves.weight"].data
    for place in range(0, 64, 2):
        weight.copy_(torch.arange(64.0)[:, None])
        weight[place] += 0.5
        reference = Reference(program)
        (expected,) = reference.run(x)
        found, other = expected.clone(), expected.clone()
        found[0, place] += 1
        other[0, place : place + 2] += 2
        assert reference.wrong([found], 1e-5, strict=False) == {}, place
        assert list(reference.wrong([other], 1e-5, strict=False)) == [0], place


def test_a_step_where_there_is_no_tie_is_a_difference() -> None:
    torch.manual_seed(0)
    program, x = gq.capture(Plain(), {"x": torch.randn(4, 8)}), {"x": torch.randn(4, 8)}
    reference = Reference(program)
    (expected,) = reference.run(x)
    assert reference.carried() == [0.0]
    changed = expected.clone()
    changed[0, 0] += 1 / 16
    assert list(reference.wrong([changed], 1e-5, strict=False)) == [0]


def test_a_program_with_state_is_measured_in_its_state() -> None:
    """Without what the first batch wrote, the second one's outputs are others, and so would seem far from right."""
    program = gq.capture(tiny_llama(num_hidden_layers=1), cache="static", max_cache_len=16)
    reference = Reference(program)
    for start, length in ((0, 5), (5, 1)):
        reference.run({"input_ids": torch.ones(1, length, dtype=torch.int64), **_positions(start, length)})
    assert 0 < max(reference.carried()) < 1e-4


def _positions(start: int, length: int) -> dict[str, Tensor]:
    return {"cache_position": torch.arange(start, start + length)}


@pytest.mark.parametrize("form", ["int8 sym", "int4 asym"])
def test_another_rounding_mode_is_more_than_noise(bench: Bench, form: str) -> None:
    """Every mix of strategies, the rounding of each site in turn made a floor."""
    program = bench.quantized(form)
    inputs = batch(2, 8)
    reference = Reference(program)
    reference.run(inputs)
    floored = list(_floors(program))
    assert len(floored) == 12
    for name, changed in floored:
        found = Reference(changed).run(inputs)
        assert list(reference.wrong(found, 1e-5, strict=False)) == [0], name


def _floors(program: ExportedProgram):
    from graphquant.passes.dialects import emit_aten
    from graphquant.passes.editor import rebuild
    from graphquant.passes.redialect import redialect

    spoken = redialect(program, emit_aten)
    sites = [
        node.name
        for node in spoken.graph.nodes
        if node.target == torch.ops.aten.round.default and node.args[0].target == torch.ops.aten.mul.Tensor
    ]
    for name in sites:
        changed = rebuild(spoken)
        (node,) = (node for node in changed.graph.nodes if node.name == name)
        node.target = torch.ops.aten.floor.default
        yield name, changed


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_is_not_alike_is_wrong_whatever_roundings_make(dtype: torch.dtype) -> None:
    """A product at the edge of the dtype's range, which noise alone makes an infinity."""
    edge = nn.Linear(1, 1, bias=False)
    edge.weight.data[:] = torch.finfo(dtype).max
    program = gq.capture(edge.to(dtype), {"input": torch.ones(2, 1, dtype=dtype)})
    reference = Reference(program)
    (expected,) = reference.run({"input": torch.ones(2, 1, dtype=dtype)})
    unlike = {
        "NaN or Inf": torch.full_like(expected, NAN),
        "shape": expected[:1],
        "float64": expected.double(),
        "of the largest output": -expected,
    }
    for words, found in unlike.items():
        assert words in reference.wrong([found], 1e-5, strict=False)[0]
    assert "it has 0 outputs, and the program 1" in reference.wrong([], 1e-5, strict=False)[0]


def test_one_wrong_position_is_not_lost_among_the_others(bench: Bench) -> None:
    program, inputs = bench.quantized("int8 sym"), batch(3, 128)
    reference = Reference(program)
    (expected,) = reference.run(inputs)
    changed = expected.clone()
    changed[1, 7] += 3 * reference.carried()[0] * expected.square().mean().sqrt()
    assert list(reference.wrong([changed], 1e-9, strict=False)) == [0]
