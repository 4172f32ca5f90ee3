"""Makes the tiny checkpoint: python checkpoints/make_tiny.py OUT [--seed 0] [--bf16] [--overwrite]."""

import argparse
import math
from pathlib import Path

from muse_jax import weights
from muse_jax.config import MuseSparkConfig
from muse_jax.mesh import make_mesh
from muse_jax.tokenizer import byte_tokenizer


def main() -> None:
    """Parses the arguments, makes the weights, saves them, reads them back."""
    parser = argparse.ArgumentParser(description="Makes the tiny checkpoint with random weights.")
    parser.add_argument("out", type=Path, help="folder to create")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bf16", action="store_true", help="keep bf16 masters instead of NVFP4 codes, to train from")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing folder")
    args = parser.parse_args()

    config = MuseSparkConfig.tiny()
    mesh = make_mesh()
    params = weights.random_params(config, args.seed, mesh, quantized=not args.bf16)
    weights.save(args.out, config, params, byte_tokenizer(), overwrite=args.overwrite)
    weights.load(args.out, mesh)
    count = sum(math.prod(spec.shape) for spec in weights.parameter_specs(config, ("bf16",) * 6).values())
    print(f"{args.out}: {count / 1e6:.1f} million parameters, {sum(a.nbytes for a in params.values()) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
