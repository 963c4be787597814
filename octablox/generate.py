"""`octablox generate`: text from a converted checkpoint or a run, one token after the other."""

import dataclasses
import functools
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from octablox import config as configs
from octablox import fp8, fp8_blocks, mesh
from octablox.config import Config
from octablox.errors import UserError
from octablox.fp8 import QArray
from octablox.model import decoding, transformer
from octablox.train.pretrained import load_params, open_parameters
from octablox.train.step import settings_of
from octablox.train.tokenizer import Tokenizer, read_tokenizer
from octablox.weights.folder import Parameters


@dataclasses.dataclass(frozen=True)
class Options:
    """What `octablox generate` was asked for.

    Attributes:
      source: a folder that `octablox convert` wrote, or a run's.
      prompt: the text that goes on.
      tokens: at most so many new ones.
      temperature: of sampling; 0 takes the likeliest token.
      top_p: samples among the likeliest tokens that have this much probability together.
      seed: of sampling.
    """

    source: str = ""
    prompt: str = ""
    tokens: int = 128
    temperature: float = 0.8
    top_p: float = 0.95
    seed: int = 0


# Option -> what follows it, what it does.
FLAGS = {
    "from": ("DIR", "a folder that octablox convert wrote, or a run's folder"),
    "prompt": ("TEXT", "what goes on; empty: a document's beginning"),
    "tokens": ("N", "most new tokens"),
    "temperature": ("T", "of sampling; 0 takes the likeliest token"),
    "top-p": ("P", "sample among the likeliest tokens with this much probability together"),
    "seed": ("N", "of sampling"),
}


def run(args: Sequence[str]) -> int:
    """Prints the prompt and what follows, token by token; returns the exit code.

    Raises:
      UserError: an option, a key, or parameters that do not fit.
    """
    options, keys = parse(args)
    config = configs.load([f"load_parameters_path={options.source}", *keys]).config
    tokenizer = read_tokenizer(config.data.tokenizer_path)
    if tokenizer.vocab_size > config.model.vocab_size:
        raise UserError(
            f"the model has {config.model.vocab_size} tokens, fewer than {tokenizer.name}; "
            "give its own with tokenizer_path=FOLDER"
        )
    prompt = [tokenizer.bos, *tokenizer.encode([options.prompt.encode()])[0].tolist()]
    generator = Generator(config, Path(options.source))
    print(options.prompt, end="", flush=True)
    began, count = time.monotonic(), 0
    ids = generator.tokens(prompt, options.tokens, functools.partial(sample, options=options))
    for text in _as_text(tokenizer, ids):
        print(text, end="", flush=True)
        count += 1
    seconds = time.monotonic() - began
    print(flush=True)
    print(f"{count} tokens in {seconds:.1f} s, compiling included", file=sys.stderr)
    return 0


def parse(args: Sequence[str]) -> tuple[Options, list[str]]:
    """The options, and the key=value arguments."""
    values: dict[str, Any] = {}
    keys, rest = [], list(args)
    while rest:
        arg = rest.pop(0)
        name, equals, value = arg.removeprefix("--").partition("=")
        if not arg.startswith("--"):
            keys.append(arg)
            continue
        if name not in FLAGS:
            known = ", ".join(f"--{flag}" for flag in FLAGS)
            raise UserError(f"expected {known} or key=value, got {arg!r}")
        if not equals:
            if not rest:
                raise UserError(f"--{name}: expected {FLAGS[name][0]} after it, got nothing")
            value = rest.pop(0)
        values["source" if name == "from" else name.replace("-", "_")] = value
    return _typed(values), keys


def _typed(values: dict[str, Any]) -> Options:
    kinds = {"tokens": int, "seed": int, "temperature": float, "top_p": float}
    for name, kind in kinds.items():
        if name in values:
            try:
                values |= {name: kind(values[name])}
            except ValueError:
                expected = "a whole number" if kind is int else "a number"
                raise UserError(
                    f"--{name.replace('_', '-')}: expected {expected}, got {values[name]!r}"
                ) from None
    options = Options(**values)
    if not options.source:
        raise UserError("expected --from DIR, what octablox convert wrote or a run's folder")
    for name, allowed in {
        "tokens": options.tokens >= 1,
        "temperature": options.temperature >= 0,
        "top-p": 0 < options.top_p <= 1,
        "seed": options.seed >= 0,
    }.items():
        if not allowed:
            got = getattr(options, name.replace("-", "_"))
            bound = {"tokens": "1 or more", "top-p": "above 0 and at most 1"}.get(name, "0 or more")
            raise UserError(f"--{name}: expected {bound}, got {got}")
    return options


def sample(logits: np.ndarray, step: int, options: Options) -> int:
    """A token of float32 [V] logits."""
    if options.temperature == 0:
        return int(np.argmax(logits))
    scaled = logits.astype(np.float64) / options.temperature
    order = np.argsort(-scaled)
    probabilities = np.exp(scaled[order] - scaled[order[0]])
    probabilities /= probabilities.sum()
    # The fewest whose sum reaches top_p: those before which it is not reached.
    kept = np.cumsum(probabilities) - probabilities < options.top_p
    probabilities = np.where(kept, probabilities, 0)
    random = np.random.default_rng((options.seed, step))
    return int(order[random.choice(len(order), p=probabilities / probabilities.sum())])


class Generator:
    """A model on one device, and its compiled step.

    Raises:
      UserError: parameters that are not there.
    """

    def __init__(self, config: Config, folder: Path):
        # Where a run leaves casts out, here they are made: one program serves all layers.
        settings = dataclasses.replace(settings_of(config), skip=())
        # One sequence on one device: no rows travel.
        moe = settings.moe.model_copy(update={"ragged_buffer_factor": -1.0, "fp8_dispatch": False})
        self._settings = dataclasses.replace(settings, moe=moe)
        self._mesh = mesh.make_mesh(dict.fromkeys(mesh.AXES, 1), jax.devices()[:1])
        self._placed = NamedSharding(self._mesh, PartitionSpec(mesh.AXES))
        self._weights = self._load(config, folder)
        step = functools.partial(decoding.forward, settings=self._settings)
        self._step = self._compiled(step, donate=(1,))

    def tokens(
        self, prompt: Sequence[int], count: int, choose: Callable[[np.ndarray, int], int]
    ) -> Iterator[int]:
        """The `count` tokens after the prompt, each `choose(logits float32 [V], its number)`."""
        caches = decoding.new_cache(self._settings, 1, len(prompt) + count)
        caches = jax.device_put(caches, self._placed)
        new, first = list(prompt), 0
        for n in range(count):
            with jax.set_mesh(self._mesh):
                tokens = jnp.asarray([new], jnp.int32)
                logits, caches = self._step(self._weights, caches, tokens, jnp.int32(first))
            first += len(new)
            new = [choose(np.asarray(logits[0]), n)]
            yield new[0]

    def _load(self, config: Config, folder: Path) -> dict:
        """The weights as the stages read them; experts in FP8 blocks stay what they are."""
        parameters = open_parameters(folder)
        specs = transformer.parameter_specs(config.model, config.moe)
        specs.pop("mtp", None)
        experts = None
        if "moe_layers" in specs and _has_blocks_of(self._settings.recipe, parameters):
            layers = config.model.base_num_decoder_layers - config.model.first_num_dense_layers
            experts = blockwise_experts(parameters, layers, self._settings.dtype)
            experts = jax.device_put(experts, self._placed)
            del specs["moe_layers"]["experts"]
        dtype = np.dtype(config.model.weight_dtype)
        params = load_params(specs, self._mesh, dtype, folder)
        prepare = functools.partial(decoding.prepare, settings=self._settings)
        with jax.set_mesh(self._mesh):
            return self._compiled(prepare)(params, experts)

    def _compiled(self, fn: Callable, donate: tuple[int, ...] = ()) -> Callable:
        """`fn` of arrays on the mesh's one device, inside a `shard_map` over its axes."""
        inside = jax.shard_map(
            fn, mesh=self._mesh, out_specs=PartitionSpec(mesh.AXES), check_vma=True
        )
        return jax.jit(inside, donate_argnums=donate)


def blockwise_experts(parameters: Parameters, layers: int, dtype: Any) -> dict[str, Any]:
    """Expert weights in FP8 blocks as operands of the recipe `fp8_blockwise`, not rounded again.

    Args:
      parameters: that hold them in FP8 blocks.
      layers: L.
      dtype: what the operands stand for.

    Returns:
      `gate_up` [L, E, D, 2F] and `down` [L, E, F, D], without masters.
    """
    found = {}
    for name in ("gate_up", "down"):
        each = []
        for n in range(layers):
            layer = f"moe_layers.{n}.experts.{name}"
            value, scale = parameters.array(layer), parameters.scale(layer)
            if scale is None:
                raise UserError(f"expected {layer} in FP8 blocks as the first one is; convert anew")
            each.append(_operand(value, scale))
        q = jax.tree.map(lambda *leaves: jnp.asarray(np.stack(leaves)), *each)
        experts, outer, *parts, inner = value.shape
        shape = experts, outer, math.prod(parts) * inner
        found[name] = fp8.without_masters(fp8.new_quantized(q, shape, dtype))
        parameters.release()
    return found


def _operand(value: np.ndarray, scale: np.ndarray) -> QArray:
    """[E, K, N] or [E, K, parts, N] and the scales of its blocks, as `fp8.quantize_weight` gives.

    Its dims are padded to whole tiles. Where tiles are narrower than blocks, so that none holds
    columns of two parts, several have the scale of one block.
    """
    e, k, *more, n = value.shape
    parts = math.prod(more)
    value = value.reshape(e, k, parts * n)
    tile = fp8.tiles(fp8.SQUARE_BLOCKS, value.shape, 1, parts)
    block_of_tile = np.arange(-(-n // tile[2])) * tile[2] // fp8_blocks.BLOCK
    of_tiles = scale.reshape(e, scale.shape[1], parts, -1)[..., block_of_tile]
    of_tiles = of_tiles.reshape(e, scale.shape[1], -1).astype(np.float32)
    pad = [(0, -size % t) for size, t in zip(value.shape, tile, strict=True)]
    # As integers: NumPy pads no 8-bit floats.
    padded = np.pad(value.view(np.uint8), pad).view(value.dtype)
    return QArray(padded, of_tiles, None, fp8.SQUARE_BLOCKS.dtype)


def _has_blocks_of(recipe: fp8.Recipe, parameters: Parameters) -> bool:
    """Whether the experts are stored as the recipe casts weights."""
    cast, blocks = recipe.weight, fp8.SQUARE_BLOCKS
    fits = cast is not None and (cast.tile, cast.dtype) == (blocks.tile, blocks.dtype)
    return fits and parameters.scale("moe_layers.0.experts.down") is not None


def _as_text(tokenizer: Tokenizer, ids: Iterator[int]) -> Iterator[str]:
    """What each token adds to the text, "" while a character is not whole; ends at EOS."""
    seen: list[int] = []
    told = ""
    for token in ids:
        if token == tokenizer.eos or token == tokenizer.bos:
            return
        seen.append(token)
        text = tokenizer.decode(seen)
        new = text[len(told) :] if not text.endswith("\ufffd") else ""
        told += new
        yield new
