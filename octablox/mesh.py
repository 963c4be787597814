"""The device mesh, and the parameters on it.

Axes, from slow to fast links: `data` (whole replicas), `fsdp` (parameters are cut, and gathered
where they are used), `expert` (experts are cut, and stay), `context` (as `fsdp`). The batch is cut
by all of them: its sequences by the first three, the tokens of a sequence by `context`.

A weight is declared once, as a `ParamSpec`; its initial values, its shards, its gathering and
the parameter counts are all derived from that.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np
import pydantic
from jax import lax
from jax import numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from octablox.errors import UserError

AXES = ("data", "fsdp", "expert", "context")
ROW_AXES = ("data", "fsdp", "expert")  # that cut the rows of a batch
# Weights that all tokens use are cut over all of them; expert weights not over `expert`, which
# says whose experts they are.
ALL_SHARDS = ("fsdp", "expert", "context")
EXPERT_SHARDS = ("fsdp", "context")


class MeshConfig(pydantic.BaseModel):
    """How many devices each mesh axis has; one of them may be -1, "what is left"."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    shard_mode: Literal["explicit"] = pydantic.Field(
        "explicit", description="how arrays are sharded; octablox knows only explicit meshes"
    )
    num_cpu_devices: int = pydantic.Field(
        0,
        ge=0,
        description="run on that many virtual CPU devices, those of all processes; "
        "0: the platform's own devices",
    )
    ici_data_parallelism: int = pydantic.Field(1, description="devices of axis data")
    ici_fsdp_parallelism: int = pydantic.Field(-1, description="devices of axis fsdp; -1: the rest")
    ici_expert_parallelism: int = pydantic.Field(1, description="devices of axis expert")
    ici_context_parallelism: int = pydantic.Field(
        1, description="devices of axis context, which share a sequence"
    )
    dcn_data_parallelism: int = pydantic.Field(-1, description="slices of axis data; -1: the rest")
    dcn_fsdp_parallelism: int = pydantic.Field(1, description="slices of axis fsdp")
    dcn_expert_parallelism: int = pydantic.Field(1, description="slices of axis expert")
    dcn_context_parallelism: int = pydantic.Field(1, description="slices of axis context")


def make_mesh(
    shape: Mapping[str, int],
    devices: Sequence[jax.Device] | None = None,
    slices: Mapping[str, int] | None = None,
) -> Mesh:
    """An explicit-sharding mesh with the axes `AXES`.

    Args:
      shape: devices of each axis; one that is not named has one.
      devices: the platform's if None.
      slices: of each axis, how many slices it spans; None: one slice has all devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = tuple(shape.get(axis, 1) for axis in AXES)
    grid = _grid(sizes, devices[: math.prod(sizes)], slices)
    return Mesh(grid, AXES, axis_types=(AxisType.Explicit,) * len(AXES))


def _grid(sizes, devices, slices):
    """The devices in an order that suits their network: neighbours along the fast axes."""
    if devices[0].platform != "tpu":
        return np.array(devices).reshape(sizes)
    from jax.experimental import mesh_utils

    between = tuple((slices or {}).get(axis, 1) for axis in AXES)
    settings = {"devices": devices, "allow_split_physical_axes": True}
    if math.prod(between) == 1:
        return mesh_utils.create_device_mesh(sizes, **settings)
    within = tuple(size // count for size, count in zip(sizes, between, strict=True))
    return mesh_utils.create_hybrid_device_mesh(within, between, **settings)


def slice_count(devices: Sequence[jax.Device]) -> int:
    """TPU slices that the devices belong to; other platforms have none, which counts as one."""
    if devices[0].platform != "tpu":
        return 1
    return len({getattr(device, "slice_index", 0) for device in devices})


def batch_partition(leading: int = 0) -> PartitionSpec:
    """How a batch [B, S] lies on the mesh, after `leading` uncut dims."""
    return PartitionSpec(*(None,) * leading, ROW_AXES, "context")


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """One weight, declared.

    Attributes:
      shape: of the whole weight.
      partition: per dim, the mesh axes that cut it (a name, several, or None).
      gather_dim: the dim whose shards are gathered before use; None if none is.
      init: `normal` with standard deviation 1/sqrt(fan_in), `ones` or `zeros`.
      fan_in: see `init`.
    """

    shape: tuple[int, ...]
    partition: tuple[str | tuple[str, ...] | None, ...]
    gather_dim: int | None = None
    init: Literal["normal", "ones", "zeros"] = "normal"
    fan_in: int = 1

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def partition_spec(self) -> PartitionSpec:
        """`partition` as JAX's type."""
        return PartitionSpec(*self.partition)

    def stacked(self, layers: int) -> "ParamSpec":
        """The weights of `layers` layers as one, layers first; `gather_dim` is still a layer's."""
        return dataclasses.replace(
            self, shape=(layers, *self.shape), partition=(None, *self.partition)
        )


def weight(*shape: int, gather_dim: int = 0) -> ParamSpec:
    """A weight that all tokens use: cut along `gather_dim`; its first dim is contracted."""
    partition = tuple(ALL_SHARDS if dim == gather_dim else None for dim in range(len(shape)))
    return ParamSpec(shape, partition, gather_dim, fan_in=shape[0])


def norm_weight(size: int) -> ParamSpec:
    """A scale of RMSNorm: ones, too small to be cut."""
    return ParamSpec((size,), (None,), init="ones")


def is_spec(node: Any) -> bool:
    """Whether a node of a tree of specs is a leaf."""
    return isinstance(node, ParamSpec)


def map_specs(fn, specs, *trees):
    """`jax.tree.map` over a tree of specs."""
    return jax.tree.map(fn, specs, *trees, is_leaf=is_spec)


def count(specs) -> int:
    """Number of parameters of a tree of specs."""
    return sum(spec.size for spec in jax.tree.leaves(specs, is_leaf=is_spec))


def shardings(specs, mesh: Mesh):
    """The tree of `NamedSharding` of a tree of specs."""
    return map_specs(lambda spec: NamedSharding(mesh, spec.partition_spec), specs)


def check_divisible(specs, mesh: Mesh) -> None:
    """Raises UserError with the first parameter that the mesh does not cut evenly."""
    for path, spec in jax.tree_util.tree_leaves_with_path(specs, is_leaf=is_spec):
        for size, names in zip(spec.shape, spec.partition, strict=True):
            axes = (names,) if isinstance(names, str) else names or ()
            shards = math.prod(mesh.shape[axis] for axis in axes)
            if size % shards:
                name = jax.tree_util.keystr(path, simple=True, separator=".")
                raise UserError(
                    f"mesh: {name} has a dim of {size}, which "
                    f"{'×'.join(axis for axis in axes if mesh.shape[axis] > 1)} = {shards} devices "
                    f"do not divide; choose a mesh or a size that fits"
                )


def init_params(specs, seed: int, mesh: Mesh, dtype: jax.typing.DTypeLike):
    """Initial values on the mesh; the same for every mesh."""
    leaves, tree = jax.tree.flatten(specs, is_leaf=is_spec)

    def init():
        return tuple(_init_shard(spec, seed, n, dtype) for n, spec in enumerate(leaves))

    out_specs = tuple(spec.partition_spec for spec in leaves)
    init = jax.shard_map(init, mesh=mesh, in_specs=(), out_specs=out_specs, check_vma=True)
    return jax.tree.unflatten(tree, jax.jit(init)())


def _init_shard(spec, seed, number, dtype):
    """This device's part of parameter `number`, inside `shard_map`.

    Normal values come from a hash of the element's place instead of from `jax.random`, whose
    graph costs a third of a second of compilation for each parameter: the heads of 64 coins,
    plus a uniform fraction of a coin. That is integer arithmetic until the last product, so that
    how a compiler vectorizes a shard cannot change a bit, as it can in an inverse of the normal.
    """
    cuts = [(names,) if isinstance(names, str) else names or () for names in spec.partition]
    shape = [size // lax.axis_size(names) for size, names in zip(spec.shape, cuts, strict=True)]
    state = jnp.full(shape, _hash(jnp.uint32((seed * 65537 + number) % 2**32)))
    for dim, (size, names) in enumerate(zip(shape, cuts, strict=True)):
        place = lax.broadcasted_iota(jnp.uint32, shape, dim)
        first = lax.axis_index(names) * size if names else 0
        state = _hash(state ^ (place + jnp.uint32(first)))
    if spec.init != "normal":
        return jnp.full_like(state, 1 if spec.init == "ones" else 0, dtype)
    a, b, c = (_hash(state + jnp.uint32(n * 0x9E3779B9 % 2**32)) for n in (1, 2, 3))
    heads = lax.population_count(a) + lax.population_count(b)
    total = (heads.astype(jnp.int32) - 32) * 2**23 + (c >> 9).astype(jnp.int32) - 2**22
    deviation = math.sqrt(64 / 4 + 1 / 12) * 2**23
    scale = jnp.float32(1 / (deviation * math.sqrt(spec.fan_in)))
    return (total.astype(jnp.float32) * scale).astype(dtype)


def _hash(x):
    """A bijection of uint32 whose bits all depend on all bits (Wellons, "lowbias32")."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def gather(specs, shards, dtype: jax.typing.DTypeLike):
    """Whole weights in `dtype` from one layer's shards, inside `shard_map`; linear.

    Weights that are not cut (norms, biases) keep their dtype. The transpose sums each weight's
    gradient over the devices and scatters it to the shards.
    """
    return gather_over_first(specs, gather_over_others(specs, shards, dtype))


def gather_over_others(specs, shards, dtype: jax.typing.DTypeLike):
    """The small part of `gather`: the cast, and over all axes that cut a weight but the first."""

    def one(spec, shard):
        if spec.gather_dim is None:  # small, and used in float32
            return vary(shard)
        # Axis by axis, the last first. XLA:TPU turns one gather over all axes into an all-reduce of
        # twice the bytes where the shards do not fill its tiles, as 1/256 of 7168 rows does not.
        shard = vary(shard.astype(dtype))
        for axis in reversed(_axes_of(spec)[1:]):
            shard = lax.all_gather(shard, axis, axis=spec.gather_dim, tiled=True)
        return shard

    return map_specs(one, specs, shards)


def gather_over_first(specs, parts):
    """The rest of `gather`, nearly all of its bytes: over the first axis that cuts a weight."""

    def one(spec, part):
        if spec.gather_dim is None:
            return part
        return lax.all_gather(part, _axes_of(spec)[0], axis=spec.gather_dim, tiled=True)

    return map_specs(one, specs, parts)


def _axes_of(spec):
    names = spec.partition[spec.gather_dim - len(spec.shape)]
    return (names,) if isinstance(names, str) else names


def vary_uncut(specs, shards):
    """`shards` (of a stack of layers) with the weights that are not cut varying over the mesh.

    Done before the layers, so that these weights' gradients are summed over the devices once for
    all layers instead of in each.
    """
    return map_specs(lambda spec, w: vary(w) if spec.gather_dim is None else w, specs, shards)


def sequence_axis() -> str | None:
    """The mesh axis that cuts sequences, inside `shard_map`; None where they are whole."""
    return "context" if lax.axis_size("context") > 1 else None


def vary(x: jax.Array) -> jax.Array:
    """`x` typed as varying over every mesh axis; its transpose sums over the axes added."""
    missing = tuple(axis for axis in AXES if axis not in jax.typeof(x).mat.varying)
    return lax.pcast(x, missing, to="varying") if missing else x
