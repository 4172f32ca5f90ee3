"""DecodeState: KV caches and how far each sequence has come. Explicit, donated, never hidden."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from muse_jax import ops
from muse_jax.config import MuseSparkConfig
from muse_jax.decode.rows import MAX_ROWS
from muse_jax.decode.weights import RANK, REPLICATED
from muse_jax.mesh import RANKS, check_mesh, own_mesh

BLOCK = 16


@dataclasses.dataclass(frozen=True)
class DecodeState:
    """The state of up to B sequences. A pytree; a step that is given it donated updates the caches in place."""

    k_full: jax.Array
    """bf16 [8, Lf, B, kv/8, capacity, 64]: keys of the full layers, slot = position."""
    v_full: jax.Array
    """bf16, like k_full."""
    k_ring: jax.Array
    """bf16 [8, Ls, B, kv/8, ring, 64]: keys of the sliding layers, slot = position mod ring."""
    v_ring: jax.Array
    """bf16, like k_ring."""
    lengths: jax.Array
    """int32 [B]: committed tokens of each sequence."""
    rope: jax.Array
    """fp32 [capacity, 64]: 32 cos, 32 sin per position."""
    epoch: jax.Array
    """int32 [2]: an id that changes with what each call does, and the number of calls; aliased through every call,
    which orders them. It tells steps of different states, and of copies of one state, apart."""

    config: MuseSparkConfig = dataclasses.field(metadata={"static": True})
    mesh: Mesh = dataclasses.field(metadata={"static": True})

    @property
    def batch(self) -> int:
        """Number of sequences, B."""
        return self.lengths.shape[0]

    @property
    def capacity(self) -> int:
        """Positions that each sequence's cache holds."""
        return self.k_full.shape[-2]

    @property
    def nbytes(self) -> int:
        """Bytes of the caches over all ranks."""
        return sum(a.nbytes for a in (self.k_full, self.v_full, self.k_ring, self.v_ring))


SPECS: dict[str, PartitionSpec] = {
    field.name: RANK if field.name[:2] in ("k_", "v_") else REPLICATED
    for field in dataclasses.fields(DecodeState)
    if "static" not in field.metadata
}

jax.tree_util.register_dataclass(DecodeState, list(SPECS), ["config", "mesh"])

_ids = itertools.count(1)


def ring_slots(window: int) -> int:
    """Slots of a sliding layer: 64 rows in flight never overwrite a position that one of them still sees."""
    return -(-(window + MAX_ROWS - 1) // BLOCK) * BLOCK


def layer_kinds(config: MuseSparkConfig) -> tuple[int, int]:
    """(full layers, sliding layers)."""
    full = sum(t == "full_attention" for t in config.layer_types)
    return full, config.num_hidden_layers - full


def state_shapes(config: MuseSparkConfig, *, batch: int, capacity: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The arrays that `init_state` allocates, by name; it says what is allowed and raised."""
    for name, value in (("batch", batch), ("capacity", capacity)):
        if not isinstance(value, int | np.integer) or isinstance(value, bool):
            raise TypeError(f"{name} is {value!r}, expected a whole number")
    if not 1 <= batch <= MAX_ROWS:
        raise ValueError(f"batch is {batch}, allowed: 1 to {MAX_ROWS} (a step has at most {MAX_ROWS} rows)")
    if not 1 <= capacity <= config.max_position_embeddings:
        raise ValueError(
            f"capacity is {capacity}, allowed: 1 to {config.max_position_embeddings} (max_position_embeddings)"
        )
    capacity = -(-capacity // BLOCK) * BLOCK
    full, sliding = layer_kinds(config)
    ring, heads = ring_slots(config.sliding_window), config.num_key_value_heads // RANKS
    # A kind that no layer has keeps one unused layer, because XLA passes no pointer for an empty buffer.
    full_cache = (RANKS, max(full, 1), batch, heads, capacity, config.head_dim)
    ring_cache = (RANKS, max(sliding, 1), batch, heads, ring, config.head_dim)
    shapes = {
        "k_full": (full_cache, jnp.bfloat16), "v_full": (full_cache, jnp.bfloat16),
        "k_ring": (ring_cache, jnp.bfloat16), "v_ring": (ring_cache, jnp.bfloat16),
        "lengths": ((batch,), jnp.int32), "rope": ((capacity, 64), jnp.float32), "epoch": ((2,), jnp.int32),
    }  # fmt: skip
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, (shape, dtype) in shapes.items()}


def init_state(config: MuseSparkConfig, mesh: Mesh, *, batch: int = 1, capacity: int = 4096) -> DecodeState:
    """Empty caches.

    Args:
        config: the model.
        mesh: the mesh of the weights that will use the state.
        batch: number of sequences, 1 to 64.
        capacity: tokens per sequence, prompt and generated together; rounded up to a multiple of 16.

    Raises:
        ValueError: batch or capacity out of range (capacity may not exceed max_position_embeddings).
    """
    mesh = check_mesh(mesh)
    shapes = state_shapes(config, batch=batch, capacity=capacity)
    sharding = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}

    def zeros(name: str) -> jax.Array:
        return jnp.zeros(shapes[name].shape, shapes[name].dtype, device=sharding[name])

    def put(name: str, value: np.ndarray) -> jax.Array:
        return jax.make_array_from_callback(value.shape, sharding[name], lambda index: value[index])

    slots = shapes["rope"].shape[0]
    rope = ops.rope_table(slots, config.rope_theta) if config.rope_theta else np.zeros((slots, 64), np.float32)
    with own_mesh(mesh):
        return DecodeState(
            k_full=zeros("k_full"), v_full=zeros("v_full"), k_ring=zeros("k_ring"), v_ring=zeros("v_ring"),
            lengths=put("lengths", np.zeros(batch, np.int32)), rope=put("rope", rope),
            epoch=put("epoch", np.array([next(_ids), 0], np.int32)),
            config=config, mesh=mesh,
        )  # fmt: skip
