"""Stand for values while the model's code runs once to be recorded (torch.fx proxies that know their value).

Python code may look at such a value as far as it is the same for every minibatch. Whatever torch function it meets
becomes a node of the graph.
"""

from __future__ import annotations

import contextlib
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from pd_format.layers.values import leaves

__all__ = ["Attribute", "Mode", "Proxy", "Recorder", "is_proxy", "recorded_functions"]

# Functions that make a tensor from none. Run while tracing they would leave one fixed tensor in the graph, and torch
# refuses a traced number as a size of some of them.
_FACTORIES = {
    name: getattr(torch, name)
    for name in (
        *("zeros", "ones", "full", "empty", "eye", "tensor", "as_tensor", "scalar_tensor", "empty_strided"),
        *("arange", "linspace", "logspace", "tril_indices", "triu_indices", "complex", "polar"),
        *("rand", "randn", "randint", "randperm", "normal", "bartlett_window", "blackman_window"),
        *("hamming_window", "hann_window", "kaiser_window"),
    )
}


class Recorder(Protocol):
    """What proxies need of the tracer; `busy` while a node is evaluated, when torch functions run as ever."""

    busy: bool

    def value_of(self, node: fx.Node) -> object: ...
    def alive(self, node: fx.Node) -> bool: ...
    def known(self, node: fx.Node, ask: Callable[[Any], Any], tentative: bool = False) -> Any: ...
    def record(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any: ...
    def concerns(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool: ...
    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any) -> Any: ...
    def iter(self, obj: fx.Proxy) -> Iterator[Any]: ...
    def keys(self, obj: fx.Proxy) -> Any: ...


class Proxy(fx.Proxy):
    """A traced value that Python code may look at as far as its value is the same for every minibatch."""

    tracer: Recorder  # type: ignore[assignment]
    __getitem__: Callable[..., Any]  # Like all operators, it comes from torch.fx.

    def __getattr__(self, name: str) -> Any:
        first = self.tracer.value_of(self.node)
        if not hasattr(first, name):
            raise AttributeError(f"{type(first).__name__!r} object has no attribute {name!r}")
        if isinstance(first, dict) and name == "values":
            return lambda: [self[key] for key in first]
        if isinstance(first, dict) and name == "items":
            return lambda: [(key, self[key]) for key in first]
        return Attribute(self, name)

    def __bool__(self) -> bool:
        return bool(self.tracer.known(self.node, bool))

    def __int__(self) -> int:
        return int(self.tracer.known(self.node, int))

    def __float__(self) -> float:
        return float(self.tracer.known(self.node, float))

    def __index__(self) -> int:
        return int(self.tracer.known(self.node, operator.index, tentative=True))

    def __len__(self) -> int:
        return int(self.tracer.known(self.node, len))

    def __contains__(self, item: object) -> bool:
        return any(item is each or bool(item == each) for each in self.tracer.iter(self))

    def __hash__(self) -> int:
        # A dtype, a device or a text may be looked up in a dictionary; all else is told apart by identity.
        value = self.tracer.value_of(self.node)
        return hash(value) if isinstance(value, (torch.dtype, torch.device, str)) else id(self)

    def __str__(self) -> str:
        value = self.tracer.value_of(self.node)
        return str(value) if isinstance(value, (torch.dtype, torch.device, str)) else repr(self)

    def __setitem__(self, key: object, value: object) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, key, value), {})

    def keys(self) -> Any:
        return self.tracer.keys(self)

    @classmethod
    def __torch_function__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        proxy: Any = next(leaf for leaf in leaves((args, kwargs or {})) if is_proxy(leaf))
        return proxy.tracer.record(function, args, kwargs or {})


def is_proxy(value: object) -> bool:
    """Whether it is a traced value."""
    return issubclass(type(value), Proxy)


def _in_place(name: str) -> Callable[[Proxy, object], object]:
    function = getattr(operator, name)

    def method(self: Proxy, other: object) -> object:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    return method


# torch.fx would turn `x += y` into `x = x + y`, which leaves other names of the same tensor unchanged.
for _name in ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor", "imatmul"):
    setattr(Proxy, f"__{_name}__", _in_place(_name))


class Attribute(Proxy):
    """An attribute of a traced value; it becomes a node when used, unless it is called as a method."""

    def __init__(self, root: Proxy, name: str) -> None:
        self.root = root
        self.attr = name
        self.tracer = root.tracer
        self._node: fx.Node | None = None

    @property
    def node(self) -> fx.Node:  # type: ignore[override]
        # A submodule that turned out untraceable took its nodes along; then it is made again.
        if self._node is None or not self.tracer.alive(self._node):
            self._node = self.tracer.create_proxy("call_function", getattr, (self.root, self.attr), {}).node
        return self._node

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.tracer.create_proxy("call_method", self.attr, (self.root, *args), kwargs)


class Mode(TorchFunctionMode):
    """Sees the torch functions that no traced value reaches: those on parameters alone, and those that make tensors."""

    def __init__(self, tracer: Recorder) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        tracer, kwargs = self._tracer, kwargs or {}
        if tracer.busy or not (function in _FACTORIES.values() or tracer.concerns(args, kwargs)):
            return function(*args, **kwargs)
        return tracer.record(function, args, kwargs)


@contextlib.contextmanager
def recorded_functions(tracer: Recorder, model: nn.Module) -> Iterator[None]:
    """Let calls that torch would not hand to a traced value reach the tracer; undone when tracing ends.

    These are `torch.zeros(b, 3)` with a traced `b`; the apply of a custom autograd function, whose backward would be
    lost if its forward were traced through; and `isinstance(x, torch.Tensor)` in the files of the model's classes,
    which must be answered as it will be when the model runs. (A traced value that itself claimed to be a tensor would
    make torch's C++ code read memory that is not there.)
    """
    base = torch.autograd.Function
    own = vars(base).get("apply")  # Some versions of torch inherit it.

    def wrap(function: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if tracer.busy:
                return function(*args, **kwargs)
            return tracer.record(function, args, kwargs)

        return wrapper

    def traced_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        bound = super(base, cls).apply if own is None else own.__get__(None, cls)
        if tracer.busy or not tracer.concerns(args, kwargs):
            return bound(*args, **kwargs)
        return tracer.create_proxy("call_function", bound, args, kwargs)

    def traced_isinstance(value: object, kind: Any) -> bool:
        if is_proxy(value) and not tracer.busy:
            value = tracer.value_of(value.node)  # type: ignore[attr-defined]
        return isinstance(value, kind)

    classes = {each for module in model.modules() for each in type(module).__mro__}
    files = {each.__module__ for each in classes if not each.__module__.startswith(("torch.", "builtins"))}
    spaces = [vars(sys.modules[name]) for name in files if name in sys.modules]
    spaces = [space for space in spaces if "isinstance" not in space]
    is_tensor = torch.is_tensor
    # torch lists the functions that `with torch.device(...)` concerns at its first use, and keeps the list: had that
    # come while they are replaced, the statement would do nothing for the rest of the process.
    with torch.device("meta"):
        torch.empty(0)
    try:
        torch.is_tensor = lambda value: traced_isinstance(value, torch.Tensor)  # type: ignore[assignment]
        for space in spaces:
            space["isinstance"] = traced_isinstance
        for name, function in _FACTORIES.items():
            setattr(torch, name, wrap(function))
        base.apply = classmethod(traced_apply)
        yield
    finally:
        torch.is_tensor = is_tensor
        for space in spaces:
            del space["isinstance"]
        for name, function in _FACTORIES.items():
            setattr(torch, name, function)
        if own is None:
            del base.apply
        else:
            base.apply = own
