"""Chips, and the topologies that can be named."""

import pytest

from octablox.aot.chips import CHIPS, parse_topology
from octablox.errors import UserError
from octablox.kernels import tiles


@pytest.mark.parametrize(
    ("text", "name", "devices"),
    [
        ("tpu7x:4x4x8", "tpu7x:4x4x8", 256),
        ("TPU7x:2x2x1", "tpu7x:2x2x1", 8),
        ("v5p:4x4x4", "v5p:4x4x4", 64),
        ("v5e:16x16", "v5e:16x16", 256),
        ("v6e:1x1", "v6e:1x1", 1),
        # MaxText's names: TensorCores of tpu7x and v5p, chips of v5e and v6e.
        ("tpu7x-256", "tpu7x:4x4x8", 256),
        ("tpu7x-8", "tpu7x:2x2x1", 8),
        ("tpu7x-64", "tpu7x:2x4x4", 64),
        ("v5p-256", "v5p:4x4x8", 128),
        ("v5e-256", "v5e:16x16", 256),
        ("v6e-8", "v6e:2x4", 8),
    ],
)
def test_names_of_topologies(text, name, devices):
    topology = parse_topology(text)
    assert (topology.name, topology.devices) == (name, devices)
    assert parse_topology(text, slices=3).devices == 3 * devices


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "tpu8:4x4x4",
            "compile_topology: expected tpu7x:16x16x16, v6e:16x16, v5p:16x16x16, v5e:16x16 or "
            "smaller, got 'tpu8:4x4x4'; did you mean tpu7x?",
        ),
        (
            "tpu7x:3x4x4",
            "compile_topology: 'tpu7x:3x4x4' is no tpu7x topology; near ones are tpu7x:4x4x4, "
            "tpu7x:2x4x4, tpu7x:4x4x8",
        ),
        (
            "v5e:4x4x4",
            "compile_topology: 'v5e:4x4x4' is no v5e topology; near ones are v5e:8x8, v5e:4x8, "
            "v5e:8x16",
        ),
        (
            "v5e-257",
            "compile_topology: 'v5e-257' is no v5e topology; near ones are v5e-256, v5e-128, "
            "v5e-64",
        ),
        (
            "tpu7x:4x-4x4",
            "compile_topology: 'tpu7x:4x-4x4' is no tpu7x topology; near ones are tpu7x:4x4x4, "
            "tpu7x:2x4x4, tpu7x:4x4x8",
        ),
    ],
)
def test_a_topology_that_is_none_names_near_ones(text, line):
    with pytest.raises(UserError) as error:
        parse_topology(text)
    assert str(error.value) == line


def test_figures_of_a_device_are_its_share_of_the_chip():
    chip = CHIPS["tpu7x"]
    assert chip.devices == 2
    assert chip.flops["bf16"] == 2307e12 / 2
    assert chip.hbm_rate == 7380e9 / 2
    assert CHIPS["v5p"].flops["bf16"] == 459e12
    # Three rings of two links each: 200 GB/s both ways round, of which nine tenths are reached.
    assert chip.ring_rate == CHIPS["v5p"].ring_rate == CHIPS["v6e"].ring_rate == 180e9
    assert CHIPS["v5e"].ring_rate == 90e9


def test_the_clock_agrees_with_what_the_kernels_know_of_hbm():
    # `tiles` has bytes a cycle of a TensorCore, read from schedules; to 1 in 20.
    for name, chip in CHIPS.items():
        cores = 2 if name == "v5p" else 1
        assert chip.hbm_rate / chip.clock / cores == pytest.approx(tiles.CHIPS[name].hbm, rel=0.05)
