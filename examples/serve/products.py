"""Fewer and faster operators for modules of a part, with the same values.

On CPUs, and for few rows on devices, the number of operators bounds the speed of a decode step.
A run of the part tells which modules may be replaced, and not their names.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (its usual name)

import cg

from . import projections
from .projections import Projection

INPUT = -1
"""Among the outputs of a joined product that nobody has taken yet, the place of its input."""


@runtime_checkable
class _Quantized(Protocol):
    """A linear layer that keeps a quantized weight.

    A parameter is none of its members: from Python 3.12 on, `isinstance` looks at no attribute that
    a module finds by `__getattr__`.
    """

    out_features: int

    def joined(self, others: Sequence[Any], ways: int) -> Any:
        """One layer with the outputs of this one and of others; None if it cannot have them."""
        ...

    def product(self, x: Tensor, tensors: Mapping[str, Any]) -> Tensor:
        """The outputs, with tensors in the place of the layer's."""
        ...

    def shardings(self, weight: Any) -> Mapping[str, Any]:
        """How ranks share the tensors, where they share a plain weight."""
        ...


class _Pieces(nn.Module):
    """One product for linear layers that take the same input; it stands for the first of them.

    Its rows are cut into as many pieces as ranks share the part. A piece has a piece of each layer,
    one after the other. So a cut of the first layer's rows gives a rank a piece of each layer.
    """

    def share(self, layers: Sequence[nn.Linear], ways: int) -> None:
        """Stand for layers, each of which `ways` ranks have in pieces."""
        self.ways = ways
        self.sizes = [layer.out_features // ways for layer in layers]
        # In one dictionary, which is empty between products, so that layers change no attribute.
        self._left: dict[int, Tensor] = {}

    def outputs(self, x: Tensor) -> Tensor:
        """The product."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.take(x, 0)

    def take(self, x: Tensor, index: int) -> Tensor:
        """The output of a layer; the first one that is asked for computes all of them."""
        left = self._left
        if left.get(INPUT) is not x or index not in left:
            outputs = self.outputs(x)
            left.clear()
            if self.ways > 1:
                pieces = outputs.unflatten(-1, (self.ways, -1)).split(self.sizes, -1)
                left.update({at: piece.flatten(-2) for at, piece in enumerate(pieces)})
            else:
                left.update(enumerate(outputs.split(self.sizes, -1)))
            left[INPUT] = x
        output = left.pop(index)
        if len(left) == 1:
            left.clear()
        return output


class Joined(_Pieces, nn.Linear):
    """The product of layers with plain weights.

    Args:
        layers: of one input width, all with a bias, or none.
        ways: pieces; it divides the outputs of each layer.
    """

    def __init__(self, layers: Sequence[nn.Linear], ways: int) -> None:
        outputs = sum(layer.out_features for layer in layers)
        has_bias = layers[0].bias is not None
        super().__init__(layers[0].in_features, outputs, has_bias, device="meta")
        self.share(layers, ways)
        self.weight = self._joined([layer.weight for layer in layers])
        if has_bias:
            self.bias = self._joined([layer.bias for layer in layers])
        self.projection: Projection | None = None

    def _joined(self, tensors: Sequence[Tensor]) -> nn.Parameter:
        pieces = [tensor.unflatten(0, (self.ways, -1)) for tensor in tensors]
        return nn.Parameter(torch.cat(pieces, 1).flatten(0, 1), requires_grad=False)

    def pack_weight(self) -> None:
        """Take a packed weight in the place of the plain one."""
        self.projection = Projection(self)
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)

    def outputs(self, x: Tensor) -> Tensor:
        return nn.Linear.forward(self, x) if self.projection is None else self.projection(x)


class JoinedQuantized(_Pieces):
    """The product of layers with quantized weights.

    It has their tensors under the names that the first of them has, by which plans cut them.

    Args:
        layer: that has the weights of all.
        layers: that it stands for.
        ways: pieces; it divides the outputs of each layer.
    """

    def __init__(self, layer: Any, layers: Sequence[nn.Linear], ways: int) -> None:
        super().__init__()
        self._layer = (layer,)  # no module of this one, which has its parameters
        self.register_parameter("bias", None)
        for name, parameter in layer.named_parameters():
            self.register_parameter(name, parameter)
        self.share(layers, ways)

    @property
    def rounds_inputs(self) -> bool:
        """Whether inputs are quantized, as the format may say."""
        is_rounding: bool = self._layer[0].rounds_inputs
        return is_rounding

    @rounds_inputs.setter
    def rounds_inputs(self, value: bool) -> None:
        self._layer[0].rounds_inputs = value

    def outputs(self, x: Tensor) -> Tensor:
        own: dict[str, Any] = self._parameters
        outputs: Tensor = self._layer[0].product(x, own)
        return outputs


class JoinedLayer(nn.Module):
    """Stands for a layer whose product is joined with that of others."""

    def __init__(self, joined: _Pieces, index: int) -> None:
        super().__init__()
        self._joined = (joined,)  # no module of this one, for it is another layer's
        self.index = index

    def forward(self, x: Tensor) -> Tensor:
        return self._joined[0].take(x, self.index)


class RmsNorm(nn.Module):
    """A norm by the root of the mean of squares, which is one kernel on CUDA devices."""

    def __init__(self, old: Any, epsilon: float) -> None:
        super().__init__()
        self.weight, self.epsilon = old.weight, epsilon
        self.register_buffer("least", torch.tensor([epsilon]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda:
            return F.rms_norm(x, self.weight.shape, self.weight, self.epsilon)
        length = torch.linalg.vector_norm(x, 2, -1, keepdim=True, dtype=torch.float32)
        shrink = torch.addcmul(self.least, length, length, value=1 / x.shape[-1]).rsqrt()
        return self.weight * (x * shrink).to(x.dtype)


class Calls:
    """The inputs of the linear layers of a part in a run, in the order of their calls."""

    def __init__(self) -> None:
        self.taken: list[tuple[nn.Module, Tensor]] = []

    @contextmanager
    def of(self, part: nn.Module) -> Iterator[None]:
        """Inside the `with` block calls are noted."""

        def note(module: nn.Module, args: tuple[Any, ...]) -> None:
            self.taken += [(module, args[0])] if len(args) == 1 else []

        hooks = [
            module.register_forward_pre_hook(note)
            for module in part.modules()
            if type(module) is nn.Linear or isinstance(module, _Quantized)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def once(self) -> dict[int, Tensor]:
        """The inputs of layers that were called once, by the `id` of the layer."""
        counts = Counter(id(module) for module, _ in self.taken)
        return {id(module): taken for module, taken in self.taken if counts[id(module)] == 1}


def join(part: nn.Module, calls: Calls, ways: int, is_cut: Callable[[str, Any], bool]) -> None:
    """Join the products of layers of one module that take the same tensor.

    Args:
        part: the module.
        calls: of a run of it.
        ways: how many ranks share the part.
        is_cut: by the path of a tensor, whether ranks share it so. With `ways` above 1 only layers
            whose outputs are cut are joined.
    """
    rows = cg.cut(0, "tp")
    once = calls.once()
    for path, parent in list(part.named_modules()):
        groups: dict[tuple[int, bool, bool], dict[str, Any]] = {}
        for name, child in parent.named_children():
            is_quantized = isinstance(child, _Quantized)
            if not (is_quantized or type(child) is nn.Linear) or id(child) not in once:
                continue
            cuts = child.shardings(rows) if is_quantized else {"weight": rows}
            are_cut = all(is_cut(f"{path}.{name}.{key}", cut) for key, cut in cuts.items())
            if ways > 1 and not (are_cut and child.out_features % ways == 0):
                continue
            place = id(once[id(child)]), child.bias is not None, is_quantized
            groups.setdefault(place, {})[name] = child
        for layers in groups.values():
            if len(layers) > 1:
                _replace(parent, layers, ways)


def _replace(parent: nn.Module, layers: Mapping[str, Any], ways: int) -> None:
    several = list(layers.values())
    first, *others = several
    joined: _Pieces
    if isinstance(first, _Quantized):
        layer = first.joined(others, ways)
        if layer is None:
            return
        joined = JoinedQuantized(layer, several, ways)
    else:
        joined = Joined(several, ways)
    for index, name in enumerate(layers):
        setattr(parent, name, JoinedLayer(joined, index) if index else joined)


def project(part: nn.Module) -> None:
    """Replace the float32 linear layers of a part by faster ones, if it runs on CPUs.

    Small layers stay, but their weights are laid out anew.
    """
    if torch.accelerator.is_available() or not torch.backends.mkldnn.is_available():
        return
    for parent in list(part.modules()):
        for name, child in list(parent.named_children()):
            if type(child) not in (nn.Linear, Joined):
                continue
            if child.weight is None or child.weight.dtype is not torch.float32:
                continue  # another part has the weight
            if child.weight.numel() < projections.SMALL:
                transposed = child.weight.detach().t().contiguous().t()
                child.weight = nn.Parameter(transposed, requires_grad=False)
            elif isinstance(child, Joined):
                child.pack_weight()
            else:
                setattr(parent, name, Projection(child))


def replace_norms(part: nn.Module) -> None:
    """Replace modules that compute what `RmsNorm` does, as a try of each kind shows."""
    for parent in list(part.modules()):
        for name, child in list(parent.named_children()):
            epsilon = _epsilon(child)
            if epsilon is not None:
                setattr(parent, name, RmsNorm(child, epsilon))


def _epsilon(norm: nn.Module) -> float | None:
    """The number that a norm adds to the mean of squares; None if the module is no such norm."""
    parameters = dict(norm.named_parameters())
    settings = vars(norm)
    epsilon = settings.get("variance_epsilon", settings.get("eps"))
    if list(parameters) != ["weight"] or parameters["weight"].ndim != 1:
        return None
    if not isinstance(epsilon, float) or list(norm.children()) or list(norm.buffers()):
        return None
    if len(inspect.signature(norm.forward).parameters) != 1:
        return None  # it may be given more, such as a gate
    weight = parameters["weight"]
    x = torch.linspace(-1, 1, 2 * len(weight), dtype=weight.dtype).view(2, -1)
    # Rows as small as the epsilon tell apart where it is added.
    x = torch.cat([x, x * epsilon**0.5])
    try:
        with torch.no_grad():
            values = norm(x)
            is_equal = torch.allclose(
                values, RmsNorm(norm, epsilon)(x), rtol=1e-5 if x.dtype is torch.float32 else 1e-2
            )
    except (TypeError, ValueError, RuntimeError):
        return None  # it takes something else
    return epsilon if is_equal else None
