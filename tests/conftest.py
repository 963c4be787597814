"""Eight virtual CPU devices for every test, and a compilation cache that outlives a run."""

import os
import pathlib

_CACHE = pathlib.Path(__file__).parent.parent / "build" / "jax-cache"
_EIGHT = "--xla_force_host_platform_device_count=8"

# Before anything imports jax. The test processes that tests start inherit it.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_EIGHT}".strip()
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")
