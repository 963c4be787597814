"""Every check that concerns more than one setting, before anything compiles.

`check` needs the config alone, `check_devices` also how many devices there are. Each raises a
UserError of one line: what was expected, what was got, what to do.
"""

import difflib
import itertools
import math
import pathlib
from collections.abc import Sequence

from octablox.errors import UserError
from octablox.fp8 import RECIPES, recipe_from_config
from octablox.health import OPERANDS
from octablox.kernels.tiles import PRODUCTS, Limits, parse_limits
from octablox.mesh import ALL_SHARDS, AXES, EXPERT_SHARDS
from octablox.model import skip, transformer
from octablox.settings import Config, dump


def check(config: Config) -> None:
    """Raises a UserError where settings contradict one another on any number of devices."""
    _check_routing(config)
    _check_model(config)
    _check_schedule(config)
    _check_data(config)
    _check_run(config)
    _check_quantization(config)
    tile_limits(config)


def tile_limits(config: Config) -> dict[str, Limits]:
    """What `gmm_tiles`, `dlhs_tiles` and `tgmm_tiles` say, by product, where they are given."""
    given = {product: getattr(config.moe, f"{product}_tiles") for product in PRODUCTS}
    return {
        product: parse_limits(f"{product}_tiles", text) for product, text in given.items() if text
    }


def check_devices(config: Config, device_count: int, slices: int = 1) -> None:
    """Raises a UserError where the mesh or the batch does not fit that many devices."""
    axes = resolve_mesh_shape(config, device_count, slices)
    model, moe = config.model, config.moe
    shards, written = _shards(axes, ALL_SHARDS)
    _require(
        model.base_emb_dim % shards == 0,
        f"base_emb_dim (D) must be a multiple of {written} = {shards}, which shard it; "
        f"got {model.base_emb_dim}",
    )
    _require(
        config.run.max_target_length % axes["context"] == 0,
        f"max_target_length must be a multiple of the context axis, {axes['context']}, which "
        f"shards sequences; got {config.run.max_target_length}",
    )
    if model.base_num_decoder_layers > model.first_num_dense_layers:
        key = "num_experts" if moe.expert_sharding == "expert" else "base_moe_mlp_dim"
        dim = getattr(moe, key)
        _require(
            dim % axes["expert"] == 0,
            f"{key} must be a multiple of the expert axis, {axes['expert']}, which shards it "
            f"(expert_sharding={moe.expert_sharding}); got {dim}",
        )
    if moe.shard_exp_on_fsdp:
        by_expert = moe.expert_sharding == "expert"
        holders, _ = _shards(axes, ALL_SHARDS if by_expert else EXPERT_SHARDS)
        _require(
            moe.num_experts % holders == 0,
            f"num_experts must be a multiple of the {holders} devices that hold different ones "
            f"with shard_exp_on_fsdp=true, got {moe.num_experts}; write shard_exp_on_fsdp=false",
        )
    _require(
        moe.gmm_backend != "ragged_dot" or moe.expert_sharding == "width" or axes["expert"] == 1,
        f"gmm_backend=ragged_dot needs all experts on each device, got an expert axis of "
        f"{axes['expert']}; write gmm_backend=auto or expert_sharding=width",
    )
    _require(
        moe.use_ring_of_experts or moe.expert_sharding == "expert" or axes["expert"] == 1,
        "use_ring_of_experts=false sends tokens to the devices that hold their experts, but with "
        "expert_sharding=width all devices do; write use_ring_of_experts=true",
    )
    _check_blocks(config, axes["expert"])
    _check_batch(config, axes)


def _shards(axes: dict[str, int], names: Sequence[str]) -> tuple[int, str]:
    """How many shards these axes make, and of what, in words."""
    names = [name for name in names if name != "context" or axes[name] > 1]
    sizes = [axes[name] for name in names]
    return math.prod(sizes), f"{' x '.join(names)} = {' x '.join(map(str, sizes))}"


def resolve_mesh_shape(config: Config, device_count: int, slices: int = 1) -> dict[str, int]:
    """Devices of each of `mesh.AXES`, with -1 filled in."""
    between = resolve_slices(config, slices)
    within = _axes(config, "ici")
    fixed, free, written = _parts("ici", within)
    in_a_slice = device_count // slices
    devices = f"{in_a_slice} devices" + (" of a slice" if slices > 1 else "")
    if free:
        _require(
            in_a_slice % fixed == 0,
            f"{written} = {fixed} does not divide {devices}; "
            f"choose sizes that do, or {_count_hint(config)}",
        )
        within[free] = in_a_slice // fixed
    _require(
        free != "" or fixed == in_a_slice,
        f"the mesh {written} = {fixed} must have as many places as devices, {in_a_slice}; "
        f"let one axis be -1",
    )
    return {axis: size * between[axis] for axis, size in within.items()}


def resolve_slices(config: Config, slices: int = 1) -> dict[str, int]:
    """Slices that each of `mesh.AXES` spans."""
    between = _axes(config, "dcn")
    fixed, free, written = _parts("dcn", between)
    several = f"{slices} slices" if slices > 1 else "one slice (CPUs and GPUs have no more)"
    _require(
        slices % fixed == 0 if free else slices == fixed,
        f"the slices {written} = {fixed} must {'divide' if free else 'be'} those that there are, "
        f"{several}; change dcn_data_parallelism, dcn_fsdp_parallelism or dcn_expert_parallelism",
    )
    return between | ({free: slices // fixed} if free else {})


def _axes(config: Config, network: str) -> dict[str, int]:
    """The sizes set for each axis, within a slice ("ici") or between slices ("dcn")."""
    return {axis: getattr(config.mesh, f"{network}_{axis}_parallelism") for axis in AXES}


def _parts(network: str, axes: dict[str, int]) -> tuple[int, str, str]:
    """The product of the sizes that are set, the axis that is -1 or "", and the sizes in words."""
    for axis, size in axes.items():
        _require(
            size == -1 or size >= 1,
            f"{network}_{axis}_parallelism: expected -1 or at least 1, got {size}",
        )
    free = [axis for axis, size in axes.items() if size == -1]
    _require(
        len(free) <= 1,
        "at most one mesh axis can be -1 (what is left), got -1 for " + " and ".join(free),
    )
    fixed = math.prod(size for size in axes.values() if size != -1)
    written = " x ".join(
        f"{axis} {size}"
        for axis, size in axes.items()
        if size != -1 and (axis != "context" or size > 1)
    )
    return fixed, "".join(free), written


def _count_hint(config: Config) -> str:
    """Where the number of devices comes from, and so what else can be changed."""
    topology = config.target.compile_topology
    return (
        f"another compile_topology than {topology}"
        if topology
        else "num_cpu_devices for virtual ones"
    )


def global_batch_size(config: Config, device_count: int) -> int:
    """Sequences of one optimizer step: devices x rows of a device x accumulation steps."""
    rows = round(config.run.per_device_batch_size * device_count)
    return rows * config.optimizer.gradient_accumulation_steps


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)


def _check_routing(config: Config) -> None:
    moe = config.moe
    experts, chosen = moe.num_experts, moe.num_experts_per_tok
    groups, top_groups = moe.n_routing_groups, moe.topk_routing_group
    _require(
        chosen <= experts,
        f"num_experts_per_tok must be at most num_experts = {experts}, got {chosen}",
    )
    _require(
        experts % groups == 0,
        f"n_routing_groups must divide num_experts = {experts}, got {groups}",
    )
    _require(
        top_groups <= groups,
        f"topk_routing_group must be at most n_routing_groups = {groups}, got {top_groups}",
    )
    reachable = experts // groups * top_groups
    _require(
        chosen <= reachable,
        f"num_experts_per_tok must be at most {reachable}, the experts in {top_groups} of "
        f"{groups} groups; got {chosen}",
    )
    _require(
        groups == 1 or experts // groups >= 2,
        f"a routing group's score is the sum of its two best experts, so n_routing_groups must be "
        f"at most {max(experts // 2, 1)}; got {groups}",
    )
    _require(
        moe.routed_score_func == "sigmoid" or not moe.routed_bias,
        f"routed_score_func={moe.routed_score_func} has no bias on the choice; write "
        "routed_bias=false",
    )


def _check_model(config: Config) -> None:
    model = config.model
    _require(
        model.first_num_dense_layers <= model.base_num_decoder_layers,
        f"first_num_dense_layers must be at most base_num_decoder_layers = "
        f"{model.base_num_decoder_layers}, got {model.first_num_dense_layers}",
    )
    _require(
        model.qk_rope_head_dim % 2 == 0,
        f"qk_rope_head_dim must be even (RoPE rotates pairs), got {model.qk_rope_head_dim}",
    )


def _check_schedule(config: Config) -> None:
    schedule = config.schedule
    _require(
        not schedule.use_batch_split_schedule or schedule.micro_batches >= 2,
        "batch_split_factor must be 2 or more with use_batch_split_schedule=true, got 1; "
        "leave it out for 2, or write use_batch_split_schedule=false",
    )


def _check_data(config: Config) -> None:
    data = config.data
    from_files = data.dataset_type in ("text", "jsonl")
    _require(
        not from_files or bool(data.dataset_path),
        f"dataset_type={data.dataset_type} needs dataset_path=FILE, FOLDER or GLOB",
    )
    _require(
        from_files or not data.dataset_path,
        f"dataset_path is read with dataset_type=text or jsonl only, got "
        f"dataset_type={data.dataset_type}",
    )
    default_key = type(data).model_fields["jsonl_text_key"].default
    _require(
        data.dataset_type == "jsonl" or data.jsonl_text_key == default_key,
        f"jsonl_text_key is read with dataset_type=jsonl only, got "
        f"dataset_type={data.dataset_type}",
    )


def _check_run(config: Config) -> None:
    run, schedule_steps = config.run, config.optimizer.learning_rate_schedule_steps
    _require(run.eval_interval != 0, "eval_interval: expected -1 or at least 1, got 0")
    _require(
        schedule_steps == -1 or schedule_steps >= 1,
        f"learning_rate_schedule_steps: expected -1 or at least 1, got {schedule_steps}",
    )
    _require(
        run.run_name in ("", pathlib.PurePath(run.run_name).name) and run.run_name != "..",
        f"run_name must be the name of one folder, got {run.run_name!r}; "
        f"base_output_directory says where it is",
    )
    _require(bool(run.base_output_directory), "base_output_directory: expected a folder, got ''")
    slices = config.target.compile_topology_num_slices
    _require(
        slices == -1 or slices >= 1,
        f"compile_topology_num_slices: expected -1 or at least 1, got {slices}",
    )


def _check_quantization(config: Config) -> None:
    settings = config.quantization
    name = settings.quantization
    close = difflib.get_close_matches(name.lower(), RECIPES, n=1, cutoff=0.4)
    _require(
        not name or name in RECIPES or name.endswith((".yml", ".yaml")),
        f"quantization: expected nothing (bf16), one of {', '.join(RECIPES)}, or a recipe in "
        f"YAML, got {name!r}" + (f"; did you mean {close[0]}?" if close else ""),
    )
    recipe = recipe_from_config(settings)
    given = [key for key in ("quantization_skip", "quantization_warmup_steps") if dump(config)[key]]
    _require(
        not given or recipe != recipe.model_copy(update=dict.fromkeys(OPERANDS)),
        f"{''.join(given[:1])}: the recipe {recipe.name} casts nothing; leave it out, or write "
        "quantization=fp8_full",
    )
    names = itertools.chain(*transformer.moe_layer_names(config.model).values())
    skip.require_matches(skip.parse(settings.quantization_skip), names)


def _check_blocks(config: Config, expert_shards: int) -> None:
    """A block of a weight must not straddle shards of F: they would need a common scale."""
    recipe, moe = recipe_from_config(config.quantization), config.moe
    if moe.expert_sharding == "expert" or expert_shards == 1 or recipe.weight is None:
        return
    for block in recipe.weight.tile:
        _require(
            block is None or moe.base_moe_mlp_dim // expert_shards % block == 0,
            f"base_moe_mlp_dim must be a multiple of expert axis x weight block = {expert_shards} "
            f"x {block} with expert_sharding=width and {recipe.name}, got {moe.base_moe_mlp_dim}; "
            f"write expert_sharding=expert, or choose a recipe without blocks",
        )


def _check_batch(config: Config, axes: dict[str, int]) -> None:
    given, factor = config.run.per_device_batch_size, config.schedule.micro_batches
    sharing, count = axes["context"], math.prod(axes.values())
    rows = given * sharing  # parts of sequences that a device has
    key = "per_device_batch_size" + (f" x context = {given:g} x {sharing}" if sharing > 1 else "")
    _require(
        float(rows).is_integer(),
        f"{key} must be whole: {given:g} x {count} devices = {given * count:g} sequences do not "
        f"divide evenly over the devices",
    )
    _require(
        int(rows) % factor == 0,
        f"{key} must be a multiple of batch_split_factor = {factor}, got {rows:g}; "
        f"write per_device_batch_size={-(-int(rows) // factor) * factor / sharing:g}",
    )
