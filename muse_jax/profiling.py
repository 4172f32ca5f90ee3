"""Names in a profile of what the host does; `jax.named_scope` gives those of what devices do."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax

Function = TypeVar("Function", bound=Callable[..., Any])


def host_phase(name: str) -> Callable[[Function], Function]:
    """Decorator: the function's calls show as `name` on the host's timeline in XProf or Perfetto."""

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with jax.profiler.TraceAnnotation(name):
                return function(*args, **kwargs)

        return cast(Function, wrapped)

    return decorate
