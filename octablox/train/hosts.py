"""One run on several processes: how they find each other, and what they do together.

Every process computes the same steps on its own devices and reads its own rows of each batch.
Process 0 alone writes: config.yml, metrics, summary, pictures, and what is printed. Checkpoints
are written by all, each its shards. The processes see the same files.
"""

import contextlib
import glob
import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from octablox.errors import UserError
from octablox.training_config import HostsConfig

_LONGEST_TEXT = 1024


def start(config: HostsConfig, environment: Mapping[str, str] = os.environ) -> int:
    """Joins the run's other processes, if it has any; returns how many processes there are.

    Before anything that makes JAX look for devices. Keys win over JAX_COORDINATOR_ADDRESS,
    JAX_NUM_PROCESSES and JAX_PROCESS_ID, these over what a launcher says: Slurm, Open MPI,
    Kubernetes, Cloud TPU.

    Raises:
      UserError: settings that do not suffice or contradict; the other processes do not come.
    """
    if config.skip_jax_distributed_system:
        return 1
    given = _given(config, environment)
    if not given and not _launched(environment):
        return 1
    # SIGTERM is the training loop's (see interrupt.py), not JAX's.
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    detection = "deactivate" if len(given) == 3 else None
    timeout = config.jax_distributed_initialization_timeout
    try:
        jax.distributed.initialize(
            **given, cluster_detection_method=detection, initialization_timeout=timeout
        )
    except (ValueError, RuntimeError) as error:
        if not given and "should be defined" in str(error):
            return 1  # a TPU of one host, say
        reason = str(error).splitlines()[0]
        raise UserError(
            f"the processes of this run did not find each other within {timeout} s: {reason}; "
            f"check coordinator_address, num_processes and process_id of each"
        ) from error
    return jax.process_count() if given.get("num_processes") is None else given["num_processes"]


def _given(config: HostsConfig, environment: Mapping[str, str]) -> dict[str, Any]:
    """What keys and JAX's variables say of coordinator_address, num_processes, process_id."""
    unset = {"coordinator_address": "", "num_processes": 0, "process_id": -1}
    given: dict[str, Any] = {}
    for key, nothing in unset.items():
        value = getattr(config, key)
        text = environment.get(f"JAX_{key.upper()}", "")
        if value != nothing:
            given[key] = value
        elif text:
            given[key] = text if key == "coordinator_address" else _whole(key, text)
    if not given or (len(given) < 3 and _launched(environment)):
        return given
    missing = [key for key in unset if key not in given]
    if missing:
        variables = ", ".join(f"JAX_{key.upper()}" for key in missing)
        raise UserError(
            f"several processes need coordinator_address, num_processes and process_id; "
            f"{' and '.join(missing)} is missing, as a key or as {variables} in the environment"
        )
    if ":" not in given["coordinator_address"]:
        raise UserError(
            f"coordinator_address: expected HOST:PORT, got {given['coordinator_address']!r}"
        )
    if not 0 <= given["process_id"] < given["num_processes"]:
        raise UserError(
            f"process_id: expected 0 to num_processes - 1 = {given['num_processes'] - 1}, got "
            f"{given['process_id']}"
        )
    return given


def _whole(key: str, text: str) -> int:
    if not text.isdecimal():
        raise UserError(f"JAX_{key.upper()}: expected a whole number, got {text!r}")
    return int(text)


def _launched(environment: Mapping[str, str]) -> bool:
    """Whether something that JAX knows has started several processes, or may have.

    jax.distributed finds out the rest by itself.
    """
    several = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
    if any(environment.get(name, "1") not in ("", "0", "1") for name in several):
        return True
    # An indexed Job or a JobSet of Kubernetes; pods of one TPU slice know each other's names.
    if "KUBERNETES_SERVICE_HOST" in environment and "JOB_COMPLETION_INDEX" in environment:
        return True
    if "," in environment.get("TPU_WORKER_HOSTNAMES", "") or "MEGASCALE_NUM_SLICES" in environment:
        return True
    return _on_a_tpu(environment)


def _on_a_tpu(environment: Mapping[str, str]) -> bool:
    """Whether this machine has TPUs that JAX is to use: they may be a part of a larger slice."""
    if environment.get("JAX_PLATFORMS", "tpu").partition(",")[0] != "tpu":
        return False
    has_device = glob.glob("/dev/accel*") or glob.glob("/dev/vfio/*")
    return bool(has_device) and importlib.util.find_spec("libtpu") is not None


def is_main() -> bool:
    """Whether this is the process that writes and prints."""
    return jax.process_index() == 0


def on_main(function: Callable[[], Any]) -> Any:
    """Calls `function` on process 0 while the others wait; None on these.

    Raises:
      UserError: what `function` raised; on the others, that process 0 failed.
    """
    failure, result = None, None
    if is_main():
        try:
            result = function()
        except UserError as error:
            failure = error
    failed = largest(failure is not None)
    if failure is not None:
        raise failure
    if failed:
        raise UserError("process 0 has failed; its output says why")
    return result


@contextlib.contextmanager
def lost_peers() -> Iterator[None]:
    """What JAX raises when another process has gone, as an error that says what to do."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        text = str(error)
        if jax.process_count() == 1 or "RESOURCE_EXHAUSTED" in text:
            raise
        raise UserError(
            f"lost another process of this run ({text.splitlines()[0][:200]}); end all of them and "
            "start them again: the run goes on from its last checkpoint"
        ) from error


def largest(number: int) -> int:
    """The largest of the numbers that the processes give."""
    if jax.process_count() == 1:
        return int(number)
    from jax.experimental import multihost_utils

    return int(np.max(multihost_utils.process_allgather(np.int32(number))))


def mains(text: str) -> str:
    """The text that process 0 gives, on all processes."""
    if jax.process_count() == 1:
        return text
    from jax.experimental import multihost_utils

    padded = np.zeros(_LONGEST_TEXT, np.uint8)
    encoded = np.frombuffer(text.encode()[:_LONGEST_TEXT], np.uint8)
    padded[: len(encoded)] = encoded
    found = np.asarray(multihost_utils.broadcast_one_to_all(padded))
    return bytes(found.astype(np.uint8)).rstrip(b"\0").decode()
