"""The TPU backend on any machine, in JAX's TPU interpreter: right and very slow, for tests.

It simulates DMAs and semaphores, reports data races, and fills unwritten memory with NaN.
"""

import functools

import jax

# Where the interpreter asks which chip to be, if the mesh does not say; no public name has it.
from jax._src.pallas.mosaic.tpu_info import registry
from jax.experimental.pallas import tpu as pltpu

from octablox.kernels import pallas_tpu

name = "pallas_tpu_interpret"

PARAMS = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")


def _simulated(product):
    @functools.wraps(product)
    def run(*operands, **settings):
        device = jax.devices()[0]
        if device.platform != "tpu":
            registry.setdefault(device.device_kind, _tpu7x)
        return product(*operands, interpret=PARAMS, **settings)

    return run


def _tpu7x():
    return pltpu.get_tpu_info_for_chip(pltpu.ChipVersion.TPU_7X, 1)


gmm = _simulated(pallas_tpu.gmm)
gated_gmm = _simulated(pallas_tpu.gated_gmm)
gated_gmm_grad = _simulated(pallas_tpu.gated_gmm_grad)
tgmm = _simulated(pallas_tpu.tgmm)
