"""Mesh axes over several slices: `dcn_*_parallelism`."""

import dataclasses

import jax
import pytest

from octablox import checks, config, mesh
from octablox.errors import UserError


def load(line):
    return config.load(f"model_name=tiny {line}".split()).config


@pytest.mark.parametrize(
    ("line", "slices", "shape", "between"),
    [
        ("ici_expert_parallelism=2", 1, (1, 8, 2), (1, 1, 1)),
        # Whole replicas between slices, unless said otherwise.
        ("ici_expert_parallelism=2", 4, (4, 2, 2), (4, 1, 1)),
        ("dcn_data_parallelism=1 dcn_fsdp_parallelism=2", 2, (1, 16, 1), (1, 2, 1)),
        ("dcn_data_parallelism=2 dcn_fsdp_parallelism=-1", 4, (2, 8, 1), (2, 2, 1)),
        (
            "ici_expert_parallelism=4 dcn_data_parallelism=1 dcn_expert_parallelism=2",
            2,
            (1, 2, 8),
            (1, 1, 2),
        ),
        ("ici_data_parallelism=2 ici_fsdp_parallelism=4", 2, (4, 4, 1), (2, 1, 1)),
    ],
)
def test_axes_within_and_between_slices(line, slices, shape, between):
    settings = load(line)
    found = checks.resolve_mesh_shape(settings, 16, slices)
    assert tuple(found[axis] for axis in mesh.ROW_AXES) == shape
    found = checks.resolve_slices(settings, slices)
    assert tuple(found[axis] for axis in mesh.ROW_AXES) == between


@pytest.mark.parametrize(
    ("line", "slices", "error"),
    [
        (
            "dcn_data_parallelism=2",
            1,
            "the slices data 2 x fsdp 1 x expert 1 = 2 must be those that there are, one slice "
            "(CPUs and GPUs have no more); change dcn_data_parallelism, dcn_fsdp_parallelism or "
            "dcn_expert_parallelism",
        ),
        (
            "dcn_fsdp_parallelism=3",
            4,
            "the slices fsdp 3 x expert 1 = 3 must divide those that there are, 4 slices; change "
            "dcn_data_parallelism, dcn_fsdp_parallelism or dcn_expert_parallelism",
        ),
        (
            "dcn_fsdp_parallelism=-1",
            2,
            "at most one mesh axis can be -1 (what is left), got -1 for data and fsdp",
        ),
        ("dcn_fsdp_parallelism=0", 2, "dcn_fsdp_parallelism: expected -1 or at least 1, got 0"),
        (
            "ici_expert_parallelism=3",
            2,
            "data 1 x expert 3 = 3 does not divide 8 devices of a slice; choose sizes that do, or "
            "num_cpu_devices for virtual ones",
        ),
    ],
)
def test_slices_that_do_not_fit(line, slices, error):
    with pytest.raises(UserError) as raised:
        checks.resolve_mesh_shape(load(line), 16, slices)
    assert str(raised.value) == error


@dataclasses.dataclass(frozen=True)
class Tpu:
    """As much of a TPU device as a mesh is laid out by."""

    id: int
    slice_index: int
    coords: tuple[int, int, int]
    core_on_chip: int
    process_index: int = 0
    platform: str = "tpu"
    device_kind: str = "TPU7x"


def pod(slices):
    """2 x 2 x 1 chips of two devices each, several times."""
    places = [(x, y, 0) for y in range(2) for x in range(2)]
    return [
        Tpu(100 * number + 2 * chip + core, number, place, core)
        for number in range(slices)
        for chip, place in enumerate(places)
        for core in range(2)
    ]


def test_cpus_are_one_slice():
    assert mesh.slice_count(jax.devices()) == 1


def test_devices_of_a_slice_stay_together():
    devices = pod(2)
    between = {"data": 2, "fsdp": 1, "expert": 1}
    grid = mesh._grid((2, 4, 2, 1), devices, between)
    assert grid.shape == (2, 4, 2, 1)
    assert sorted(device.id for device in grid.flat) == [device.id for device in devices]
    for number in range(2):
        assert {device.slice_index for device in grid[number].flat} == {number}


def test_devices_along_the_last_axis_are_neighbours():
    grid = mesh._grid((1, 4, 2, 1), pod(1), None)
    assert sorted(device.id for device in grid.flat) == [device.id for device in pod(1)]
    for pair in grid[0, :, :, 0]:
        assert pair[0].coords == pair[1].coords
