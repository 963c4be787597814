"""Parts of a program that XLA compiles as computations of their own."""

import jax
import numpy as np
import pytest
import test_schedule
import tiny_model
from jax import lax
from jax import numpy as jnp

from octablox import computation
from octablox.computation import as_computation
from octablox.mesh import AXES


def changes_one(tree):
    return {"changed": tree["changed"] + 1, "other": tree["other"], "ones": 1.0}


def conditionals(jaxpr):
    return [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "cond"]


def test_what_is_unchanged_passes_by():
    tree = {"changed": jnp.arange(3.0), "other": jnp.arange(5.0)}
    jaxpr = jax.make_jaxpr(lambda tree, n: as_computation(changes_one, tree, n))(tree, 0)
    (cond,) = conditionals(jaxpr.jaxpr)
    assert sorted(var.aval.shape for var in cond.outvars) == [(), (3,)]
    changed, _, other = jaxpr.jaxpr.outvars
    assert changed in cond.outvars and other is jaxpr.jaxpr.invars[1]


def test_the_same_numbers():
    given = {"changed": jnp.arange(3.0), "other": jnp.arange(5.0)}

    def step(tree, n):
        held = n * 2.0  # a value of the outer program, used and returned
        of = lambda tree: (changes_one(tree), held, tree["changed"] * held)  # noqa: E731
        return as_computation(of, tree, n)[0], as_computation(of, tree, n)[1:]

    tree, seen = jax.jit(lambda tree: lax.scan(step, tree, jnp.arange(3)))(given | {"ones": 1.0})
    np.testing.assert_array_equal(tree["changed"], [3, 4, 5])
    np.testing.assert_array_equal(tree["other"], given["other"])
    np.testing.assert_array_equal(seen[0], [0, 2, 4])
    np.testing.assert_array_equal(seen[1][1], [2, 4, 6])


def test_xla_cannot_know_which_branch_is_taken():
    def body(x, n):
        return as_computation(lambda x: jnp.tanh(x @ x), x, n), None

    run = jax.jit(lambda x: lax.scan(body, x, jnp.arange(4))[0])
    assert "conditional(" in run.lower(jnp.eye(4)).compile().as_text()


def test_inside_shard_map_types_stay():
    """What varies over a mesh axis, and what does not, with a collective inside."""
    mesh = tiny_model.mesh(1, 4, 2)

    def shard(x):
        n = lax.axis_index("fsdp") * 0
        of = lambda x: (lax.psum(x, AXES), x * 2)  # noqa: E731
        return as_computation(of, x, n)

    specs = jax.P(), jax.P(AXES)
    run = jax.shard_map(shard, mesh=mesh, in_specs=jax.P(AXES), out_specs=specs)
    x = jax.device_put(jnp.arange(8.0), jax.NamedSharding(mesh, jax.P(AXES)))
    total, doubled = jax.jit(run)(x)
    np.testing.assert_array_equal(total, [28])
    np.testing.assert_array_equal(doubled, 2 * np.arange(8))


@pytest.mark.parametrize("save", ["full", "minimal"])
def test_a_schedule_of_computations_gives_the_same_bits(save, monkeypatch):
    monkeypatch.setattr(computation, "chip", lambda: "tpu7x")
    save = test_schedule.SAVES[save]
    weights, xs, _ = test_schedule.data()
    run = jax.jit(jax.value_and_grad(test_schedule.scheduled("carried", save), argnums=(0, 1)))
    assert "stablehlo.case" in run.lower(weights, xs).as_text()
    expected = test_schedule.value_and_grads("sequential", save)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(run(weights, xs)), expected)
