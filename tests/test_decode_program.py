"""The fused step inside compiled programs: few calls, no copies, any loop, several states at once, no leak."""

from __future__ import annotations

import dataclasses
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode_helpers import FULL, SLIDING, make_model, one_layer, small, step
from op_helpers import same

from muse_jax.comm import Communicator
from muse_jax.decode import custom_calls, decode_step, next_rows, prefill, run_head, run_layers
from muse_jax.mesh import rank_sharding

CACHES = ("k_full", "v_full", "k_ring", "v_ring")
CALLS = {"muse_decode_layers_v1": 1}
STEPS = 12


@pytest.fixture(scope="module")
def model():
    return make_model(small(), 29)


@pytest.fixture(scope="module")
def other():
    """Another model, of other dimensions."""
    return make_model(
        one_layer(SLIDING, vocab_size=72, num_attention_heads=16, moe_hidden_size=256, sliding_window=20), 30
    )


def start(model, *prompt: int, capacity: int = 224):
    """A state after a prompt."""
    return prefill(model.weights, model.state(1, capacity), [list(prompt)])[1]


def one_by_one(model, state, tokens) -> np.ndarray:
    """Logits [n, V] of single steps, nothing donated."""
    out = []
    for token in tokens:
        output, state = step(model.weights, state, [token])
        out.append(np.asarray(output.logits)[0])
    return np.stack(out)


def greedy(model, state, token: int, count: int) -> list[int]:
    out = []
    for _ in range(count):
        output, state = step(model.weights, state, [token])
        out.append(token := int(output.token[0]))
    return out


# Loops over the step: (weights, state, first token) -> (state, last token) --------------------------------------------


def plain(weights, state, token):
    output, state = decode_step(weights, state, token)
    return state, output.token


def fori(weights, state, token):
    return jax.lax.fori_loop(0, STEPS, lambda _, carry: plain(weights, *carry), (state, token))


def scan(weights, state, token):
    return jax.lax.scan(lambda carry, _: (plain(weights, *carry), None), (state, token), None, length=STEPS)[0]


def while_loop(weights, state, token):
    end = state.lengths[0] + STEPS
    carry = (state, token)
    return jax.lax.while_loop(lambda carry: carry[0].lengths[0] < end, lambda carry: plain(weights, *carry), carry)


def nested(weights, state, token):
    def outer(_, carry):
        return jax.lax.fori_loop(0, STEPS // 3, lambda _, inner: plain(weights, *inner), carry)

    return jax.lax.fori_loop(0, 3, outer, (state, token))


PROGRAMS = {f.__name__: f for f in (plain, fori, scan, while_loop, nested)}
LOOPS = {name: f for name, f in PROGRAMS.items() if name != "plain"}


@pytest.fixture(scope="module", params=PROGRAMS)
def compiled(request, model):
    lowered = jax.jit(PROGRAMS[request.param], donate_argnames="state").lower(
        model.weights, model.state(1, 224), jnp.zeros(1, jnp.int32)
    )
    return lowered.compile()


def test_one_custom_call(compiled):
    """A step is one call, and a loop holds it once."""
    assert custom_calls(compiled) == CALLS


def cache_shapes(model) -> tuple[str, ...]:
    """As HLO writes one device's share of the caches."""
    state = model.state(1, 224)
    return tuple({f"bf16[{','.join(map(str, (1, *getattr(state, n).shape[1:])))}]" for n in CACHES})


def instructions(text: str) -> list[tuple[str, str]]:
    """(result type, opcode) of every HLO instruction."""
    text = re.sub(r"/\*.*?\*/", "", text)
    found = re.findall(r"^\s*(?:ROOT )?%\S+ = (\(.*?\)|\S+) ([a-z][\w-]*)\(", text, re.MULTILINE)
    assert len(found) > 20
    return found


def test_caches_are_never_copied(compiled, model):
    """No instruction makes a cache anew: caches only pass through the call, tuples and loops."""
    shapes = cache_shapes(model)
    made = {op for result, op in instructions(compiled.as_text()) if any(s in result for s in shapes)}
    assert "custom-call" in made
    assert made <= {"parameter", "get-tuple-element", "tuple", "custom-call", "while", "call", "bitcast"}, made


def test_a_state_that_is_kept_is_copied(model):
    """The opposite, so that the test above is known to see copies."""
    text = jax.jit(decode_step).lower(model.weights, model.state(1, 224), jnp.zeros(1, jnp.int32)).compile().as_text()
    shapes = cache_shapes(model)
    assert sum(op == "copy" for result, op in instructions(text) if any(s in result for s in shapes)) == 4


def test_no_collectives(compiled):
    """Devices meet in our calls and nowhere else."""
    opcodes = {op for _, op in instructions(compiled.as_text())}
    collectives = ("all-gather", "all-reduce", "all-to-all", "reduce-scatter", "collective-", "send", "recv")
    assert not [op for op in opcodes if op.startswith(collectives)]


def test_results_take_the_place_of_the_donated_caches(compiled):
    text = compiled.as_text()
    header = text.splitlines()[0]
    pairs = re.findall(r"\{(\d+)\}: \((\d+), \{\}, (?:may|must)-alias\)", header)
    names = {int(n): name for n, name in re.findall(r"parameter\((\d+)\),.*op_name=\"state\.(\w+)\"", text)}
    donated = {names.get(int(parameter)) for _, parameter in pairs}
    assert donated >= set(CACHES)


@pytest.mark.parametrize("name", PROGRAMS)
def test_buffers_stay_where_they_are(model, name):
    run = jax.jit(PROGRAMS[name], donate_argnames="state")

    def pointers(state):
        return {
            (n, shard.device): shard.data.unsafe_buffer_pointer()
            for n in CACHES
            for shard in getattr(state, n).addressable_shards
        }

    state = model.state(1, 224)
    before = pointers(state)
    token = jnp.array([5])
    for _ in range(4):
        state, token = run(model.weights, state, token)
        jax.block_until_ready(state)
    assert pointers(state) == before and len(before) == 32


# Transformations -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOOPS)
def test_loops_are_single_steps(model, name):
    state = start(model, 1, 2, 3)
    want = greedy(model, state, 4, STEPS + 1)
    after, token = jax.jit(LOOPS[name])(model.weights, state, jnp.array([4]))
    assert int(token[0]) == want[STEPS - 1] and after.lengths.tolist() == [3 + STEPS]
    same(one_by_one(model, after, [token[0]]), one_by_one(model, state, [4, *want[:STEPS]])[-1:])


def test_scan_returns_every_output(model):
    tokens = np.random.default_rng(1).integers(0, 64, 40)
    state = start(model, 9)

    def body(state, token):
        output, state = decode_step(model.weights, state, token[None])
        return state, (output.logits[0], output.token[0])

    _, (logits, chosen) = jax.jit(lambda s, t: jax.lax.scan(body, s, t))(state, jnp.asarray(tokens, jnp.int32))
    want = one_by_one(model, state, tokens)
    same(logits, want)
    same(chosen, np.argmax(want, axis=-1).astype(np.int32))


def test_unjitted_and_in_cond(model):
    state = start(model, 9, 8)
    want = one_by_one(model, state, [7])
    same(decode_step(model.weights, state, jnp.array([7]))[0].logits, want)
    choose = jax.jit(
        lambda s, t, flag: jax.lax.cond(
            flag,
            lambda: decode_step(model.weights, s, t)[0].logits,
            lambda: decode_step(model.weights, s, t + 1)[0].logits,
        )
    )
    same(choose(state, jnp.array([7]), True), want)
    same(choose(state, jnp.array([6]), False), want)


def test_collectives_after_the_step(model):
    """Sums over the sharded logits, every step of a loop, together with what the next step needs."""
    state = start(model, 3)

    @jax.jit
    def run(state, token):
        def body(carry, _):
            output, state = decode_step(model.weights, carry[0], carry[1])
            probabilities = jax.nn.softmax(output.logits, axis=-1)
            return (state, output.token), (jnp.sum(output.logits), jnp.sum(probabilities), output.logits)

        return jax.lax.scan(body, (state, token), None, length=60)[1]

    begin = time.monotonic()
    for _ in range(3):
        sums, ones, logits = jax.block_until_ready(run(state, jnp.array([4])))
    assert time.monotonic() - begin < 60
    np.testing.assert_allclose(sums, np.asarray(logits, np.float64).sum(axis=(1, 2)), rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(ones, 1, rtol=1e-5)
    same(np.asarray(logits)[:, 0], one_by_one(model, state, [4, *greedy(model, state, 4, 59)]))


def test_independent_collectives_beside_the_step(model):
    """Work of XLA's own that may run at the same time as ours and needs all devices too."""
    x = jax.device_put(jnp.arange(64.0), rank_sharding(model.mesh))
    state = start(model, 3)

    @jax.jit
    def run(state, token, x):
        def body(carry, _):
            state, token, x = carry
            output, state = decode_step(model.weights, state, token)
            return (state, output.token, jnp.roll(x, 1) * 0.5 + jnp.sum(x)), None

        return jax.lax.scan(body, (state, token, x), None, length=40)[0]

    _, token, _ = jax.block_until_ready(run(state, jnp.array([4]), x))
    assert int(token[0]) == greedy(model, state, 4, 40)[-1]


# Several states ------------------------------------------------------------------------------------------------------


def test_two_models_alternately(model, other):
    states = [start(model, 1, 2), start(other, 3)]
    want = [greedy(m, s, 5, 20) for m, s in zip((model, other), states, strict=True)]
    run = jax.jit(decode_step, donate_argnames="state")
    tokens, got = [jnp.array([5])] * 2, [[], []]
    for _ in range(20):
        for i, m in enumerate((model, other)):
            output, states[i] = run(m.weights, states[i], tokens[i])
            jax.block_until_ready(states[i].epoch)
            tokens[i] = output.token
            got[i].append(int(output.token[0]))
    assert got == want


def test_two_models_in_one_program(model, other):
    """Independent steps of two models, 150 times; the devices may run them in any order."""
    states = (start(model, 1, 2), start(other, 3))

    @jax.jit
    def run(states, tokens):
        def body(carry, _):
            states, tokens = carry
            steps = [decode_step(m.weights, s, t) for m, s, t in zip((model, other), states, tokens, strict=True)]
            tokens = tuple(output.token for output, _ in steps)
            return (tuple(state for _, state in steps), tokens), tokens

        return jax.lax.scan(body, (states, tokens), None, length=150)[1]

    got = run(states, (jnp.array([5]),) * 2)
    for m, state, tokens in zip((model, other), states, got, strict=True):
        assert np.asarray(tokens)[:, 0].tolist() == greedy(m, state, 5, 150)


def test_equal_steps_of_two_states(model):
    """Same model, tokens and lengths, only the caches differ: told apart by the states' ids."""
    states = (start(model, 1, 2, 3), start(model, 6, 7, 8))
    want = [one_by_one(model, s, [5, 9]) for s in states]

    @jax.jit
    def run(states, tokens):
        out = []
        for state in states:
            first, state = decode_step(model.weights, state, tokens[:1])
            second, state = decode_step(model.weights, state, tokens[1:])
            out.append(jnp.concatenate([first.logits, second.logits]))
        return out

    for _ in range(30):
        for logits, expected in zip(run(states, jnp.array([5, 9])), want, strict=True):
            same(logits, expected)


@pytest.mark.parametrize("second", ["same token", "different tokens"])
def test_forked_state(model, second):
    """One state stepped four ways in one program, and each outcome again.

    With the same token next, what tells the forks apart is only their history.
    """
    state = start(model, 1, 2, 3)
    first, then = [5, 6, 7, 8], [9] * 4 if second == "same token" else [9, 10, 11, 12]
    want = [one_by_one(model, state, pair) for pair in zip(first, then, strict=True)]

    @jax.jit
    def run(state, first, then):
        out = []
        for i in range(4):
            output, fork = decode_step(model.weights, state, first[i])
            next_output, fork = decode_step(model.weights, fork, then[i])
            out.append((jnp.concatenate([output.logits, next_output.logits]), fork))
        return out

    arguments = ([jnp.array([t]) for t in first], [jnp.array([t]) for t in then])
    for _ in range(30):
        for (logits, fork), expected in zip(run(state, *arguments), want, strict=True):
            same(logits, expected)
            assert fork.lengths.tolist() == [5]


def test_forks_with_the_same_history(model):
    """Copies of one state that are stepped alike: calls that nothing tells apart, which need not be."""
    state = start(model, 1, 2, 3)
    copies = [jax.tree.map(jnp.copy, state) for _ in range(3)]
    want = one_by_one(model, state, [5, 9])

    @jax.jit
    def run(states, tokens):
        out = []
        for s in states:
            output, s = decode_step(model.weights, s, tokens[:1])
            out += [output.logits, decode_step(model.weights, s, tokens[1:])[0].logits]
        return out

    for _ in range(30):
        for i, logits in enumerate(run(copies, jnp.array([5, 9]))):
            same(logits, want[i % 2 : i % 2 + 1])


def test_one_stream_two_heads(model):
    """Two calls of the head on different streams of one state are not taken for each other."""
    state = start(model, 1, 2, 3)
    rows = next_rows(state.lengths, jnp.array([5]))

    @jax.jit
    def run(state, rows):
        middle, _, _ = run_layers(model.weights, state, rows, layers=(0, 1))
        end, after, _ = run_layers(model.weights, state, rows)
        return [run_head(model.weights, after, rows, stream).logits for stream in (middle, end, middle * 2)], end

    alone = jax.jit(lambda state, stream: run_head(model.weights, state, rows, stream).logits)
    middle, after, _ = run_layers(model.weights, state, rows, layers=(0, 1))
    end, _, _ = run_layers(model.weights, state, rows)
    want = [alone(after, stream) for stream in (middle, end, middle * 2)]
    assert not np.array_equal(want[0], want[1])
    for _ in range(30):
        for logits, expected in zip(run(state, rows)[0], want, strict=True):
            same(logits, expected)


def test_programs_of_an_earlier_session_are_not_reused(model):
    """A rebuilt communicator has a new key; JAX's caches, which grow and rehash, must not find the old programs."""
    weights = dataclasses.replace(model.weights, communicator=Communicator(model.config, model.mesh))
    run = jax.jit(lambda weights: jnp.int32(weights.communicator.key))
    for key in range(1, 40):  # as rebuild() does on GPUs
        weights.communicator.key = key
        assert run(weights) == key


def test_a_closed_communicator_says_so(model, monkeypatch):
    """On GPUs; on the CPU there is nothing to close."""
    weights = dataclasses.replace(model.weights, communicator=Communicator(model.config, model.mesh))
    weights.communicator.close()
    assert weights.communicator.open_key() == 0
    monkeypatch.setattr(Communicator, "_shares", lambda _: True)
    with pytest.raises(ValueError, match=r"was closed; rebuild\(\) it"):
        jax.jit(decode_step)(weights, model.state(1), jnp.array([1]))


# Memory --------------------------------------------------------------------------------------------------------------


def resident() -> float:
    """MiB of this process in memory."""
    with open("/proc/self/status") as status:
        return int(re.search(r"VmRSS:\s+(\d+) kB", status.read())[1]) / 1024


def test_a_thousand_steps_leave_no_memory_behind():
    """Bound: 4 MiB over 1,000 steps, half the size of this state's caches; so no step keeps more than 4 KiB."""
    model = make_model(one_layer(FULL), 31)
    run = jax.jit(decode_step, donate_argnames="state")
    state, token = model.state(1, 4096), jnp.array([1])

    def many(state, token, count):
        for _ in range(count):
            output, state = run(model.weights, state, token)
            token = output.token
            jax.block_until_ready(state.epoch)
        return state, token

    state, token = many(state, token, 300)  # thread pools and allocators settle
    before = resident()
    state, token = many(state, token, 1000)
    assert resident() - before < 4
    assert state.lengths.tolist() == [1300]
