"""The dispatch key through which operators are seen.

It lies below autograd and functorch and above the backends, and eager programs leave
it unused. Every operator gets a kernel of its own there: a fallback for all of them
would do, but PyTorch loses it where an argument is a tensor subclass whose dispatch is
switched off (fake tensors, hence `torch.compile`). Operators registered later than the
first session come through such a fallback. Those that only return views pass unseen:
they touch no bytes, so there is nothing to see and time to save; and a result that has
been through Python has a Python object already, which C++ code that makes a subclass
of it (`nn.Parameter`, `as_subclass`) refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from lowtide.errors import LowtideError
from lowtide.recorder.schemas import Facts, facts_of, only_aliases

KEY = "Fake"

Observer = Callable[[Any, Facts, Any, Any], Any]  # operator, facts, args, kwargs

_Excluding = torch._C._ExcludeDispatchKeyGuard  # an eighth of the cost of naming keys
_include = torch._C._dispatch_tls_set_dispatch_key_included
_has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key

_observers: list[Observer] = []  # the one that observes now, if any
_libraries: list[torch.library.Library] = []
_key = torch._C.DispatchKeySet(torch._C._dispatch_key_parse(KEY))


def _quiet_keys() -> Any:
    """Collect what has to be passed over to run an operator that nobody notices."""
    with (
        torch._C._DisableTorchDispatch(),
        torch._C._AutoDispatchBelowAutograd(),
        torch._C._DisableAutocast(),
    ):
        return torch._C._dispatch_tls_local_exclude_set() | _key


_quiet = _quiet_keys()


def unseen() -> Any:
    """Return a context in which operators are not observed."""
    return _Excluding(_key)


def quiet() -> Any:
    """Return a context for lowtide's own operators: neither recorded nor observed.

    They run below autograd, without autocast and without Python's dispatch modes.
    """
    return _Excluding(_quiet)


def observe_with(observer: Observer) -> None:
    """Let an observer run the operators of this thread, and of autograd's for it."""
    if not _libraries:
        _libraries.extend(_install())
    _observers[:] = [observer]
    _include(KEY, True)


def observed() -> bool:
    """Say whether anybody observes operators now."""
    return bool(_observers)


def stop_observing() -> None:
    """Run operators unobserved again."""
    _include(KEY, False)
    _observers.clear()


def _hand_over(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Let the observer run an operator that has no kernel of its own here."""
    with _Excluding(_key):
        if _observers:
            return _observers[0](func, facts_of(func), args, kwargs)
        return func(*args, **kwargs)


def _install() -> Iterator[torch.library.Library]:
    """Register the kernels, some 2,400 in a fifth of a second; once per process."""
    library = torch.library.Library("_", "IMPL")
    try:
        library.fallback(_hand_over, KEY)
    except RuntimeError as error:
        raise LowtideError(
            f"lowtide cannot observe operators in torch {torch.__version__}: its "
            f"dispatch key {KEY!r} is missing or in use ({error})."
        ) from error
    yield library
    schemas = {_name(schema): schema for schema in torch._C._jit_get_all_schemas()}
    by_namespace: dict[str, torch.library.Library] = {}
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        if name not in schemas or _has_kernel(name, "CompositeImplicitAutograd"):
            continue  # the latter is seen in the operators that it consists of
        library = by_namespace.get(namespace) or torch.library.Library(
            namespace, "IMPL"
        )
        by_namespace[namespace] = library
        views = only_aliases(schemas[name])
        kernel = torch.library.fallthrough_kernel if views else _kernel(name)
        library.impl(rest, kernel, KEY)
    yield from by_namespace.values()


def _name(schema: Any) -> str:
    overload = f".{schema.overload_name}" if schema.overload_name else ""
    return f"{schema.name}{overload}"


def _kernel(name: str) -> Callable[..., Any]:
    """Make the kernel of one operator, which is looked up at its first call.

    What happens inside the operator is not observed again.
    """
    func: Any = None
    facts: Any = None

    def kernel(*args: Any, **kwargs: Any) -> Any:
        nonlocal func, facts
        with _Excluding(_key):
            if func is None:
                namespace, _, rest = name.partition("::")
                packet, _, overload = rest.partition(".")
                found = getattr(getattr(torch.ops, namespace), packet)
                func = getattr(found, overload or "default")
                facts = facts_of(func)
            if _observers:
                return _observers[0](func, facts, args, kwargs)
            return func(*args, **kwargs)

    return kernel
