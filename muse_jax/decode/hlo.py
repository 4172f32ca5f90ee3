"""What a compiled program contains: read off its HLO, never assumed."""

import collections
import re

import jax


def custom_calls(compiled: jax.stages.Compiled) -> dict[str, int]:
    """Target name -> number of call sites of our custom calls (``muse_...``) in a compiled program."""
    return dict(collections.Counter(re.findall(r'custom_call_target="(muse_[a-z0-9_]+)"', compiled.as_text() or "")))
